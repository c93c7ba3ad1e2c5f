"""linear_cross_entropy, compared with torch and with all logits at once, and its use of memory."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import jtbridge
from jtbridge.kernels import cross_entropy, linear_cross_entropy
from jtbridge.kernels._linear_cross_entropy import unsupported_reason

from .harness import assert_close, kernels_in, needs_compiler, needs_triton, normal
from .test_cross_entropy import REDUCTIONS, classes_of


def plain(hidden, weight, bias, labels, **options):
    return cross_entropy(hidden @ weight.T + bias, labels, **options)


def chunked(hidden, weight, bias, labels, **options):
    return linear_cross_entropy(hidden, weight, labels, bias=bias, **options)


def example(*shape: int, width: int, n: int, dtype: str = "float32") -> list[jax.Array]:
    """Return hidden states, weight, bias and labels."""
    labels = classes_of(*shape, n=n, ignored=-100, seed=1)
    return [normal(*shape, width, dtype=dtype), normal(n, width, dtype=dtype), normal(n, dtype=dtype), labels]


@given(
    tokens=st.integers(1, 7),
    width=st.integers(1, 9),
    n=st.integers(1, 70),
    chunk_size=st.sampled_from([None, 1, 2, 3]),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    smoothing=st.sampled_from([0.0, 0.1]),
    ignore_index=st.sampled_from([-100, 0]),
    reduction=st.sampled_from(REDUCTIONS),
    biased=st.booleans(),
)
@settings(max_examples=15)
def test_matches_torch(tokens, width, n, chunk_size, dtype, smoothing, ignore_index, reduction, biased):
    options = {"label_smoothing": smoothing, "ignore_index": ignore_index, "reduction": reduction}
    hidden, weight, bias = (normal(*shape, dtype=dtype) for shape in ((tokens, width), (n, width), (n,)))
    labels = classes_of(tokens, n=n, ignored=ignore_index)
    arrays = [hidden, weight, *([bias] if biased else [])]
    tensors = [jtbridge.to_torch(x).clone().requires_grad_() for x in arrays]
    logits = torch.nn.functional.linear(*tensors)
    want = torch.nn.functional.cross_entropy(logits, jtbridge.to_torch(labels).long(), **options)
    ct = normal(*want.shape, dtype=dtype, seed=1)
    want.backward(jtbridge.to_torch(ct))

    def ours(hidden, weight, bias=None):
        return linear_cross_entropy(hidden, weight, labels, bias=bias, chunk_size=chunk_size, **options)

    got, pull = jax.vjp(jax.jit(ours), *arrays)
    # The logits have an error relative to their size, and they are several times as large as the loss.
    large = jtbridge.to_jax(logits.detach().abs().max())
    assert_close(got + large, jtbridge.to_jax(want.detach()) + large, factor=2)
    # Sums of such logits' exponentials, and a rounding for each chunk of the weight's gradient.
    got_all, want_all = pull(ct), [jtbridge.to_jax(t.grad) for t in tensors]
    for g, w in zip(got_all, want_all, strict=True):
        scale = jnp.abs(w).max() + jnp.ones((), dtype)
        assert_close(g / scale + jnp.ones((), dtype), w / scale + jnp.ones((), dtype), factor=6)


def test_all_ignored_is_nan_without_a_gradient():
    hidden, weight, bias, labels = example(3, width=4, n=5)
    got, grads = jax.value_and_grad(chunked, (0, 1, 2))(hidden, weight, bias, jnp.full_like(labels, -100))
    assert jnp.isnan(got)
    assert not any(g.any() for g in grads)


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_transforms(reduction):
    *given, labels = example(2, 3, width=4, n=6)

    def loss(f):
        f = functools.partial(f, reduction=reduction)
        return lambda *args: (f(*args) ** 2).sum()

    f, g = loss(functools.partial(chunked, chunk_size=2)), loss(plain)
    every = (0, 1, 2)

    def same(transformed, *args, factor=8):
        # Squares, and their sums: up to eight roundings.
        assert_close(jax.jit(transformed(f))(*args), jax.jit(transformed(g))(*args), factor=factor)

    same(lambda f: lambda *xs: jax.jvp(lambda *ys: f(*ys, labels), xs, xs), *given)
    same(lambda f: jax.grad(f, every), *given, labels)
    same(lambda f: jax.grad(f, 0), *given, labels)
    over = (0, None, None, 0)
    same(lambda f: jax.vmap(jax.grad(f, every), over), *given, labels)
    same(lambda f: jax.grad(lambda *xs: jax.vmap(f, over)(*xs).sum(), every), *given, labels)
    many = jnp.stack([given[1], 2 * given[1]])
    same(lambda f: jax.vmap(f, (0, 0, None, 0)), given[0], many, given[2], labels)
    same(lambda f: jax.vmap(jax.grad(f, every), (None, 0, None, None)), given[0][0], many, given[2], labels[0])
    small = [given[0][0, :, :2], given[1][:3, :2], given[2][:3], labels[0] % 3]
    same(lambda f: jax.hessian(f, (0, 1)), *small, factor=16)
    same(lambda f: jax.jacrev(jax.jacrev(f)), *small, factor=16)


def test_the_gradient_of_a_shared_weight_has_no_batch():
    hidden, weight, bias, labels = example(8, 3, width=40, n=50)

    def f(weight):
        return jax.vmap(chunked, (0, None, None, 0))(hidden, weight, bias, labels).sum()

    text = jax.jit(jax.grad(f)).lower(weight).as_text()
    assert "tensor<50x40xf32>" in text
    assert "x50x40xf32>" not in text


def test_logits_are_never_materialized():
    tokens, width, n = 4096, 32, 32768  # much more memory than the workspace of a product on a GPU
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((tokens, width), (n, width), (n,))]
    labels = jax.ShapeDtypeStruct((tokens,), jnp.int32)

    def in_jax(hidden, weight, bias, labels):
        scores = jax.nn.log_softmax(hidden @ weight.T + bias)
        return -jnp.take_along_axis(scores, labels[:, None], -1).mean()

    def lowered(f, **options):
        return jax.jit(jax.grad(lambda *xs: f(*xs, **options).sum(), (0, 1, 2))).lower(*shapes, labels)

    theirs = lowered(in_jax)
    assert f"{tokens}x{n}xf32" in theirs.as_text()
    bound = theirs.compile().memory_analysis().temp_size_in_bytes / 6
    for reduction in REDUCTIONS:
        ours = lowered(chunked, reduction=reduction)
        assert f"{tokens}x{n}x" not in ours.as_text()
        assert f"512x{n}xf32" in ours.as_text()
        assert ours.compile().memory_analysis().temp_size_in_bytes < bound


def test_unsupported_arguments_use_jnp(x64):
    hidden, weight, bias, labels = example(3, width=4, n=5)
    assert unsupported_reason(hidden, weight, labels) is None
    assert unsupported_reason(hidden, weight.astype("bfloat16"), labels) == "`weight` is bfloat16, but `hidden` float32"
    assert (
        unsupported_reason(hidden, weight, labels, bias.astype("float16")) == "`bias` is float16, but `hidden` float32"
    )
    assert unsupported_reason(hidden[:0], weight, labels[:0]) == "`hidden` has no elements"
    assert unsupported_reason(hidden, weight[:0], labels) == "`weight` has no elements"
    wide = [x.astype("float64") for x in (hidden, weight)]
    assert "`hidden` is float64" in str(unsupported_reason(*wide, labels))
    assert linear_cross_entropy(*wide, labels).dtype == jnp.float64
    assert linear_cross_entropy(hidden[:0], weight, labels[:0], reduction="sum") == 0


def test_errors():
    hidden, weight, bias, labels = example(3, width=4, n=5)
    with pytest.raises(
        ValueError, match=r"`weight` has shape \(4, 5\), but `hidden` \(3, 4\): expected \[classes, wid"
    ):
        linear_cross_entropy(hidden, weight.T, labels)
    with pytest.raises(ValueError, match=r"`labels` has shape \(2,\), but `hidden` \(3, 4\): expected one label for"):
        linear_cross_entropy(hidden, weight, labels[:2])
    with pytest.raises(ValueError, match=r"`bias` has shape \(4,\), but `weight` \(5, 4\): expected \[classes\]"):
        linear_cross_entropy(hidden, weight, labels, bias=bias[:4])
    with pytest.raises(ValueError, match="`chunk_size` is 0, expected a positive number of rows"):
        linear_cross_entropy(hidden, weight, labels, chunk_size=0)
    with pytest.raises(ValueError, match="`accumulator_dtype` is int32, expected a floating-point dtype"):
        linear_cross_entropy(hidden, weight, labels, accumulator_dtype="int32")
    with pytest.raises(TypeError, match="`hidden` is int32, not of a real floating-point dtype"):
        linear_cross_entropy(hidden.astype("int32"), weight, labels)


@needs_triton
@needs_compiler
@pytest.mark.parametrize("platforms", [("cuda",), ("cpu", "cuda")])
def test_one_program_has_the_kernels_for_a_gpu(platforms):
    given = example(8, width=16, n=100)
    names = ["cross_entropy_forward", "cross_entropy_backward"]
    for reduction in REDUCTIONS:
        f = functools.partial(chunked, reduction=reduction, chunk_size=2)
        assert kernels_in(f, *given, platforms=platforms) == names[:1]
        assert kernels_in(jax.grad(lambda *xs, f=f: f(*xs).sum()), *given, platforms=platforms) == names
