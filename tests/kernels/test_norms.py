"""layer_norm and rms_norm: in jnp, in Triton's interpreter, and as compiled."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import jtbridge
from jtbridge.kernels import layer_norm, rms_norm
from jtbridge.kernels._launch import interpreting
from jtbridge.kernels._norms import configurations, op, unsupported_reason
from jtbridge.kernels._norms.configurations import NormConfiguration

from .harness import (
    ARCHITECTURES,
    assert_close,
    candidate_counts,
    compiled,
    in_turn,
    kernels_in,
    launches,
    needs_compiler,
    needs_kernels,
    needs_triton,
    normal,
    recorded,
)

DTYPES = st.sampled_from(["float32", "bfloat16", "float16"])
# Sums over a few hundred products of rounded numbers, and the reference's own rounding of its residuals.
SUMS = 4


def layer(x, weight=None, bias=None, *, eps=1e-5, residual=None):
    """Compute layer_norm by its formula."""
    h = x if residual is None else x + residual
    centred = h - h.mean(-1, keepdims=True)
    y = centred / jnp.sqrt(jnp.square(centred).mean(-1, keepdims=True) + eps)
    y = y if weight is None else y * weight
    y = y if bias is None else y + bias
    return y if residual is None else (y, h)


def rms(x, weight=None, *, eps=1e-6, residual=None, offset=0.0):
    """Compute rms_norm by its formula."""
    h = x if residual is None else x + residual
    y = h / jnp.sqrt(jnp.square(h).mean(-1, keepdims=True) + eps)
    y = y if weight is None else y * (offset + weight)
    return y if residual is None else (y, h)


BOTH = {"layer_norm": (layer_norm, layer, 2), "rms_norm": (rms_norm, rms, 1)}
both = pytest.mark.parametrize("name", BOTH)


def _weights(name, n, dtype="float32", batch=()):
    return tuple(normal(*batch, n, dtype=dtype, seed=7 + i) for i in range(BOTH[name][2]))


def _pulled(f):
    """Return the result of `f`, and the gradients of its arguments."""

    def run(ct, *args):
        y, pull = jax.vjp(f, *args)
        return y, pull(ct)

    return run


@settings(max_examples=15)
@given(rows=st.integers(1, 9), n=st.integers(5, 150), dtype=DTYPES, affine=st.sampled_from(["", "w", "b", "wb"]))
def test_layer_norm_matches_torch(rows, n, dtype, affine):
    x, ct = 3 * normal(rows, n, dtype=dtype, seed=n) + 1, normal(rows, n, dtype=dtype, seed=1)
    given = {name: normal(n, dtype=dtype, seed=i) for i, name in enumerate(["weight", "bias"]) if name[0] in affine}
    tensor = jtbridge.to_torch(x).float().requires_grad_()
    tensors = {name: jtbridge.to_torch(w).float().requires_grad_() for name, w in given.items()}
    want = torch.nn.functional.layer_norm(tensor, (n,), **tensors)
    want.backward(jtbridge.to_torch(ct).float())
    got, (grad, grads) = _pulled(lambda x, given: layer_norm(x, **given))(ct, x, given)
    assert_close(got, jtbridge.to_jax(want.detach()).astype(dtype))
    assert_close(grad, jtbridge.to_jax(tensor.grad).astype(dtype), factor=SUMS)
    for key, value in grads.items():
        assert_close(value, jtbridge.to_jax(tensors[key].grad).astype(dtype), factor=SUMS)


@settings(max_examples=15)
@given(
    rows=st.integers(1, 9), n=st.integers(5, 150), dtype=DTYPES, affine=st.booleans(), offset=st.sampled_from([0, 1])
)
def test_rms_norm_matches_torch(rows, n, dtype, affine, offset):
    x, ct = 3 * normal(rows, n, dtype=dtype, seed=n), normal(rows, n, dtype=dtype, seed=1)
    given = {"weight": normal(n, dtype=dtype, seed=3)} if affine else {}
    tensor = jtbridge.to_torch(x).float().requires_grad_()
    tensors = {name: jtbridge.to_torch(w).float().requires_grad_() for name, w in given.items()}
    want = torch.nn.functional.rms_norm(tensor, (n,), **{k: v + offset for k, v in tensors.items()}, eps=1e-3)
    want.backward(jtbridge.to_torch(ct).float())
    f = functools.partial(rms_norm, eps=1e-3, offset=offset)
    got, (grad, grads) = _pulled(lambda x, given: f(x, **given))(ct, x, given)
    assert_close(got, jtbridge.to_jax(want.detach()).astype(dtype))
    assert_close(grad, jtbridge.to_jax(tensor.grad).astype(dtype), factor=SUMS)
    for key, value in grads.items():
        assert_close(value, jtbridge.to_jax(tensors[key].grad).astype(dtype), factor=SUMS)


@both
@pytest.mark.parametrize("n", [1, 2, 3])
def test_rows_of_a_few_numbers(name, n):
    f, theirs, _ = BOTH[name]
    x, ct = normal(40, n), normal(40, n, seed=1)
    weights = _weights(name, n)
    # Normalized rows of so few numbers are only signs, and their gradients cancel. A large `eps` avoids both.
    ours, want = (_pulled(functools.partial(h, eps=1.0))(ct, x, *weights) for h in (f, theirs))
    # Relative to the largest number of all: in a row of one number, only rounding is left of the gradient.
    assert_close(*(jnp.concatenate([y.ravel() for y in jax.tree.leaves(ys)]) for ys in (ours, want)), factor=SUMS)


@both
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_residual_is_added_and_returned(name, dtype):
    f, theirs, _ = BOTH[name]
    x, residual, ct, ct_h = (normal(5, 33, dtype=dtype, seed=i) for i in range(4))
    weights = _weights(name, 33)

    def wide(x, residual, *weights):
        y, h = theirs(x.astype(jnp.float32), *weights, residual=residual.astype(jnp.float32))
        return y.astype(dtype), h.astype(dtype)

    got = _pulled(lambda x, r, *w: f(x, *w, residual=r))((ct, ct_h), x, residual, *weights)
    want = _pulled(wide)((ct, ct_h), x, residual, *weights)
    assert got[0][1].dtype == dtype
    assert (got[1][0] == got[1][1]).all()
    # The result is computed from the rounded sum.
    assert_close(got[0], want[0], factor=2)
    assert_close(got[1][:2], want[1][:2], factor=SUMS)
    rounding = 1 if dtype == "float32" else 2e4  # float32 sums of numbers rounded to bfloat16
    assert_close(got[1][2:], want[1][2:], factor=rounding * SUMS)


@both
@pytest.mark.parametrize("residual", [False, True])
def test_long_rows_are_split_into_blocks(name, residual, monkeypatch):
    f, theirs, _ = BOTH[name]
    for limit, value in {"_LONGEST": 64, "_LONGEST_BACKWARD": 64, "_PIECE": 32, "_COLUMNS": 32, "_ROOM": 512}.items():
        monkeypatch.setattr(configurations, limit, value)
    op.differentiable_kernel.cache_clear()
    x, ct = 100 + normal(7, 100), normal(7, 100, seed=1)  # a mean that would cancel
    weights = _weights(name, 100)
    args = (x, *([x - 200] if residual else []), *weights)
    cts = (ct, 2 * ct) if residual else ct

    def of(h):
        return _pulled((lambda x, r, *w: h(x, *w, residual=r)) if residual else h)

    assert_close(of(f)(cts, *args), of(theirs)(cts, *args), factor=8)
    batched = [jax.vmap(of(h))(*jax.tree.map(lambda a: jnp.stack([a, a[::-1]]), (cts, *args))) for h in (f, theirs)]
    assert_close(*batched, factor=8)
    op.differentiable_kernel.cache_clear()


@both
def test_programs_process_several_rows(name, monkeypatch):
    f, theirs, _ = BOTH[name]
    monkeypatch.setattr(configurations, "_ROOM", 3 * 64)
    monkeypatch.setattr(configurations, "_TILE_BACKWARD", 32)
    op.differentiable_kernel.cache_clear()
    x, ct = normal(23, 13), normal(23, 13, seed=1)
    weights = _weights(name, 13)
    assert_close(_pulled(f)(ct, x, *weights), _pulled(theirs)(ct, x, *weights), factor=SUMS)
    op.differentiable_kernel.cache_clear()


def _turns(rows, n, loaded, monkeypatch, count=None):
    """Set each of the first `count` candidates of each kernel at least once, and yield them by the kernel's name."""
    tables = (
        configurations.candidates_forward(rows, n),
        configurations.candidates_sums(),
        configurations.candidates_backward(rows, n, loaded),
    )
    for forward, sums, backward in in_turn(*(table[:count] for table in tables)):
        op.differentiable_kernel.cache_clear()
        monkeypatch.setattr(op, "candidates_forward", lambda *_, c=forward: [c])
        monkeypatch.setattr(op, "candidates_sums", lambda c=sums: [c])
        monkeypatch.setattr(op, "candidates_backward", lambda *_, c=backward: [c])
        held = {"norm_forward": forward, "norm_forward_pieces": forward}
        yield held | {"norm_backward_sums": sums, "norm_backward": backward}
    op.differentiable_kernel.cache_clear()


