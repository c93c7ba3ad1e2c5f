"""Kernels inside `shard_map`, which checks over which mesh axes values vary, and sums gradients over the shards."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from jtbridge import kernels

from .harness import assert_close, kernels_in, needs_compiler, needs_triton, normal

pytestmark = pytest.mark.cpu  # of several devices

X, WEIGHT, MATRIX = normal(4, 8), normal(8, seed=1), normal(8, 8, seed=2)
HEADS = normal(4, 2, 3, 8, seed=3)
LABELS = jnp.array([1, 0, 3, 7], jnp.int32)


def squares(y: Any) -> jax.Array:
    return (y**2).sum()


def labels(x):
    return jnp.zeros(x.shape[0], jnp.int32)


# Name: a loss of a sharded array and of an array that is equal on all devices, these arrays, and the number of kernels
# of its gradient.
CASES = {
    "softmax": (lambda x, w: (kernels.softmax(x) * w).sum(), X, WEIGHT, 2),
    "layer_norm": (lambda x, w: squares(kernels.layer_norm(x, w, w)), X, WEIGHT, 2),
    "rms_norm": (lambda x, w: squares(kernels.rms_norm(x, w)), X, WEIGHT, 2),
    "swiglu": (lambda x, w: squares(kernels.swiglu(x, jnp.broadcast_to(w, x.shape))), X, WEIGHT, 2),
    "cross_entropy": (lambda x, w: kernels.cross_entropy(x * w, labels(x), reduction="sum"), X, WEIGHT, 2),
    "linear_cross_entropy": (
        lambda x, w: kernels.linear_cross_entropy(x, w, labels(x), reduction="sum", chunk_size=1),
        X,
        MATRIX,
        2,
    ),
    "linear_cross_entropy_of_each": (
        lambda x, w: kernels.linear_cross_entropy(x, w, labels(x), reduction="none").sum(),
        X,
        MATRIX,
        2,
    ),
    "matmul": (lambda x, w: squares(kernels.matmul(x, w, activation="gelu")), X, MATRIX, 1),
    "attention": (
        lambda q, k: squares(kernels.attention(q, jnp.broadcast_to(k, q.shape), q)),
        HEADS,
        HEADS[:1],
        3,
    ),
    "attention_mask": (lambda q, m: squares(kernels.attention(q, q, q, mask=m)), HEADS, normal(1, 2, 3, 3), 3),
    "rope": (lambda q, angles: squares(kernels.rope(q, angles, angles)), HEADS, normal(3, 8), 2),
}
each = pytest.mark.parametrize("name", CASES)


@pytest.fixture
def mesh() -> jax.sharding.Mesh:
    assert len(jax.devices()) >= 4, "tests/conftest.py asks for four CPU devices"
    return jax.make_mesh((2,), ("i",), devices=jax.devices()[:2], axis_types=(jax.sharding.AxisType.Auto,))


def sharded(loss, mesh):
    return jax.shard_map(
        lambda x, w: jax.lax.psum(loss(x, w), "i"), mesh=mesh, in_specs=(P("i"), P()), out_specs=P(), check_vma=True
    )


@each
def test_gradients_are_summed_over_shards(name, mesh):
    loss, x, w, _ = CASES[name]
    got = jax.jit(jax.value_and_grad(sharded(loss, mesh), (0, 1)))(x, w)
    assert_close(got, jax.value_and_grad(loss, (0, 1))(x, w), factor=8)


@each
def test_second_derivatives(name, mesh):
    loss, x, w, _ = CASES[name]

    def second(f):
        def of(x, w):
            return sum(map(squares, jax.grad(f, (0, 1))(x, w)))

        return jax.grad(of, (0, 1))

    assert_close(jax.jit(second(sharded(loss, mesh)))(x, w), second(loss)(x, w), factor=16)


@each
def test_vmap_of_grad(name, mesh):
    loss, x, w, _ = CASES[name]
    rows = jnp.stack([w, w + 1])
    got = jax.jit(jax.vmap(jax.grad(sharded(loss, mesh), (0, 1)), (None, 0)))(x, rows)
    assert_close(got, jax.vmap(jax.grad(loss, (0, 1)), (None, 0))(x, rows), factor=16)


@each
def test_varying_result_is_not_treated_as_replicated(name, mesh):
    loss, x, w, _ = CASES[name]
    with pytest.raises(ValueError, match="out_specs"):
        jax.shard_map(loss, mesh=mesh, in_specs=(P("i"), P()), out_specs=P())(x, w)


@needs_triton
@needs_compiler
@each
def test_shards_are_computed_by_the_kernels(name, mesh):
    loss, x, w, count = CASES[name]
    assert len(kernels_in(jax.grad(sharded(loss, mesh), (0, 1)), x, w)) == count


def test_sharded_labels(mesh):
    loss = functools.partial(kernels.cross_entropy, reduction="none")
    run = jax.shard_map(loss, mesh=mesh, in_specs=(P(), P(None)), out_specs=P())
    split = jax.shard_map(loss, mesh=mesh, in_specs=(P("i"), P("i")), out_specs=P("i"))
    assert_close(run(X, LABELS), loss(X, LABELS))
    assert_close(split(X, LABELS), loss(X, LABELS))
