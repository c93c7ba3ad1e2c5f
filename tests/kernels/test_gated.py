"""swiglu and geglu: in jnp, in Triton's interpreter, and as compiled."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import jtbridge
from jtbridge.kernels import geglu, swiglu
from jtbridge.kernels._gated import configurations, op, reference, unsupported_reason
from jtbridge.kernels._launch import interpreting

from .harness import (
    ARCHITECTURES,
    assert_close,
    candidate_counts,
    compiled,
    kernels_in,
    launches,
    needs_compiler,
    needs_kernels,
    needs_triton,
    normal,
    recorded,
)

gelu = torch.nn.functional.gelu
ALL = {
    "swiglu": (swiglu, lambda g, u: jax.nn.silu(g) * u, torch.nn.functional.silu),
    "geglu": (geglu, lambda g, u: jax.nn.gelu(g) * u, functools.partial(gelu, approximate="tanh")),
    "geglu exactly": (
        functools.partial(geglu, approximate="none"),
        lambda g, u: jax.nn.gelu(g, approximate=False) * u,
        gelu,
    ),
}
each = pytest.mark.parametrize("name", ALL)


@each
@settings(max_examples=15)
@given(
    shape=st.sampled_from([(1,), (7,), (1023,), (1024,), (3, 700), (2, 1, 5)]),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    seed=st.integers(0, 9),
)
def test_matches_torch(name, shape, dtype, seed):
    f, _, activation = ALL[name]
    gate, up, ct = (2 * normal(*shape, dtype=dtype, seed=seed + i) for i in range(3))
    # torch rounds after the activation, so the expected values are computed in float32.
    tensors = [jtbridge.to_torch(x).float().requires_grad_() for x in (gate, up)]
    want = activation(tensors[0]) * tensors[1]
    want.backward(jtbridge.to_torch(ct).float())
    got, pull = jax.vjp(f, gate, up)
    # The exact activation adds 1 and an error function near -1, where few numbers are left.
    terms = max(float(jnp.abs(x).max()) for x in (gate, up, ct))
    assert_close(got, jtbridge.to_jax(want.detach()).astype(dtype), terms=terms)
    assert_close(pull(ct), tuple(jtbridge.to_jax(t.grad).astype(dtype) for t in tensors), terms=terms)


@needs_kernels
@each
@pytest.mark.parametrize("configuration", configurations.candidates(), ids=str)
def test_every_configuration_gives_the_same_result(name, configuration, monkeypatch):
    f, theirs, _ = ALL[name]
    monkeypatch.setattr(op, "candidates", lambda: [configuration])
    gate, up, ct = (normal(5000, seed=seed) for seed in range(3))  # full blocks, and one partial block
    with recorded() as found:
        assert_close(_forward_and_backward(f)(gate, up, ct), _forward_and_backward(theirs)(gate, up, ct))
    held = [(kernel, constants["block"], warps) for kernel, constants, warps in found]
    assert held == [(kernel, *dataclasses.astuple(configuration)) for kernel in ("gated_forward", "gated_backward")]


@each
def test_large_inputs(name):
    f, theirs, _ = ALL[name]
    gate = jnp.array([-8.0, -4.0, 0.0, 4.0, 8.0])
    up = jnp.full(5, 3.0)
    assert_close(f(gate, up), theirs(gate, up))
    ours, want = (jax.grad(lambda g, h=h: h(g, up).sum())(gate) for h in (f, theirs))
    assert_close(ours, want)


@each
def test_transforms(name):
    f, theirs, _ = ALL[name]
    gate, up = normal(3, 2, 5), normal(3, 2, 5, seed=1)

    def loss(h):
        return lambda g, u: (h(g, u) ** 2).sum()

    for axes in [(0, 0), (1, 1), (0, None), (None, 0)]:
        args = [gate if axes[0] is not None else gate[0], up if axes[1] is not None else up[0]]
        batched = {h: jax.vmap(loss(h), axes) for h in (f, theirs)}
        ours, want = (jax.vmap(jax.grad(loss(h), (0, 1)), axes)(*args) for h in (f, theirs))
        assert_close(ours, want, factor=2)
        ours, want = (jax.grad(lambda *xs, g=g: g(*xs).sum(), (0, 1))(*args) for g in batched.values())
        assert_close(ours, want, factor=2)
    small = (gate[0, 0, :3], up[0, 0, :3])
    assert_close(jax.hessian(loss(f), (0, 1))(*small), jax.hessian(loss(theirs), (0, 1))(*small), factor=4)
    twice = [jax.jacrev(jax.jacrev(loss(h), (0, 1)), (0, 1))(*small) for h in (f, theirs)]
    assert_close(*twice, factor=4)
    along = [jax.jvp(loss(h), (gate, up), (up, gate))[1] for h in (f, theirs)]
    assert_close(*along, factor=4)


def test_unsupported_arguments_use_jnp():
    x = jnp.zeros((2, 3))
    assert unsupported_reason(x, x) is None
    assert unsupported_reason(x[:0], x[:0]) == "`gate` has no elements"
    assert unsupported_reason(x.astype(int), x) == "`gate` is int32, the kernel takes float32, bfloat16, float16"
    assert unsupported_reason(x.astype("float16"), x) == "`gate` is float16 and `up` is float32"
    assert swiglu(x[:0], x[:0]).shape == (0, 3)
    assert swiglu(jnp.ones(2, "float16"), jnp.ones(2, "float16")).dtype == "float16"


def test_double_precision_is_preserved(x64):
    gate = jnp.linspace(-3, 3, 7)
    assert swiglu(gate, gate).dtype == "float64"
    assert jnp.allclose(swiglu(gate, gate), gate**2 / (1 + jnp.exp(-gate)), rtol=1e-14)


def test_invalid_arguments_are_refused():
    with pytest.raises(ValueError, match=r"^`up` has shape \(3,\), expected that of `gate`, \(2,\)$"):
        swiglu(jnp.zeros(2), jnp.zeros(3))
    with pytest.raises(ValueError, match=r"^`approximate` is 'erf', expected 'tanh' or 'none'$"):
        geglu(jnp.zeros(2), jnp.zeros(2), approximate="erf")
    with pytest.raises(TypeError, match=r"^`up` is int32, not of a real floating-point dtype$"):
        swiglu(jnp.zeros(2), jnp.zeros(2, jnp.int32))
    with pytest.raises(TypeError, match=r"^`up` is float32, expected the dtype of `gate`, bfloat16$"):
        swiglu(jnp.zeros(2, jnp.bfloat16), jnp.zeros(2))


def _forward_and_backward(f):
    def both(gate, up, ct):
        y, pull = jax.vjp(f, gate, up)
        return y, pull(ct)

    return both


@needs_triton
@needs_compiler
@each
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(("size", "dtype"), [(12_345, "bfloat16"), (4096, "float32")])
@candidate_counts
def test_configurations_compile_without_spilling(name, architecture, size, dtype, count, monkeypatch, tmp_path):
    x = normal(size, dtype=dtype)
    for configuration in configurations.candidates()[:count]:
        monkeypatch.setattr(op, "candidates", lambda configuration=configuration: [configuration])
        found = launches(_forward_and_backward(ALL[name][0]), x, x, x)
        assert [launch.kernel.__name__ for launch in found] == ["gated_forward", "gated_backward"]
        for launch in found:
            assert (launch.constants["block"], launch.num_warps) == dataclasses.astuple(configuration)
            usage = compiled(launch, architecture, tmp_path)
            assert usage.spilled == 0
            # Eight for each element of a thread, so that half of the threads an H100 has room for are there.
            assert usage.registers <= 8 * configuration.block // (32 * configuration.warps)
            assert usage.shared == 0


def test_configurations():
    assert configurations.candidates()[0] == configurations.default() == configurations.GatedConfiguration(1024, 4)
    assert len(set(configurations.candidates())) == 5


@needs_triton
@needs_compiler
@pytest.mark.parametrize("platforms", [("cuda",), ("cpu", "cuda")])
def test_one_program_has_the_kernels_for_a_gpu(platforms):
    x = normal(2, 100)
    assert kernels_in(_forward_and_backward(swiglu), x, x, x, platforms=platforms) == [
        "gated_forward",
        "gated_backward",
    ]
    assert kernels_in(swiglu, x, x, platforms=("cpu",)) == []


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_with_the_activation_rounded(activation, dtype):
    """As in the code of models: the activation and the product are separate operators in half precision."""
    gate, up, ct = (normal(5000, dtype=dtype, seed=seed) for seed in range(3))
    kernel = op.differentiable_kernel(activation, rounded=True)
    (y,), (by_gate, by_up) = jax.jit(kernel.forward)(gate, up), jax.jit(kernel.backward)(gate, up, ct)

    activated, pull = jax.vjp(lambda x: reference.activate(x, activation), gate.astype("float32"))
    activated, by_activated = activated.astype(dtype), ct * up
    want = activated * up, pull(by_activated.astype("float32"))[0].astype(dtype), ct * activated
    assert_close((y, by_gate, by_up), want)
    # Few activations are so near the middle of two numbers that they are rounded to the other number.
    if dtype == "float16" or (dtype == "bfloat16" and not interpreting()):  # which does not round to bfloat16
        assert all(jnp.mean(a != b) < 5e-3 for a, b in zip((y, by_gate, by_up), want, strict=True))