def _as_configured(configuration, constants, warps):
    given = dataclasses.asdict(configuration)
    return all(constants.get(name, given[name]) == given[name] for name in given) and warps == given["warps"]


@needs_kernels
@both
@pytest.mark.parametrize(("rows", "n"), [(23, 100), (70, 1000), (9, 20_000)])
@pytest.mark.parametrize("batched", [False, True])
def test_every_configuration_gives_the_same_result(name, rows, n, batched, monkeypatch):
    f, theirs, _ = BOTH[name]
    monkeypatch.setattr(configurations, "_ROOM", 2 * configurations._TILE_BACKWARD)  # programs of several tiles
    cts, args = tuple(normal(2, rows, n, seed=i) for i in (0, 1)), [normal(2, rows, n, seed=i) for i in (2, 3)]
    args += _weights(name, n, batch=(2,))
    every = (cts, *args) if batched else jax.tree.map(lambda x: x[0], (cts, *args))

    def of(h):
        pulled = _pulled(lambda x, r, *w: h(x, *w, residual=r))
        return (jax.vmap(pulled) if batched else pulled)(*every)

    want = of(theirs)
    for turn in _turns(2 * rows if batched else rows, n, 12, monkeypatch):
        with recorded() as found:
            assert_close(of(f), want, factor=SUMS)
        assert len(found) == 2 + (n > configurations._LONGEST_BACKWARD)
        for kernel, constants, warps in found:
            assert _as_configured(turn[kernel], constants, warps)


