"""Parts of an array at fixed positions, and arrays with such parts replaced."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from jtbridge.lowerings._common import axis_of, convert, is_below
from jtbridge.lowerings._registry import register_lowering

from ._common import positions
from ._replace import replace_slice

_NO_END = torch.iinfo(torch.int64).max  # the end that a graph has for a slice without an end


def _slice_bounds(length: int, start: int | None, end: int | None, step: int) -> tuple[int, int, int]:
    """Return the start, end and number of elements of a slice, clamped as in torch.

    Symbolic sizes are not clamped: JAX refuses a slice that may be outside of an axis.
    """
    if not all(isinstance(each, int | None) for each in (length, start, end)):
        first = _from_front(start or 0, length)
        if end is None or (isinstance(end, int) and end >= _NO_END):
            end = length
        last = _from_front(end, length)
        return first, last, -((first - last) // step)
    first, last, step = slice(start, end, step).indices(length)
    return first, max(first, last), len(range(first, last, step))


def _from_front(index: int, length: int) -> int:
    return index + length if is_below(index, 0) else index


@register_lowering("select.int", "select_copy.int")
def _select(x: jax.Array, dim: int, index: int) -> jax.Array:
    return lax.index_in_dim(x, index, axis_of(dim, x.ndim), keepdims=False)


@register_lowering("slice.Tensor", "slice_copy.Tensor")
def _slice(x: jax.Array, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> jax.Array:
    axis = axis_of(dim, x.ndim)
    first, last, _ = _slice_bounds(x.shape[axis], start, end, step)
    return lax.slice_in_dim(x, first, last, step, axis)


@register_lowering("narrow_copy")
def _narrow_copy(x: jax.Array, dim: int, start: int, length: int) -> jax.Array:
    axis = axis_of(dim, x.ndim)
    first = start + x.shape[axis] if start < 0 else start
    return lax.slice_in_dim(x, first, first + length, axis=axis)


@register_lowering("select_scatter")
def _select_scatter(x: jax.Array, src: jax.Array, dim: int, index: int) -> jax.Array:
    axis = axis_of(dim, x.ndim)
    index = index + x.shape[axis] if index < 0 else index
    return replace_slice(x, lax.expand_dims(convert(src, np.dtype(x.dtype)), (axis,)), index, axis)


@register_lowering("slice_scatter")
def _slice_scatter(
    x: jax.Array, src: jax.Array, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> jax.Array:
    axis = axis_of(dim, x.ndim)
    first, _, count = _slice_bounds(x.shape[axis], start, end, step)
    shape = (*x.shape[:axis], count, *x.shape[axis + 1 :])
    src = jnp.broadcast_to(convert(src, np.dtype(x.dtype)), shape)
    if count == 0:
        return x
    if step == 1:
        return src if count == x.shape[axis] else replace_slice(x, src, first, axis)
    offset = positions(x.shape, axis) - first
    inside = (offset >= 0) & (offset < count * step) & (offset % step == 0)
    return jnp.where(inside, _placed_in_zeros(src, x.shape[axis], first, step, axis), x)


@register_lowering("select_backward")
def _select_backward(grad: jax.Array, input_sizes: Sequence[int], dim: int, index: int) -> jax.Array:
    axis = axis_of(dim, len(input_sizes))
    index = index + input_sizes[axis] if index < 0 else index
    return _placed_in_zeros(lax.expand_dims(grad, (axis,)), input_sizes[axis], index, 1, axis)


@register_lowering("slice_backward")
def _slice_backward(
    grad: jax.Array, input_sizes: Sequence[int], dim: int, start: int, end: int, step: int
) -> jax.Array:
    axis = axis_of(dim, len(input_sizes))
    first, _, _ = _slice_bounds(input_sizes[axis], start, end, step)
    return _placed_in_zeros(grad, input_sizes[axis], first, step, axis)


def _placed_in_zeros(x: jax.Array, length: int, first: int, step: int, axis: int) -> jax.Array:
    """Return zeros with `x` at positions `first`, `first + step`, ... of an axis of `length`."""
    count = x.shape[axis]
    if count == 0:
        return jnp.zeros((*x.shape[:axis], length, *x.shape[axis + 1 :]), x.dtype)
    config = [(0, 0, 0)] * x.ndim
    config[axis] = (first, length - first - ((count - 1) * step + 1), step - 1)
    return lax.pad(x, jnp.zeros((), x.dtype), config)
