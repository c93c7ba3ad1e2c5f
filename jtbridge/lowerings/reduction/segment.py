"""Reductions over segments: runs of elements along an axis, given by their lengths or by their offsets."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from jtbridge.lowerings._common import axis_of, opmath
from jtbridge.lowerings._registry import register_lowering
from jtbridge.lowerings.indexing.scatter import write_at

_STARTS = {"sum": 0.0, "mean": 0.0, "prod": 1.0, "max": -float("inf"), "min": float("inf")}
_OPERATIONS = {"sum": "sum", "mean": "sum", "prod": "prod", "max": "amax", "min": "amin"}


class _Segments:
    """Data as (batch, position along the axis, rest), and the segment of each position."""

    def __init__(self, data: jax.Array, lengths: jax.Array | None, offsets: jax.Array | None, axis: int):
        axis = axis_of(axis, data.ndim)
        self._before, self._after = data.shape[:axis], data.shape[axis + 1 :]
        if offsets is None:
            assert lengths is not None
            offsets = jnp.cumsum(jnp.pad(lengths, [(0, 0)] * axis + [(1, 0)]), axis=-1)
        self.offsets = offsets.reshape(-1, offsets.shape[-1])
        self.count = self.offsets.shape[1] - 1
        self.dtype = opmath(data.dtype)
        self.data = self.flat(data)
        places = jnp.arange(data.shape[axis], dtype=self.offsets.dtype)
        found = jax.vmap(lambda starts: jnp.searchsorted(starts, places, side="right"))(self.offsets) - 1
        found = jnp.where(found < 0, self.count, found)  # a position in no segment gets an index out of range
        self.where = (jnp.arange(self.offsets.shape[0])[:, None], found)

    def flat(self, x: jax.Array) -> jax.Array:
        shape = (len(self.offsets), x.shape[len(self._before)], math.prod(self._after))
        return x.reshape(shape).astype(self.dtype)

    def reduced(self, values: jax.Array, how: str, start: Any) -> jax.Array:
        empty = jnp.full((len(self.offsets), self.count, values.shape[2]), start, values.dtype)
        return write_at(empty, self.where, values, how, wrap=False)

    def spread(self, x: jax.Array) -> jax.Array:
        """Return for each position the value of its segment, or 0 if the position is in no segment."""
        return x.at[self.where].get(mode="fill", fill_value=0, wrap_negative_indices=False)

    @property
    def lengths(self) -> jax.Array:
        return jnp.diff(self.offsets, axis=1)[:, :, None]

    def shaped(self, x: jax.Array) -> jax.Array:
        return x.reshape(*self._before, x.shape[1], *self._after)


@register_lowering("segment_reduce")
def _segment_reduce(
    data: jax.Array,
    reduce: str,
    *,
    lengths: jax.Array | None = None,
    indices: jax.Array | None = None,
    offsets: jax.Array | None = None,
    axis: int = 0,
    unsafe: bool = False,
    initial: Any = None,
) -> jax.Array:
    del indices, unsafe  # torch has no reduction by indices
    segments = _Segments(data, lengths, offsets, axis)
    start = _STARTS[reduce] if initial is None else initial
    result = segments.reduced(segments.data, _OPERATIONS[reduce], start)
    if reduce == "mean":
        length = segments.lengths.astype(result.dtype)
        empty = jnp.nan if initial is None else result
        result = jnp.where(length > 0, result / jnp.maximum(length, 1), empty)
    return segments.shaped(result).astype(data.dtype)


@register_lowering("_segment_reduce_backward")
def _segment_reduce_backward(
    grad: jax.Array,
    output: jax.Array,
    data: jax.Array,
    reduce: str,
    *,
    lengths: jax.Array | None = None,
    offsets: jax.Array | None = None,
    axis: int = 0,
    initial: Any = None,
) -> jax.Array:
    segments = _Segments(data, lengths, offsets, axis)
    if segments.count == 0:
        return jnp.zeros_like(data)
    gradient, result = segments.flat(grad), segments.flat(output)
    if reduce == "sum":
        found = segments.spread(gradient)
    elif reduce == "mean":
        found = segments.spread(gradient / jnp.maximum(segments.lengths, 1).astype(gradient.dtype))
    elif reduce == "prod":
        found = _gradient_of_product(segments, gradient, result, 1 if initial is None else initial)
    else:
        found = _gradient_of_extreme(segments, gradient, result)
    return segments.shaped(found).astype(data.dtype)


def _gradient_of_extreme(segments: _Segments, grad: jax.Array, result: jax.Array) -> jax.Array:
    """Return the gradient of the maximum or minimum of each segment.

    As in torch's CPU kernel, elements that equal the extreme element or are NaN share a positive gradient, and each of
    them gets the whole of a negative gradient.
    """
    reached = (segments.data == segments.spread(result)) | jnp.isnan(segments.data)
    shares = segments.reduced(reached.astype(grad.dtype), "sum", 0)
    return jnp.where(reached, segments.spread(jnp.where(grad > 0, grad / jnp.maximum(shares, 1), grad)), 0)


def _gradient_of_product(segments: _Segments, grad: jax.Array, result: jax.Array, initial: Any) -> jax.Array:
    """Return the gradient of the product of each segment.

    The gradient is the product divided by the element or, for an element that is 0 or NaN, the product of the others.
    """
    data = segments.data
    zero, nan = data == 0, jnp.isnan(data)
    zeros = segments.spread(segments.reduced(zero.astype(data.dtype), "sum", 0)) - zero
    nans = segments.spread(segments.reduced(nan.astype(data.dtype), "sum", 0)) - nan
    rest = segments.spread(segments.reduced(jnp.where(zero | nan, 1, data), "prod", initial))
    others = jnp.where(nans > 0, jnp.nan, jnp.where(zeros > 0, 0, rest))
    divided = segments.spread(grad * result) / jnp.where(zero, 1, data)
    return jnp.where(zero | nan, segments.spread(grad) * others, divided)
