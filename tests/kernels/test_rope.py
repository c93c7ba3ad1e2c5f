"""rope and rope_qk: in jnp, in Triton's interpreter, and as compiled."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import jtbridge
from jtbridge.kernels import rope, rope_qk
from jtbridge.kernels._launch import interpreting
from jtbridge.kernels._rope import configurations, op, reference, unsupported_reason
from jtbridge.kernels._rope.configurations import RopeConfiguration
from jtbridge.kernels._rope.reference import Rotation

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

# Gradients of angles are sums over heads and batches.
SUMS = 4


def formula(x, cos, sin, *, interleaved=False):
    """`apply_rotary_pos_emb` of transformers' Llama or Cohere, for jnp and for torch, with angles of all the heads."""
    namespace = torch if isinstance(x, torch.Tensor) else jnp
    half = x.shape[-1] // 2
    if interleaved:
        rotated = namespace.stack((-x[..., 1::2], x[..., ::2]), -1).reshape(x.shape)
    else:
        rotated = namespace.concatenate((-x[..., half:], x[..., :half]), -1)
    return x * cos[..., None, :, :] + rotated * sin[..., None, :, :]


def _pulled(f):
    """Return the result of `f`, and the gradients of its arguments."""

    def run(ct, *args):
        y, pull = jax.vjp(f, *args)
        return y, pull(ct)

    return run


# Of halves, as it is by default, and of neighbours: the function, and its formula.
RULES = [(rope, formula), tuple(functools.partial(f, interleaved=True) for f in (rope, formula))]
rules = pytest.mark.parametrize(("rotate", "formula"), RULES, ids=["halves", "interleaved"])


@settings(max_examples=30)
@given(
    heads=st.tuples(st.integers(1, 6), st.integers(1, 3)),
    tokens=st.integers(1, 7),
    half=st.integers(1, 20),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    of_batch=st.booleans(),
    interleaved=st.booleans(),
)
def test_matches_torch(heads, tokens, half, dtype, of_batch, interleaved):
    xs = [normal(2, h, tokens, 2 * half, dtype=dtype, seed=i) for i, h in enumerate(heads)]
    # The two halves of the angles differ, which is allowed, and are not cosines.
    angles = [normal(*[2] * of_batch, tokens, 2 * half, dtype=dtype, seed=2 + i) for i in range(2)]
    cts = [normal(*x.shape, dtype=dtype, seed=4 + i) for i, x in enumerate(xs)]
    tensors = [jtbridge.to_torch(x).float().requires_grad_() for x in (*xs, *angles)]
    rule = {"interleaved": interleaved}
    want = [formula(tensor, *tensors[2:], **rule) for tensor in tensors[:2]]
    torch.autograd.backward(want, [jtbridge.to_torch(ct).float() for ct in cts])
    got, grads = _pulled(functools.partial(rope_qk, **rule))(tuple(cts), *xs, *angles)
    assert_close(got, tuple(jtbridge.to_jax(y.detach()).astype(dtype) for y in want))
    wanted = tuple(jtbridge.to_jax(t.grad).astype(dtype) for t in tensors)
    assert_close(grads[:2], wanted[:2])
    assert_close(grads[2:], wanted[2:], factor=SUMS)
    assert_close(rope(xs[0], *angles, **rule), got[0])
    assert_close(_pulled(functools.partial(rope, **rule))(cts[0], xs[0], *angles)[1][0], grads[0])


@pytest.mark.parametrize("interleaved", [False, True])
def test_many_tokens_use_several_programs(interleaved, monkeypatch):
    monkeypatch.setattr(configurations, "_BLOCK", 16)
    monkeypatch.setattr(configurations, "_HEADS", 2)
    op.differentiable_kernel.cache_clear()
    q, k, cos, sin = normal(2, 5, 9, 6), normal(2, 3, 9, 6, seed=1), normal(9, 6, seed=2), normal(9, 6, seed=3)
    cts = (q[:, ::-1], k[:, ::-1])
    rule = {"interleaved": interleaved}
    both = _pulled(lambda q, k, *angles: (formula(q, *angles, **rule), formula(k, *angles, **rule)))
    got = _pulled(functools.partial(rope_qk, **rule))(cts, q, k, cos, sin)
    assert_close(got, both(cts, q, k, cos, sin), factor=SUMS)
    op.differentiable_kernel.cache_clear()


