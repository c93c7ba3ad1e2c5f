"""softmax and log_softmax: in jnp, in Triton's interpreter, and as compiled."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import jtbridge
from jtbridge.kernels import log_softmax, softmax
from jtbridge.kernels._softmax import configurations, op, unsupported_reason
from jtbridge.kernels._softmax.configurations import SoftmaxConfiguration

from .harness import (
    ARCHITECTURES,
    assert_close,
    candidate_counts,
    compiled,
    kernels_in,
    launches,
    made_for,
    needs_compiler,
    needs_kernels,
    needs_triton,
    normal,
    recorded,
)

BOTH = {
    "softmax": (softmax, jax.nn.softmax, torch.softmax),
    "log_softmax": (log_softmax, jax.nn.log_softmax, torch.log_softmax),
}
both = pytest.mark.parametrize("name", BOTH)


@both
@given(rows=st.integers(1, 5), n=st.integers(1, 300), dtype=st.sampled_from(["float32", "bfloat16", "float16"]))
def test_matches_torch(name, rows, n, dtype):
    f, _, theirs = BOTH[name]
    x = 3 * normal(rows, n, dtype=dtype, seed=n)
    tensor = jtbridge.to_torch(x).clone().requires_grad_()
    want = theirs(tensor, -1)
    ct = normal(rows, n, dtype=dtype, seed=1)
    want.backward(jtbridge.to_torch(ct))
    got, pull = jax.vjp(f, x)
    assert_close(got, jtbridge.to_jax(want.detach()))
    assert_close(pull(ct)[0], jtbridge.to_jax(tensor.grad), factor=2)


@both
@pytest.mark.parametrize(("rows", "n"), [(1, 3), (7, 5), (65, 2), (130, 1), (33, 31)])
def test_tiles_of_short_rows(name, rows, n):
    """The last tile has fewer rows than the others."""
    f, theirs, _ = BOTH[name]
    x, ct = 3 * normal(rows, n), normal(rows, n, seed=1)
    x = x.at[rows // 2, 0].set(-jnp.inf) if n > 1 else x
    want, pulled = jax.vjp(theirs, x)
    got, pull = jax.vjp(f, x)
    assert_close(got, want)
    kept = jnp.arange(rows) != rows // 2  # the gradient of the reference is NaN where x is -inf
    assert_close(pull(ct)[0][kept], pulled(ct)[0][kept], factor=4)
    assert jnp.isnan(f(jnp.full((rows, n), -jnp.inf))).all()


@needs_kernels
@both
@pytest.mark.parametrize(("rows", "n"), [(3, 5), (23, 100), (70, 1000), (5, 20_000)])
def test_every_configuration_gives_the_same_result(name, rows, n, monkeypatch):
    f, theirs, _ = BOTH[name]
    x, ct = normal(rows, n), normal(rows, n, seed=1)
    want, pulled = jax.vjp(theirs, x)
    for configuration in configurations.candidates(rows, n):
        monkeypatch.setattr(op, "candidates", lambda *_, configuration=configuration: [configuration])
        with recorded() as found:
            got, pull = jax.vjp(f, x)
            assert_close((got, *pull(ct)), (want, *pulled(ct)), factor=4)
        assert [kernel for kernel, _, _ in found] == ["softmax_forward", "softmax_backward"]
        for _, constants, warps in found:
            assert SoftmaxConfiguration(constants["tile"], constants["block"], warps) == configuration


@both
def test_long_rows_are_split_into_blocks(name, monkeypatch):
    f, theirs, _ = BOTH[name]
    monkeypatch.setattr(configurations, "_LONGEST", 64)
    monkeypatch.setattr(configurations, "_PIECE", 32)
    op.differentiable_kernel.cache_clear()
    x = normal(3, 100).at[1, :40].set(-jnp.inf)
    assert_close(f(x), theirs(x))
    ct = normal(3, 100, seed=1)
    assert_close(jax.vjp(f, x)[1](ct)[0][::2], jax.vjp(theirs, x)[1](ct)[0][::2], factor=4)


@both
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_axes_and_transforms(name, axis):
    f, theirs, _ = BOTH[name]
    x = normal(3, 4, 7)

    def loss(g):
        return lambda x: (g(x, axis) ** 2).sum()

    assert_close(f(x, axis), theirs(x, axis))
    assert_close(jax.vmap(jax.grad(loss(f)))(x[None]), jax.vmap(jax.grad(loss(theirs)))(x[None]), factor=8)
    assert_close(
        jax.grad(lambda x: jax.vmap(loss(f), 1)(x[None]).sum())(x)[..., :1],
        jax.grad(lambda x: jax.vmap(loss(theirs), 1)(x[None]).sum())(x)[..., :1],
        factor=8,
    )
    small = x[:2, :2, :3]
    assert_close(jax.hessian(loss(f))(small), jax.hessian(loss(theirs))(small), factor=8)
    assert_close(jax.jacrev(jax.jacrev(loss(f)))(small), jax.hessian(loss(theirs))(small), factor=8)
    assert_close(jax.jvp(loss(f), (x,), (x,))[1], jax.jvp(loss(theirs), (x,), (x,))[1], factor=8)


def test_unsupported_arguments_use_jnp():
    assert unsupported_reason(jnp.zeros((2, 3))) is None
    assert unsupported_reason(jnp.zeros((2, 0))) == "`x` has no elements"
    assert unsupported_reason(jnp.zeros(3, jnp.int32)) == "`x` is int32, the kernel takes float32, bfloat16, float16"
    assert softmax(jnp.zeros((2, 0))).shape == (2, 0)


@needs_triton
@needs_compiler
@both
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(("rows", "n"), [(2, 100), (1000, 77), (2, 4096), (2, 50_000)])
@candidate_counts
def test_configurations_compile_without_spilling(name, architecture, rows, n, count, monkeypatch, tmp_path):
    f = BOTH[name][0]
    x = normal(rows, n, dtype="bfloat16")
    for configuration in configurations.candidates(rows, n)[:count]:
        monkeypatch.setattr(op, "candidates", lambda rows, n, configuration=configuration: [configuration])
        found = launches(lambda x, ct: jax.vjp(f, x)[1](ct), x, x)
        assert [launch.kernel.__name__ for launch in found] == ["softmax_forward", "softmax_backward"]
        for launch in found:
            assert launch.num_warps == configuration.warps
            usage = compiled(launch, architecture, tmp_path)
            assert usage.spilled == 0
            assert usage.registers <= 128
            assert usage.shared <= 1024


@needs_triton
@needs_compiler
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("n", [32, 64, 128, 1024])
def test_short_rows_compile_to_loads_of_16_bytes(n, architecture):
    x = normal(300, n, dtype="bfloat16")
    for launch in launches(lambda x, ct: jax.vjp(softmax, x)[1](ct), x, x):
        text = made_for(launch, "cuda", architecture, 32).asm["ptx"]
        assert set(re.findall(r"(?:ld|st)\.global(\S*)", text)) == {".v4.b32"}


def test_configurations():
    assert configurations.default(8, 4096) == SoftmaxConfiguration(1, 4096, 16)
    assert configurations.default(1000, 100) == SoftmaxConfiguration(8, 128, 4)
    assert configurations.default(1000, 3) == SoftmaxConfiguration(64, 4, 1)
    assert configurations.default(3, 3) == SoftmaxConfiguration(4, 4, 1)
    assert configurations.default(1000, 50_000) == SoftmaxConfiguration(1, 4096, 16)
    assert [c.warps for c in configurations.candidates(8, 4096)] == [16, 8]
    assert [c.warps for c in configurations.candidates(8, 1024)] == [4, 2, 8]
    assert [c.warps for c in configurations.candidates(8, 16_384)] == [16]
    assert [(c.tile, c.warps) for c in configurations.candidates(8, 100)] == [(8, 4), (8, 2), (8, 8), (1, 1)]


@needs_triton
@needs_compiler
@pytest.mark.parametrize("platforms", [("cuda",), ("cpu", "cuda")])
def test_one_program_has_the_kernels_for_a_gpu(platforms):
    x = normal(2, 100)
    assert kernels_in(jax.grad(lambda x: softmax(x)[0, 0]), x, platforms=platforms) == [
        "softmax_forward",
        "softmax_backward",
    ]
    assert kernels_in(softmax, x, platforms=("cpu",)) == []