@both
def test_vmap_over_rows_and_weights(name):
    f, theirs, count = BOTH[name]
    ct = normal(3, 2, 5)
    for x_axis, axis in [(0, 0), (1, None), (None, 1)]:
        x = normal(3, 2, 5, seed=1) if x_axis != 1 else normal(2, 3, 5, seed=1)
        x = x if x_axis is not None else x[0]
        weights = _weights(name, 5, batch=() if axis is None else (3,))
        weights = tuple(w.T if axis == 1 else w for w in weights)
        axes = (0, x_axis, *[axis] * count)
        got, want = (jax.vmap(_pulled(h), axes)(ct, x, *weights) for h in (f, theirs))
        assert_close(got, want, factor=SUMS)
    # One weight is batched, the others are not.
    weights = (normal(3, 5), *_weights(name, 5)[1:])
    axes = (0, 0, 0, *[None] * (count - 1))
    got, want = (jax.vmap(_pulled(h), axes)(ct, normal(3, 2, 5, seed=1), *weights) for h in (f, theirs))
    assert_close(got, want, factor=SUMS)
    cts, xs = normal(2, 3, 4, 5), normal(2, 3, 4, 5, seed=1)
    inner = _weights(name, 5, batch=(3,))
    got, want = (jax.vmap(lambda ct, x, h=h: jax.vmap(_pulled(h))(ct, x, *inner))(cts, xs) for h in (f, theirs))
    assert_close(got, want, factor=SUMS)
    outer = _weights(name, 5, batch=(2,))
    nested = (jax.vmap(jax.vmap(_pulled(h), (0, 0, *[None] * count)))(cts, xs, *outer) for h in (f, theirs))
    assert_close(*nested, factor=SUMS)


