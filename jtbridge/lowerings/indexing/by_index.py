"""Reads and writes of elements at positions given by index tensors.

See :mod:`._out_of_range` for indices that torch refuses, and for the invalid value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from torch import fx

from jtbridge.errors import TranslationError
from jtbridge.lowerings._common import axis_of, convert, out_shape
from jtbridge.lowerings._registry import register_lowering
from jtbridge.lowerings.shape._common import box, positions

from ._out_of_range import invalid_if, read_along, read_at
from ._places import along, at_axis
from .scatter import checked_write

Indices = Sequence[jax.Array | None]


@register_lowering("index_select")
def _index_select(x: jax.Array, dim: int, index: jax.Array) -> jax.Array:
    if x.ndim == 0:
        return x
    axis = axis_of(dim, x.ndim)
    return read_at(x, at_axis(index.reshape(-1), axis), wrap=False)


@register_lowering("gather", node=True)
def _gather(x: jax.Array, dim: int, index: jax.Array, *, sparse_grad: bool = False, node: fx.Node) -> jax.Array:
    del sparse_grad
    if index.size == 0:
        return jnp.zeros(index.shape, x.dtype)
    if x.ndim == 0 or index.ndim == 0:
        return _gather(x.reshape(-1), 0, index.reshape(-1), node=node).reshape(index.shape)
    axis = axis_of(dim, x.ndim)
    x = box(x, [0] * x.ndim, [n if i == axis else index.shape[i] for i, n in enumerate(x.shape)])
    places = along(index, axis, x.shape, node.args[2])
    takes_rows = x.shape[axis] > 0 and any(isinstance(place, slice) for place in places)
    return read_at(x, places, wrap=False) if takes_rows else read_along(x, index, axis)


@register_lowering("take")
def _take(x: jax.Array, index: jax.Array) -> jax.Array:
    return read_at(x.reshape(-1), (index,), wrap=True)


@register_lowering("put", node=True)
def _put(x: jax.Array, index: jax.Array, source: jax.Array, accumulate: bool = False, *, node: fx.Node) -> jax.Array:
    where, how = (index.reshape(-1),), "sum" if accumulate else "set"
    return checked_write(x.reshape(-1), where, source.reshape(-1), how, node, wrap=True).reshape(x.shape)


def _is_mask(index: jax.Array | None) -> bool:
    return index is not None and index.dtype in (jnp.bool_, jnp.uint8)


def _index_tuple(indices: Indices) -> tuple[Any, ...]:
    """Return indices for jnp: slices for None, and integer arrays for index tensors.

    The arrays are at least 1-d, so that jnp treats all of them as arrays.
    """
    if any(_is_mask(i) for i in indices):
        raise TranslationError(
            "a tensor is indexed by a mask of bools, so that the shape depends on data. `torch.where` has a fixed shape"
        )
    return tuple(slice(None) if i is None else jnp.atleast_1d(i) for i in indices)


@register_lowering("index.Tensor", "_unsafe_index.Tensor", node=True)
def _index(x: jax.Array, indices: Indices, *, node: fx.Node) -> jax.Array:
    return read_at(x, _index_tuple(indices), wrap=True).reshape(out_shape(node))


@register_lowering("_unsafe_index_put")
def _unsafe_index_put(x: jax.Array, indices: Indices, values: jax.Array, accumulate: bool = False) -> jax.Array:
    return _index_put(x, indices, values, accumulate, unsafe=True, node=None)


@register_lowering("index_put", "_index_put_impl", node=True)
def _index_put(
    x: jax.Array,
    indices: Indices,
    values: jax.Array,
    accumulate: bool = False,
    unsafe: bool = False,
    *,
    node: fx.Node | None,
) -> jax.Array:
    values = convert(values, np.dtype(x.dtype))
    if any(_is_mask(i) for i in indices):
        return _masked_put(x, indices, values, accumulate)
    places = _index_tuple(indices)
    if all(jnp.ndim(i) == 0 for i in indices if i is not None):
        values = _with_unit_axis(x, places, values)
    how = "sum" if accumulate else "set"
    return checked_write(x, places, values, how, None if unsafe else node, wrap=True)


@register_lowering("flex_lib::zeros_and_scatter")
def _zeros_and_scatter(shape: Sequence[int], indices: Indices, values: jax.Array) -> jax.Array:
    """Return the gradient of a tensor that a score function of `flex_attention` indexes."""
    return _index_put(jnp.zeros(tuple(shape), values.dtype), indices, values, accumulate=True, node=None)


def _with_unit_axis(x: jax.Array, places: tuple[Any, ...], values: jax.Array) -> jax.Array:
    """Insert into `values` the axis of size 1 that a read at `places` has.

    The read has this axis because `_index_tuple` makes 0-d indices 1-d.
    """
    shape = jax.eval_shape(lambda a: a[places], x).shape
    arrays = [i for i, place in enumerate(places) if not isinstance(place, slice)]
    adjacent = arrays[-1] - arrays[0] + 1 == len(arrays)
    axis = arrays[0] if adjacent else 0
    values = jnp.broadcast_to(values, (*shape[:axis], *shape[axis + 1 :]))
    return lax.expand_dims(values, (axis,))


def _masked_put(x: jax.Array, indices: Indices, values: jax.Array, accumulate: bool) -> jax.Array:
    """Return `x` after ``x[..., mask, ...] = values``, or after adding `values` there (`accumulate`).

    Along the axis of the mask, `values` holds one value for all True elements, or one for each. The result has the
    shape of `x` in both cases.
    """
    given = [i for i in indices if i is not None]
    if len(given) != 1:
        raise TranslationError("a mask of bools is combined with other index tensors; `torch.where` can be translated")
    mask, before = given[0] != 0, next(i for i, index in enumerate(indices) if index is not None)
    after = x.ndim - before - mask.ndim
    values = values.reshape((1,) * (before + 1 + after - values.ndim) + values.shape)
    count = jnp.sum(mask, dtype=jnp.int32)
    if values.shape[before] == 0:
        return invalid_if(count > 0, x)
    if values.shape[before] == 1:
        wrong_count = None
        values = values.reshape(*values.shape[:before], *(1,) * mask.ndim, *values.shape[before + 1 :])
    else:
        wrong_count = count != values.shape[before]
        rank = jnp.cumsum(mask.reshape(-1), dtype=jnp.int32) - 1
        spread = (*values.shape[:before], *mask.shape, *values.shape[before + 1 :])
        values = jnp.take(values, rank, before, mode="clip").reshape(spread)
    mask = mask.reshape(*mask.shape, *(1,) * after)
    new = (x | values if x.dtype == bool else x + values) if accumulate else values
    result = jnp.where(mask, new, x)
    return result if wrong_count is None else invalid_if(wrong_count, result)


@register_lowering("_unsafe_masked_index", node=True)
def _unsafe_masked_index(x: jax.Array, mask: jax.Array, indices: Indices, fill: Any, *, node: fx.Node) -> jax.Array:
    filler = jnp.asarray(fill, x.dtype)
    if x.size == 0:
        return jnp.full(out_shape(node), filler)
    clamped = [i if i is None else jnp.clip(i, 0, x.shape[d] - 1) for d, i in enumerate(indices)]
    found = x.at[_index_tuple(clamped)].get(mode="promise_in_bounds", wrap_negative_indices=False)
    return jnp.where(mask, found.reshape(out_shape(node)), filler)


@register_lowering("_unsafe_masked_index_put_accumulate")
def _unsafe_masked_index_put_accumulate(
    x: jax.Array, mask: jax.Array, indices: Indices, values: jax.Array
) -> jax.Array:
    if x.size == 0:
        return x
    clamped = [i if i is None else jnp.clip(i, -x.shape[d], x.shape[d] - 1) for d, i in enumerate(indices)]
    return _index_put(x, clamped, jnp.where(mask, values, jnp.zeros((), values.dtype)), accumulate=True, node=None)


@register_lowering("masked_scatter")
def _masked_scatter(x: jax.Array, mask: jax.Array, source: jax.Array) -> jax.Array:
    shape = jnp.broadcast_shapes(x.shape, mask.shape)
    mask = jnp.broadcast_to(mask, shape)
    if source.size == 0:  # torch requires that the mask is all False then
        return invalid_if(jnp.any(mask), jnp.broadcast_to(x, shape))
    rank = jnp.cumsum(mask.reshape(-1), dtype=jnp.int64) - 1
    values = source.reshape(-1).at[rank].get(mode="clip", wrap_negative_indices=False)
    too_few = jnp.sum(mask, dtype=jnp.int64) > source.size
    return invalid_if(too_few, jnp.where(mask, values.reshape(shape), x))


@register_lowering("masked_scatter_backward")
def _masked_scatter_backward(grad: jax.Array, mask: jax.Array, sizes: Sequence[int]) -> jax.Array:
    mask = jnp.broadcast_to(mask, grad.shape).reshape(-1)
    length = jax.eval_shape(lambda: jnp.zeros(tuple(sizes))).size
    rank = jnp.where(mask, jnp.cumsum(mask, dtype=jnp.int64) - 1, length)
    zeros = jnp.zeros(length, grad.dtype)
    flat = zeros.at[rank].set(grad.reshape(-1), mode="drop", wrap_negative_indices=False)
    return flat.reshape(tuple(sizes))


@register_lowering("nonzero_static")
def _nonzero_static(x: jax.Array, *, size: int, fill_value: int = -1) -> jax.Array:
    if x.size == 0 or x.ndim == 0:
        return jnp.full((size, x.ndim), fill_value, jnp.int64)
    found = jnp.nonzero(x, size=size, fill_value=fill_value)
    return jnp.stack(found, axis=1).astype(jnp.int64)


@register_lowering("repeat_interleave.Tensor", node=True)
def _repeat_interleave(repeats: jax.Array, *, output_size: int | None = None, node: fx.Node) -> jax.Array:
    if output_size is None:
        raise TranslationError(
            "`repeat_interleave` with a tensor of repeats has a shape that depends on data; pass `output_size=`"
        )
    ends = jnp.cumsum(repeats, dtype=jnp.int64)
    places = positions(out_shape(node), 0)
    found = jnp.searchsorted(ends, places, side="right")
    refused = (jnp.sum(repeats, dtype=jnp.int64) != places.size) | jnp.any(repeats < 0)
    # Where torch refuses the repeats, the indices are past the end, so that every read is out of range.
    return jnp.where(refused, repeats.size, found).astype(repeats.dtype)
