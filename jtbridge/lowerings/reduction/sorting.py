"""Sorting, and searching in sorted arrays. NaN sorts as the largest number."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from torch import fx

from jtbridge.lowerings._common import axis_of, out_dtype, out_shape, promoted, size_of
from jtbridge.lowerings._registry import register_lowering


def sorted_with_indices(x: jax.Array, axis: int, descending: bool = False) -> tuple[jax.Array, jax.Array]:
    """Sort along an axis in stable order. Return the sorted elements and their original indices."""
    index = jax.lax.broadcasted_iota(np.int64, x.shape, axis)
    if descending:  # flipped before and after the sort, so that equal elements keep their order
        x, index = jnp.flip(x, axis), jnp.flip(index, axis)
    values, places = jax.lax.sort((x, index), dimension=axis, is_stable=True, num_keys=1)
    return (jnp.flip(values, axis), jnp.flip(places, axis)) if descending else (values, places)


@register_lowering("sort")
def _sort(x: jax.Array, dim: int = -1, descending: bool = False) -> tuple[jax.Array, jax.Array]:
    if x.ndim == 0:
        return x, jnp.zeros((), np.int64)
    return sorted_with_indices(x, axis_of(dim, x.ndim), descending)


@register_lowering("sort.stable")
def _sort_stable(
    x: jax.Array, *, stable: bool | None, dim: int = -1, descending: bool = False
) -> tuple[jax.Array, jax.Array]:
    del stable
    return _sort(x, dim, descending)


@register_lowering("topk")
def _topk(
    x: jax.Array, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[jax.Array, jax.Array]:
    del sorted
    if x.ndim == 0:
        return x, jnp.zeros((), np.int64)
    axis = axis_of(dim, x.ndim)
    if size_of(x) == 0 or k == 0 or not largest:
        values, places = sorted_with_indices(x, axis, largest)
        return (jax.lax.slice_in_dim(values, 0, k, axis=axis), jax.lax.slice_in_dim(places, 0, k, axis=axis))
    keys = x
    if jnp.issubdtype(x.dtype, np.floating):  # XLA's `top_k` ranks a NaN with a set sign bit as the smallest number
        keys = jnp.where(jnp.isnan(x), jnp.asarray(jnp.nan, x.dtype), x)
    values, places = jax.lax.top_k(jnp.moveaxis(keys, axis, -1), k)
    return jnp.moveaxis(values, -1, axis), jnp.moveaxis(places, -1, axis).astype(np.int64)


@register_lowering("searchsorted.Tensor", "searchsorted.Scalar", node=True)
def _searchsorted(
    sequence: jax.Array,
    x: Any,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: jax.Array | None = None,
    node: fx.Node,
) -> jax.Array:
    del out_int32
    sequence, x = promoted(node, sequence, x)
    if sorter is not None:
        sequence = jnp.take_along_axis(sequence, sorter, axis=-1, mode="clip")
    return _insertion_points(sequence, x, right or side == "right", node)


@register_lowering("bucketize.Tensor", "bucketize.Scalar", node=True)
def _bucketize(
    x: Any, boundaries: jax.Array, *, out_int32: bool = False, right: bool = False, node: fx.Node
) -> jax.Array:
    del out_int32
    x, boundaries = promoted(node, x, boundaries)
    return _insertion_points(boundaries, x, right, node)


def _insertion_points(sequence: jax.Array, x: jax.Array, right: bool, node: fx.Node) -> jax.Array:
    """Return the index at which to insert each element of `x` into its row, by a binary search for all at once."""
    shape, length = x.shape, sequence.shape[-1]
    if length == 0 or size_of(x) == 0:
        return jnp.zeros(out_shape(node), out_dtype(node))
    rows = sequence.reshape(-1, length)
    x = x.reshape(rows.shape[0], -1)

    def halved(_: Any, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = (low + high) // 2
        value = jnp.take_along_axis(rows, middle, axis=-1, mode="clip")
        # Negated as in torch, because the negation decides where NaN is inserted.
        after = ~(value > x) if right else ~(value >= x)
        after = after & (low < high)
        return jnp.where(after, middle + 1, low), jnp.where(after, high, middle)

    start = jnp.zeros(x.shape, np.int64), jnp.full(x.shape, length, np.int64)
    low, _ = jax.lax.fori_loop(0, length.bit_length(), halved, start)
    return low.reshape(shape).astype(out_dtype(node))


@register_lowering("isin.Tensor_Tensor", "isin.Tensor_Scalar", "isin.Scalar_Tensor", node=True)
def _isin(x: Any, tests: Any, *, assume_unique: bool = False, invert: bool = False, node: fx.Node) -> jax.Array:
    del assume_unique
    a, b = promoted(node, x, tests)
    return jnp.isin(a, b, invert=invert)