@both
def test_derivatives(name):
    f, theirs, _ = BOTH[name]
    x = normal(2, 3)
    weights = _weights(name, 3)
    every = tuple(range(1 + len(weights)))

    def loss(h):
        return lambda *args: (h(*args) ** 3).sum()

    small = (x, *weights)
    assert_close(jax.hessian(loss(f), every)(*small), jax.hessian(loss(theirs), every)(*small), factor=16)
    twice = [jax.jacrev(jax.jacrev(loss(h), every), every)(*small) for h in (f, theirs)]
    assert_close(*twice, factor=16)
    along = [jax.jvp(loss(h), small, small[:1] + weights)[1] for h in (f, theirs)]
    assert_close(*along, factor=8)
    through = [
        jax.grad(lambda *a, h=h: jax.vmap(loss(h), (0, *[None] * len(weights)))(*a).sum(), every) for h in (f, theirs)
    ]
    assert_close(through[0](*small), through[1](*small), factor=8)


def test_unsupported_arguments_use_jnp():
    x = jnp.zeros((2, 3))
    assert unsupported_reason(x, x[0], x[0], x) is None
    assert unsupported_reason(x[:0]) == "`x` has no elements"
    assert layer_norm(x[:0], x[0], residual=x[:0])[0].shape == (0, 3)
    assert rms_norm(x[:, :0]).shape == (2, 0)
    assert rms_norm(x[:0, :0]).shape == (0, 0)
    assert layer_norm(x[0]).shape == (3,)


def test_double_precision_is_preserved(x64):
    x, weight = jnp.linspace(-3, 3, 8).reshape(2, 4), jnp.arange(4.0)
    assert unsupported_reason(x) == "`x` is float64, the kernel takes float32, bfloat16, float16"
    assert jnp.allclose(layer_norm(x, weight), layer(x, weight), rtol=1e-14)
    assert rms_norm(x).dtype == "float64"


def test_invalid_arguments_are_refused():
    x = jnp.zeros((2, 3))
    with pytest.raises(TypeError, match=r"^`x` is int32, not of a real floating-point dtype$"):
        layer_norm(jnp.zeros(3, int))
    with pytest.raises(ValueError, match=r"^`x` has no dimension to be normalized over$"):
        rms_norm(jnp.zeros(()))
    with pytest.raises(ValueError, match=r"^`weight` has shape \(2,\), expected \(3,\) for `x` of shape \(2, 3\)$"):
        rms_norm(x, jnp.zeros(2))
    with pytest.raises(ValueError, match=r"^`residual` has shape \(3,\), expected that of `x`, \(2, 3\)$"):
        rms_norm(x, residual=x[0])
    with pytest.raises(TypeError, match=r"^`residual` is float16, expected the dtype of `x`, float32$"):
        layer_norm(x, residual=x.astype("float16"))


@needs_triton
@needs_compiler
@both
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(
    ("n", "dtype", "residual"),
    [
        (100, "bfloat16", False),
        (4096, "bfloat16", True),
        (8192, "float32", True),
        (16384, "bfloat16", True),
        (50_000, "bfloat16", False),
    ],
)
@candidate_counts
def test_configurations_compile_without_spilling(name, architecture, n, dtype, residual, count, monkeypatch, tmp_path):
    f, _, _ = BOTH[name]
    x = jnp.zeros((300, n), dtype)
    args = (x, *([x] if residual else []), *_weights(name, n))
    longer = ["norm_backward_sums"] if n > 8192 else []
    for turn in _turns(300, n, (2 + residual) * x.dtype.itemsize, monkeypatch, count):
        fn = _pulled((lambda x, r, *w: f(x, *w, residual=r)) if residual else f)  # another one is traced again
        found = launches(fn, (x, x) if residual else x, *args)
        assert [launch.kernel.__name__ for launch in found] == [
            "norm_forward" if n <= 16384 else "norm_forward_pieces",
            *longer,
            "norm_backward",
        ]
        for launch in found:
            assert _as_configured(turn[launch.kernel.__name__], launch.constants, launch.num_warps)
            usage = compiled(launch, architecture, tmp_path)
            assert usage.spilled == 0
            assert usage.registers * 32 * launch.num_warps <= 65536
            # Of an A100's 163 KiB and an H100's 227 for a program. Rows on their way are in the backward alone; weights
            # that several rows have in common are handed from thread to thread, in float32.
            tile, block = launch.constants.get("tile", 1), launch.constants["block"]
            handed = 4 * block if tile > 1 else 0
            assert usage.shared <= (97 * 1024 if usage.name == "norm_backward" else 4096) + handed


