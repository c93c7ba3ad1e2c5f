"""cross_entropy: in jnp, in Triton's interpreter, and as compiled."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import jtbridge
from jtbridge.kernels import cross_entropy, linear_cross_entropy
from jtbridge.kernels._cross_entropy import configurations, op, reference, unsupported_reason
from jtbridge.kernels._cross_entropy.configurations import BackwardConfiguration, ForwardConfiguration

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

REDUCTIONS = ["mean", "sum", "none"]


def classes_of(*shape: int, n: int, ignored: int | None = None, seed: int = 0) -> jax.Array:
    """Labels, a third of them `ignored` if that is given."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, n, shape)
    if ignored is not None:
        labels = np.where(rng.random(shape) < 0.3, ignored, labels)
    return jnp.asarray(labels, jnp.int32)


def plain(logits: jax.Array, labels: jax.Array, **options: float) -> jax.Array:
    """Return the losses of the rows, computed by the reference only."""
    options = {"ignore_index": -100, "smoothing": 0.0} | options
    return reference.forward(logits, labels, **options)[0]


@given(
    rows=st.integers(1, 5),
    n=st.integers(1, 300),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    smoothing=st.sampled_from([0.0, 0.1, 1.0]),
    ignore_index=st.sampled_from([-100, 0]),
    reduction=st.sampled_from(REDUCTIONS),
)
def test_matches_torch(rows, n, dtype, smoothing, ignore_index, reduction):
    options = {"label_smoothing": smoothing, "ignore_index": ignore_index, "reduction": reduction}
    x = 3 * normal(rows, n, dtype=dtype, seed=n)
    labels = classes_of(rows, n=n, ignored=ignore_index, seed=rows)
    tensor = jtbridge.to_torch(x).clone().requires_grad_()
    want = torch.nn.functional.cross_entropy(tensor, jtbridge.to_torch(labels).long(), **options)
    ct = normal(*want.shape, dtype=dtype, seed=1)
    want.backward(jtbridge.to_torch(ct))
    got, pull = jax.vjp(lambda x: cross_entropy(x, labels, **options), x)
    # The logarithm of a sum of at least 1 is as exact as the sum. torch rounds it and each loss to the dtype.
    one = jnp.ones((), dtype)
    assert_close(got + one, jtbridge.to_jax(want.detach()) + one, factor=2)
    assert_close(pull(ct)[0], jtbridge.to_jax(tensor.grad), factor=2, terms=float(jnp.abs(ct).max()))


def test_all_ignored_is_nan_without_a_gradient():
    x, labels = normal(3, 5), jnp.full(3, -100)
    loss, grad = jax.value_and_grad(cross_entropy)(x, labels)
    assert jnp.isnan(loss)
    assert not grad.any()
    assert cross_entropy(x, labels, reduction="sum") == 0


def test_label_out_of_range_gives_nan():
    x, labels = normal(4, 5), jnp.array([5, -1, 2, -100])
    losses, pull = jax.vjp(lambda x: cross_entropy(x, labels, reduction="none"), x)
    assert jnp.isnan(losses).tolist() == [True, True, False, False]
    assert jnp.isnan(pull(jnp.ones(4))[0]).all(-1).tolist() == [True, True, False, False]


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_long_rows_are_split_into_blocks(monkeypatch, smoothing):
    monkeypatch.setattr(configurations, "_LANES", 16)
    monkeypatch.setattr(configurations, "_BLOCK", 32)
    x, labels = normal(3, 150), classes_of(3, n=150)
    if not smoothing:
        x = x.at[1, :40].set(-jnp.inf).at[1, labels[1]].set(0)
    losses, pull = jax.vjp(lambda x: cross_entropy(x, labels, label_smoothing=smoothing, reduction="none"), x)
    want, theirs = jax.vjp(lambda x: plain(x, labels, smoothing=smoothing), x)
    assert_close(losses, want)
    ct = normal(3, seed=1)
    assert_close(pull(ct)[0], theirs(ct)[0], factor=2)