@pytest.mark.parametrize("leading", [(), (2,), (2, 3)])
def test_leading_dimensions(leading):
    x, ct = normal(*leading, 2, 3, 4), normal(*leading, 2, 3, 4, seed=1)
    for shape in [(3, 4), (*leading, 3, 4)]:
        cos, sin = normal(*shape, seed=2), normal(*shape, seed=3)
        assert_close(_pulled(rope)(ct, x, cos, sin), _pulled(formula)(ct, x, cos, sin), factor=SUMS)


def test_angles_of_another_dtype():
    x, cos, sin = normal(2, 3, 4, dtype="bfloat16"), normal(3, 4, seed=1), normal(3, 4, seed=2)
    y, grads = _pulled(rope)(x, x, cos, sin)
    want, wanted = _pulled(formula)(x.astype("float32"), x.astype("float32"), cos, sin)
    assert_close((y, grads[0]), (want.astype("bfloat16"), wanted[0].astype("bfloat16")))
    assert_close(grads[1:], wanted[1:], factor=SUMS)


@pytest.mark.parametrize("axes", [(0, 0, 0), (1, None, None), (None, 0, 1), (0, None, 0)])
@pytest.mark.parametrize("of_batch", [False, True])
@rules
def test_vmap(axes, of_batch, rotate, formula):
    def array(axis, *shape, seed):
        return normal(*shape, seed=seed) if axis is None else normal(*shape[:axis], 3, *shape[axis:], seed=seed)

    shape = (*[2] * of_batch, 3, 4)
    x = array(axes[0], 2, 2, 3, 4, seed=1)
    angles = [array(axis, *shape, seed=2 + i) for i, axis in enumerate(axes[1:])]
    ct = normal(3, 2, 2, 3, 4)
    got, want = (jax.vmap(_pulled(h), (0, *axes))(ct, x, *angles) for h in (rotate, formula))
    assert_close(got, want, factor=SUMS)
    # A batch of batches.
    twice = [
        jax.vmap(jax.vmap(_pulled(h), (0, *axes)), (0, 0, None, None))(ct[None], x[None], *angles)
        for h in (rotate, formula)
    ]
    assert_close(*twice, factor=SUMS)


@rules
def test_derivatives(rotate, formula):
    args = (normal(2, 2, 4), normal(2, 4, seed=1), normal(2, 4, seed=2))

    def loss(h):
        return lambda *args: (h(*args) ** 3).sum()

    every = (0, 1, 2)
    assert_close(jax.hessian(loss(rotate), every)(*args), jax.hessian(loss(formula), every)(*args), factor=SUMS)
    twice = [jax.jacrev(jax.jacrev(loss(h), every), every)(*args) for h in (rotate, formula)]
    assert_close(*twice, factor=SUMS)
    assert_close(*(jax.jvp(loss(h), args, args)[1] for h in (rotate, formula)), factor=SUMS)
    batched = [jax.grad(lambda *a, h=h: jax.vmap(loss(h), (0, None, None))(*a).sum(), every) for h in (rotate, formula)]
    assert_close(*(g(args[0][None], *args[1:]) for g in batched), factor=SUMS)


def test_unsupported_arguments_use_jnp():
    x, cos = jnp.zeros((1, 2, 3, 4)), jnp.zeros((3, 4))
    assert unsupported_reason(cos, cos, x) is None
    assert unsupported_reason(cos, cos, x[:0]) == "`x` has no elements"
    assert unsupported_reason(cos, cos, x, x[:0]) == "`k` has no elements"
    assert unsupported_reason(cos, cos, x, x.astype("float16")) == "`q` is float32 and `k` is float16"
    assert unsupported_reason(cos.astype(int), cos, x) == "`cos` is int32, the kernel takes float32, bfloat16, float16"
    assert rope(x[:0], cos, cos).shape == (0, 2, 3, 4)
    assert [y.shape for y in rope_qk(x, x[:, :0], cos, cos)] == [(1, 2, 3, 4), (1, 0, 3, 4)]


def test_double_precision_is_preserved(x64):
    x, cos = jnp.linspace(0, 1, 24).reshape(2, 3, 4), jnp.linspace(1, 2, 12).reshape(3, 4)
    for rotate, wanted in RULES:
        assert jnp.allclose(rotate(x, cos, cos), wanted(x, cos, cos), rtol=1e-15)