def test_configurations():
    assert configurations.candidates_forward(300, 4096) == [
        NormConfiguration(1, 4096, 8),
        NormConfiguration(1, 4096, 4),
        NormConfiguration(1, 4096, 16),
        NormConfiguration(2, 4096, 16),
    ]
    assert configurations.candidates_forward(1, 5) == [NormConfiguration(1, 8, 1)]
    assert configurations.candidates_forward(3, 50_000) == configurations.candidates_sums()
    assert configurations.candidates_sums() == [
        NormConfiguration(1, 4096, 8),
        NormConfiguration(1, 4096, 4),
        NormConfiguration(1, 4096, 16),
        NormConfiguration(1, 2048, 4),
        NormConfiguration(1, 8192, 16),
    ]
    assert configurations.candidates_backward(300, 4096, 4) == [
        NormConfiguration(1, 4096, 8, 3),
        NormConfiguration(1, 4096, 16, 3),
        NormConfiguration(1, 4096, 8, 2),
        NormConfiguration(2, 4096, 16, 3),
    ]
    # Rows that are being loaded may take no more shared memory than those of the default.
    assert configurations.candidates_backward(300, 4096, 12)[-1] == NormConfiguration(2, 4096, 16, 2)
    assert configurations.candidates_backward(300, 8192, 4)[1] == NormConfiguration(1, 8192, 32, 3)


def test_number_of_partial_sums_is_independent_of_tuning():
    assert configurations.programs(1, 300, 4096, summed=True) == 264
    assert configurations.programs(1, 300, 4096, summed=False) == 300
    assert configurations.programs(4, 300, 4096, summed=True) == 66
    assert configurations.programs(1, 7, 100, summed=True) == 1


@needs_triton
@needs_compiler
@pytest.mark.parametrize("platforms", [("cuda",), ("cpu", "cuda")])
def test_one_program_has_the_kernels_for_a_gpu(platforms):
    x = normal(2, 100)
    assert kernels_in(_pulled(rms_norm), x, x, x[0], platforms=platforms) == ["norm_forward", "norm_backward"]
    many = jax.vmap(_pulled(rms_norm))
    x = normal(3, 2, 100)
    assert kernels_in(many, x, x, x[:, 0], platforms=platforms) == ["norm_forward", "norm_backward"]
    assert kernels_in(rms_norm, x, platforms=("cpu",)) == []


@pytest.mark.parametrize("n", [6, 150, 20000])  # rows in registers, and in pieces
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_rounded_before_the_weight(n, dtype):
    """As in Llama, the normalized rows are rounded to the dtype of x before they are scaled."""
    x, weight = normal(1, 3, n, dtype=dtype), normal(1, n, dtype=dtype, seed=1)
    norm = op.Norm(False, 1e-6, 0.0, False, True, False, rounded=True)
    y, _ = jax.jit(op.differentiable_kernel(norm, (dtype,)).forward)(x, weight)
    wide = x.astype(jnp.float32)
    h = wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + 1e-6)
    want = np.asarray(h.astype(dtype)) * np.asarray(weight)[:, None]
    assert_close(y, jnp.asarray(want))
    # One in a thousand may be rounded to the other side: the sums are added up in another order. Triton's interpreter
    # does not round to bfloat16.
    if dtype == "float16" or (dtype == "bfloat16" and not interpreting()):
        assert np.mean(np.asarray(y) != want) <= 1e-3