def _turns(n, monkeypatch, count=None):
    """Set each of the first `count` forward and backward candidates at least once, and yield the pair."""
    tables = configurations.candidates_forward(n)[:count], configurations.candidates_backward(n)[:count]
    for forward, backward in in_turn(*tables):
        monkeypatch.setattr(op, "candidates_forward", lambda n, c=forward: [c])
        monkeypatch.setattr(op, "candidates_backward", lambda n, c=backward: [c])
        yield forward, backward


@needs_kernels
@pytest.mark.parametrize("n", [100, 20_000])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_every_configuration_gives_the_same_result(n, smoothing, monkeypatch):
    x, labels, ct = 3 * normal(5, n), classes_of(5, n=n).at[0].set(-100).at[1].set(n), normal(5, seed=1)
    if not smoothing:
        x = x.at[2, : n // 2].set(-jnp.inf).at[2, labels[2]].set(0)
    want, theirs = jax.vjp(lambda x: plain(x, labels, smoothing=smoothing), x)
    for forward, backward in _turns(n, monkeypatch):
        with recorded() as found:
            f = functools.partial(cross_entropy, label_smoothing=smoothing, reduction="none")
            losses, pull = jax.vjp(lambda x, f=f: f(x, labels), x)
            assert_close(losses, want)
            assert_close(pull(ct)[0], theirs(ct)[0], factor=2)
        assert [warps for _, _, warps in found] == [forward.warps, backward.warps]
        assert found[0][1].items() >= forward.blocks.items()
        assert found[1][1].items() >= backward.blocks.items()


def test_an_ignored_row_is_not_read():
    x, labels = jnp.full((2, 5), jnp.inf).at[0].set(0), jnp.array([1, -100])
    loss, grad = jax.value_and_grad(cross_entropy)(x, labels)
    assert_close(loss, jnp.log(5.0))
    assert_close(grad[1], jnp.zeros(5))


def test_transforms():
    x, labels = normal(2, 3, 7), classes_of(2, 3, n=7, ignored=-100)

    def loss(f):
        return lambda x, labels: (f(x, labels) ** 2).sum()

    f = loss(functools.partial(cross_entropy, label_smoothing=0.1, reduction="none"))
    g = loss(functools.partial(plain, smoothing=0.1))

    def same(transformed, *args):
        # Squares, and their sums: up to eight roundings.
        assert_close(jax.jit(transformed(f))(*args), jax.jit(transformed(g))(*args), factor=8)

    same(lambda f: lambda x, labels: jax.jvp(lambda x: f(x, labels), (x,), (x,)), x, labels)
    same(lambda f: jax.vmap(jax.grad(f)), x, labels)
    same(lambda f: jax.grad(lambda x, labels: jax.vmap(f)(x, labels).sum()), x, labels)
    same(lambda f: jax.vmap(jax.grad(f), (None, 0)), x[0], labels)
    same(jax.hessian, x[0], labels[0])
    same(lambda f: jax.jacrev(jax.jacrev(f)), x[0], labels[0])


def test_unsupported_arguments_use_jnp(x64):
    labels = jnp.zeros(2, jnp.int32)
    assert unsupported_reason(jnp.zeros((2, 3), jnp.float32), labels) is None
    assert unsupported_reason(jnp.zeros((0, 3), jnp.float32), labels[:0]) == "`logits` has no elements"
    assert (
        unsupported_reason(jnp.zeros((2, 3)), labels)
        == "`logits` is float64, the kernel takes float32, bfloat16, float16"
    )
    short = "`labels` is int8, the kernel takes int32, int64"
    assert unsupported_reason(jnp.zeros((2, 3), jnp.float32), labels.astype("int8")) == short
    assert cross_entropy(jnp.zeros((0, 3), jnp.float32), labels[:0], reduction="sum") == 0
    assert cross_entropy(jnp.zeros((2, 3)), labels.astype("int8")).dtype == jnp.float64
    assert_close(cross_entropy(jnp.zeros((2, 3), jnp.float32), labels.astype("int64")), jnp.log(jnp.float32(3)))


def test_errors():
    x, labels = normal(2, 3), jnp.zeros(2, jnp.int32)
    with pytest.raises(ValueError, match=r"`labels` has shape \(3,\), but `logits` \(2, 3\): expected one label for"):
        cross_entropy(x, jnp.zeros(3, jnp.int32))
    with pytest.raises(TypeError, match="`labels` is float32, expected integers: class indices, not probabilities"):
        cross_entropy(x, x)
    with pytest.raises(TypeError, match=r"^`logits` is int32, not of a real floating-point dtype$"):
        cross_entropy(x.astype("int32"), labels)
    with pytest.raises(ValueError, match=r"^`logits` has shape \(2, 0\): there are no classes$"):
        cross_entropy(x[:, :0], labels)
    with pytest.raises(ValueError, match="`label_smoothing` is 2, expected a number from 0 to 1"):
        cross_entropy(x, labels, label_smoothing=2)
    with pytest.raises(ValueError, match="`reduction` is 'max', expected 'mean', 'sum' or 'none'"):
        cross_entropy(x, labels, reduction="max")  # type: ignore[arg-type]


@needs_triton
@needs_compiler
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(
    ("n", "dtype", "smoothing"), [(100, "bfloat16", 0.1), (50_257, "float32", 0.0), (131_072, "bfloat16", 0.1)]
)
@candidate_counts
def test_configurations_compile_without_spilling(architecture, n, dtype, smoothing, count, monkeypatch, tmp_path):
    loss = functools.partial(cross_entropy, label_smoothing=smoothing)
    for turn in _turns(n, monkeypatch, count):
        found = launches(jax.grad(loss), normal(2, n, dtype=dtype), jnp.zeros(2, jnp.int32))
        assert [launch.kernel.__name__ for launch in found] == ["cross_entropy_forward", "cross_entropy_backward"]
        for launch, configuration in zip(found, turn, strict=True):
            assert launch.constants.items() >= configuration.blocks.items()
            assert launch.num_warps == configuration.warps
            usage = compiled(launch, architecture, tmp_path)
            assert usage.spilled == 0
            # With eight pieces, a thread has twice as many numbers.
            assert usage.registers <= (192 if configuration.blocks.get("pieces") == 8 else 128)
            assert usage.shared <= 1024


def test_configurations():
    assert configurations.default_forward(100) == ForwardConfiguration(1, 128, 1)
    assert configurations.default_forward(3000) == ForwardConfiguration(2, 2048, 8)
    assert configurations.default_backward(100) == BackwardConfiguration(128, 1)
    assert configurations.candidates_forward(100) == [ForwardConfiguration(1, 128, 1)]
    assert configurations.candidates_forward(128_256) == [
        ForwardConfiguration(4, 2048, 8),
        ForwardConfiguration(2, 2048, 8),
        ForwardConfiguration(8, 2048, 8),
        ForwardConfiguration(4, 1024, 4),
        ForwardConfiguration(4, 4096, 16),
    ]
    assert configurations.candidates_backward(128_256) == [
        BackwardConfiguration(4096, 8),
        BackwardConfiguration(4096, 4),
        BackwardConfiguration(4096, 16),
        BackwardConfiguration(2048, 4),
        BackwardConfiguration(8192, 16),
    ]


@needs_triton
@needs_compiler
@pytest.mark.parametrize("platforms", [("cuda",), ("cpu", "cuda")])
def test_one_program_has_the_kernels_for_a_gpu(platforms):
    x, labels = normal(2, 100), jnp.zeros(2, jnp.int32)
    names = ["cross_entropy_forward", "cross_entropy_backward"]
    assert kernels_in(jax.grad(cross_entropy), x, labels, platforms=platforms) == names
    assert kernels_in(cross_entropy, x, labels, platforms=("cpu",)) == []


def test_large_unsigned_label_is_not_ignored():
    wrapping = np.asarray([2**32 - 100, 3], np.uint32)
    assert op.as_labels(jnp.asarray(wrapping)).tolist() == [2**31 - 1, 3]


@pytest.mark.parametrize("ignored", [0.5, None, True])
def test_an_index_to_ignore_is_an_integer(ignored):
    for f in (cross_entropy, lambda x, y, **options: linear_cross_entropy(x, jnp.ones((4, 3)), y, **options)):
        with pytest.raises(TypeError, match=f"`ignore_index` is {ignored}, expected an integer"):
            f(jnp.ones((2, 3)), jnp.zeros(2, int), ignore_index=ignored)