def test_invalid_arguments_are_refused():
    x, cos = jnp.zeros((1, 2, 3, 4)), jnp.zeros((3, 4))
    with pytest.raises(
        ValueError, match=r"^`x` has shape \(1, 2, 3, 3\), expected \[..., heads, tokens, d\] with an even d$"
    ):
        rope(x[..., :3], cos, cos)
    with pytest.raises(
        ValueError, match=r"^`k` has shape \(1, 2, 2, 4\), expected that of `q`, \(1, 2, 3, 4\), except for"
    ):
        rope_qk(x, x[:, :, :2], cos, cos)
    with pytest.raises(ValueError, match=r"^`sin` has shape \(2, 4\), expected \(3, 4\) or \(1, 3, 4\) for `x` of"):
        rope(x, cos, cos[:2])
    for dtype in ("int32", "complex64"):
        with pytest.raises(TypeError, match=f"^`x` is {dtype}, not of a real floating-point dtype$"):
            rope(x.astype(dtype), cos, cos)


@needs_kernels
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("index", range(7))
def test_every_configuration_gives_the_same_result(interleaved, index, monkeypatch):
    table = configurations.candidates(5, 20, 64, interleaved)
    assert len(table) == 7
    monkeypatch.setattr(op, "candidates", lambda *_: [table[index]])
    # Full and partial blocks of heads and tokens.
    q, k = normal(2, 5, 20, 128), normal(2, 3, 20, 128, seed=1)
    cos, sin = normal(2, 20, 128, seed=2), normal(2, 20, 128, seed=3)
    rule = {"interleaved": interleaved}
    both = _pulled(lambda q, k, *angles: (formula(q, *angles, **rule), formula(k, *angles, **rule)))
    with recorded() as found:
        got = _pulled(functools.partial(rope_qk, **rule))((q + 1, k + 1), q, k, cos, sin)
    assert_close(got, both((q + 1, k + 1), q, k, cos, sin), factor=SUMS)
    held = [(constants["head_block"], constants["token_block"], warps) for _, constants, warps in found]
    assert held == [dataclasses.astuple(table[index])] * 2


def test_configurations():
    of_halves = configurations.candidates(32, 4096, 64, False)
    assert of_halves[0] == configurations.default(32, 4096, 64, False) == RopeConfiguration(4, 16, 4)
    assert set(of_halves[1:]) == {
        RopeConfiguration(2, 16, 4),
        RopeConfiguration(4, 16, 8),
        RopeConfiguration(4, 8, 2),
        RopeConfiguration(4, 32, 8),
        RopeConfiguration(8, 16, 8),
        RopeConfiguration(8, 8, 4),
    }
    assert configurations.default(32, 4096, 64, True) == RopeConfiguration(2, 16, 4)
    # No candidate is larger than the problem.
    assert configurations.candidates(1, 1, 64, False) == [RopeConfiguration(1, 1, 1)]
    assert configurations.candidates(3, 8, 40, False) == [
        RopeConfiguration(4, 8, 2),
        RopeConfiguration(2, 8, 2),
        RopeConfiguration(4, 8, 4),
        RopeConfiguration(4, 4, 1),
    ]


