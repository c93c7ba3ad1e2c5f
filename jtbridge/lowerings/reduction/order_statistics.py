"""Medians, modes and the k-th smallest element."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jtbridge.lowerings._common import axis_of, size_of
from jtbridge.lowerings._registry import register_lowering

from .sorting import sorted_with_indices

Pair = tuple[jax.Array, jax.Array]


@register_lowering("kthvalue")
def _kthvalue(x: jax.Array, k: int, dim: int = -1, keepdim: bool = False) -> Pair:
    if x.ndim == 0:
        return x, jnp.zeros((), np.int64)
    axis = axis_of(dim, x.ndim)
    value, place = (jax.lax.index_in_dim(part, k - 1, axis, keepdim) for part in sorted_with_indices(x, axis))
    return value, place


@register_lowering("median")
def _median(x: jax.Array) -> jax.Array:
    if size_of(x) == 0:
        return _of_nothing(x.dtype)
    return _median_dim(x.reshape(-1), 0)[0]


@register_lowering("nanmedian")
def _nanmedian(x: jax.Array) -> jax.Array:
    if size_of(x) == 0:
        return _of_nothing(x.dtype)
    return _nanmedian_dim(x.reshape(-1), 0)[0]


def _of_nothing(dtype: np.dtype) -> jax.Array:
    return jnp.asarray(jnp.nan if jnp.issubdtype(dtype, np.floating) else jnp.iinfo(dtype).min, dtype)


@register_lowering("median.dim")
def _median_dim(x: jax.Array, dim: int, keepdim: bool = False) -> Pair:
    """Return the lower of the two middle elements, or the first NaN if there is one, and its index."""
    if x.ndim == 0:
        return x, jnp.zeros((), np.int64)
    axis = axis_of(dim, x.ndim)
    values, places = sorted_with_indices(x, axis)
    length = x.shape[axis]
    middle = jnp.full([1 if i == axis else n for i, n in enumerate(x.shape)], (length - 1) // 2, np.int64)
    if jnp.issubdtype(x.dtype, np.floating):
        numbers = jnp.sum(~jnp.isnan(x), axis=axis, keepdims=True, dtype=np.int64)
        middle = jnp.where(numbers < length, numbers, middle)
    return _pair_at(values, places, middle, axis, keepdim)


@register_lowering("nanmedian.dim")
def _nanmedian_dim(x: jax.Array, dim: int, keepdim: bool = False) -> Pair:
    """Return the lower of the two middle elements that are not NaN, and its index."""
    if x.ndim == 0 or not jnp.issubdtype(x.dtype, np.floating):
        return _median_dim(x, dim, keepdim)
    axis = axis_of(dim, x.ndim)
    values, places = sorted_with_indices(x, axis)
    numbers = jnp.sum(~jnp.isnan(x), axis=axis, keepdims=True, dtype=np.int64)
    return _pair_at(values, places, jnp.maximum(numbers - 1, 0) // 2, axis, keepdim)


def _pair_at(values: jax.Array, places: jax.Array, index: jax.Array, axis: int, keepdim: bool) -> Pair:
    found = [jnp.take_along_axis(part, index, axis=axis, mode="clip") for part in (values, places)]
    value, place = found if keepdim else [jnp.squeeze(part, axis) for part in found]
    return value, place


@register_lowering("mode")
def _mode(x: jax.Array, dim: int = -1, keepdim: bool = False) -> Pair:
    """Return the most frequent element, the smallest one of several, and its last index. NaNs are distinct elements."""
    if x.ndim == 0:
        return x, jnp.zeros((), np.int64)
    axis = axis_of(dim, x.ndim)
    values, places = sorted_with_indices(x, axis)
    index = jax.lax.broadcasted_iota(np.int64, x.shape, axis)
    length = x.shape[axis]
    after, before = (jax.lax.slice_in_dim(values, i, length - 1 + i, axis=axis) for i in (1, 0))
    first = jnp.ones_like(jax.lax.slice_in_dim(values, 0, 1, axis=axis), dtype=bool)
    starts = jnp.concatenate([first, after != before], axis=axis)
    run_start = jax.lax.cummax(jnp.where(starts, index, 0), axis=axis)
    run_length = index - run_start
    # The last element of the first of the longest runs, whose value is the smallest.
    longest = jnp.argmax(run_length, axis=axis, keepdims=True)
    return _pair_at(values, places, longest, axis, keepdim)