@needs_triton
@needs_compiler
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(("d", "dtype"), [(128, "bfloat16"), (64, "float32"), (80, "float16")])
@pytest.mark.parametrize("interleaved", [False, True])
@candidate_counts
def test_configurations_compile_without_spilling(architecture, d, dtype, interleaved, count, tmp_path, monkeypatch):
    q, k, angle = jnp.zeros((2, 8, 64, d), dtype), jnp.zeros((2, 2, 64, d), dtype), jnp.zeros((2, 64, d), dtype)
    table = configurations.candidates(8, 64, d // 2, interleaved)
    assert len(table) >= 6
    for configuration in table[:count]:
        monkeypatch.setattr(op, "candidates", lambda *_, configuration=configuration: [configuration])
        pulled = _pulled(functools.partial(rope_qk, interleaved=interleaved))
        found = launches(pulled, (q, k), q, k, angle, angle)
        for launch in found:
            given = launch.constants["head_block"], launch.constants["token_block"], launch.num_warps
            assert given == dataclasses.astuple(configuration)
        _assert_fit(found, architecture, tmp_path)


@needs_triton
@needs_compiler
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_compiles_with_tokens_before_heads(architecture, dtype, interleaved, tmp_path):
    x, angle = jnp.zeros((1, 2, 64, 8, 128), dtype), jnp.zeros((1, 2, 64, 128), dtype)
    kernel = op.differentiable_kernel(1, Rotation(rounded=True, interleaved=interleaved, tokens_first=True))
    found = launches(lambda *args: (kernel.forward(*args), kernel.backward(*args, args[0])), x, angle, angle)
    _assert_fit(found, architecture, tmp_path)


def _assert_fit(found, architecture, folder):
    assert [launch.kernel.__name__ for launch in found] == ["rope_rotate", "rope_rotate"]
    for launch in found:
        usage = compiled(launch, architecture, folder)
        assert usage.spilled == 0
        assert usage.registers <= 128
        assert usage.shared <= 4096  # none with Triton 3.9


@needs_triton
@needs_compiler
@pytest.mark.parametrize("platforms", [("cuda",), ("cpu", "cuda")])
def test_one_program_has_the_kernels_for_a_gpu(platforms):
    x, cos = normal(2, 3, 4), normal(3, 4)
    assert kernels_in(_pulled(rope_qk), (x, x), x, x, cos, cos, platforms=platforms) == ["rope_rotate"] * 2
    many = jax.vmap(_pulled(rope))
    xs, angles = x[None], cos[None]
    assert kernels_in(many, xs, xs, angles, angles, platforms=platforms) == ["rope_rotate"] * 2
    assert kernels_in(rope, x, cos, cos, platforms=("cpu",)) == []


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("tokens_first", [False, True])
def test_with_the_products_rounded(dtype, interleaved, tokens_first):
    """As in the code of models: each product is an operator in half precision."""
    shape = (1, 2, 50, 3, 64) if tokens_first else (1, 2, 3, 50, 64)
    x, ct = normal(*shape, dtype=dtype), normal(*shape, dtype=dtype, seed=1)
    cos, sin = (normal(1, 2, 50, 64, dtype=dtype, seed=seed) for seed in (2, 3))
    kernel = op.differentiable_kernel(1, Rotation(rounded=True, interleaved=interleaved, tokens_first=tokens_first))
    got = jax.jit(kernel.forward)(x, cos, sin)[0], jax.jit(kernel.backward)(x, cos, sin, ct)[0]

    turned = functools.partial(reference.turned, interleaved=interleaved)
    c, s = (jnp.expand_dims(angle, 3 if tokens_first else 2) for angle in (cos, sin))
    want = x * c + turned(x) * s, ct * c - turned(ct * s)  # not compiled: each is rounded
    assert_close(got, want)
    # Float32 may be fused, products of float16 may be too small for it, and the interpreter does not round to bfloat16.
    if dtype == "float16" or (dtype == "bfloat16" and not interpreting()):
        assert all(jnp.mean(a != b) < 1e-3 for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("rotation", [Rotation(*flags) for flags in itertools.product([False, True], repeat=3)])
def test_tokens_before_heads(rotation):
    """Every rotation of transposed arrays, over batches and groups, equals that of the arrays."""
    x, ct = normal(2, 3, 7, 5, 12), normal(2, 3, 7, 5, 12, seed=1)
    cos, sin = normal(2, 1, 7, 12, seed=2), normal(2, 1, 7, 12, seed=3)
    heads_first = dataclasses.replace(rotation, tokens_first=False)
    swapped = [jnp.swapaxes(y, 2, 3) for y in (x, ct)] if rotation.tokens_first else [x, ct]
    if not rotation.tokens_first:
        cos, sin = normal(2, 1, 5, 12, seed=2), normal(2, 1, 5, 12, seed=3)
    got = _pulled(op.differentiable_kernel(1, rotation))((ct,), x, cos, sin)
    want = _pulled(lambda *args: reference.forward(*args, rotation=heads_first))((swapped[1],), swapped[0], cos, sin)
    if rotation.tokens_first:
        want = (jnp.swapaxes(want[0][0], 2, 3),), (jnp.swapaxes(want[1][0], 2, 3), *want[1][1:])
    assert_close(got, want, factor=SUMS)
