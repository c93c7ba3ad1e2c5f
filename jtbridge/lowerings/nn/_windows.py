"""Helpers of the pooling lowerings: windows over the last dimensions, and planes addressed by flat indices."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Sizes = Sequence[int]


@dataclasses.dataclass(frozen=True)
class Windows:
    """The windows of a pooling over the last dimensions of an array. Each field has one entry per pooled dimension."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    inputs: tuple[int, ...]  # lengths of the pooled dimensions
    outputs: tuple[int, ...]  # numbers of windows

    @property
    def rank(self) -> int:
        return len(self.kernel)

    def arguments(self, ndim: int) -> dict[str, Any]:
        """Return the arguments of `lax.reduce_window` for an array of `ndim` dimensions."""
        outer = (1,) * (ndim - self.rank)
        return {
            "window_dimensions": (*outer, *self.kernel),
            "window_strides": (*outer, *self.stride),
            "padding": ((0, 0),) * len(outer) + self._pads(),
            "window_dilation": (*outer, *self.dilation),
        }

    def _pads(self) -> tuple[tuple[int, int], ...]:
        """Return the padding before and after each pooled dimension.

        The padding after a dimension reaches to the end of the last window. With `ceil_mode` it may be larger than the
        padding before the dimension.
        """
        parts = zip(self.inputs, self.outputs, self.kernel, self.stride, self.padding, self.dilation, strict=True)
        return tuple((p, (o - 1) * s + d * (k - 1) + 1 - n - p) for n, o, k, s, p, d in parts)


def windows(
    x: jax.Array, kernel: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes, ceil_mode: bool, rank: int
) -> Windows:
    """Return the windows of torch's pooling. An empty stride means a stride equal to the kernel size."""
    sizes = per_dimension(kernel, rank)
    steps = per_dimension(stride, rank) if stride else sizes
    pads, gaps = per_dimension(padding, rank), per_dimension(dilation, rank)
    inputs = x.shape[x.ndim - rank :]
    counts = tuple(map(_window_count, inputs, sizes, steps, pads, gaps, (ceil_mode,) * rank))
    return Windows(sizes, steps, pads, gaps, inputs, counts)


def per_dimension(sizes: Sizes | int, rank: int) -> tuple[int, ...]:
    """Return one size for each of `rank` dimensions; a single size applies to all of them."""
    sizes = (sizes,) if isinstance(sizes, int) else tuple(sizes)
    return sizes * rank if len(sizes) == 1 else sizes


def _window_count(length: int, kernel: int, stride: int, padding: int, dilation: int, ceil_mode: bool) -> int:
    room = length + 2 * padding - dilation * (kernel - 1) - 1
    count = (room + (stride - 1 if ceil_mode else 0)) // stride + 1
    if ceil_mode and (count - 1) * stride >= length + padding:
        count -= 1  # a window must start inside the input or the padding before the input
    return count


@dataclasses.dataclass(frozen=True)
class Bins:
    """The windows of an adaptive pooling along one dimension: a given number of bins of about the same length."""

    index: np.ndarray  # (bin, place): input positions; a bin shorter than others repeats its first position
    inside: np.ndarray  # (bin, place): whether the place belongs to the bin

    @property
    def lengths(self) -> np.ndarray:
        return self.inside.sum(axis=1)


def bins(length: int, count: int) -> Bins:
    """Return the bins of torch's adaptive pooling of `length` elements to `count` elements."""
    number = np.arange(count)
    start, end = number * length // max(count, 1), -(-(number + 1) * length // max(count, 1))
    place = np.arange(max((end - start).max(initial=0), 0))
    index = start[:, None] + place
    inside = index < end[:, None]
    return Bins(np.where(inside, index, start[:, None]), inside)


def flat_positions(shape: Sizes) -> np.ndarray | jax.Array:
    """Return the flat index of each element of a plane, in 32 bits if 32 bits are known to suffice."""
    size = math.prod(shape)
    if not isinstance(size, int):
        return jnp.arange(size, dtype=np.int64).reshape(shape)
    return np.arange(size, dtype=np.int32 if size < 2**31 else np.int64).reshape(shape)


def lowest(dtype: np.dtype) -> np.ndarray:
    """Return the smallest value of a dtype: -inf for floats."""
    if jnp.issubdtype(dtype, jnp.integer):
        return np.asarray(jnp.iinfo(dtype).min, dtype)
    return np.asarray(-np.inf, dtype)


def larger(a: tuple[Any, Any], b: tuple[Any, Any]) -> tuple[Any, Any]:
    """Return the larger of two (value, position) pairs.

    Of equal values, the pair with the smaller position is returned. NaN is larger than any number; of two NaNs, the
    pair with the larger position is returned. The code uses `lax.select` because `jnp.where` would be a call in the
    body of a reduction: XLA's CPU compiler (jaxlib 0.10.2) crashes on some programs with two such calls.
    """
    (x, i), (y, j) = a, b
    x_nan, y_nan = x != x, y != y
    second = (y_nan & (~x_nan | (j > i))) | (~y_nan & ~x_nan & ((y > x) | ((y == x) & (j < i))))
    return lax.select(second, y, x), lax.select(second, j, i)


def largest(x: jax.Array, place: jax.Array, axes: Sequence[int]) -> tuple[jax.Array, jax.Array]:
    """Return the largest values along some axes, and their positions, which `place` holds for each element."""
    none = np.asarray(np.iinfo(place.dtype).max, place.dtype)
    place = jnp.broadcast_to(place, x.shape)
    value, found = lax.reduce((x, place), (lowest(x.dtype), none), larger, tuple(axes))
    return value, found


def scattered_into_planes(values: jax.Array, index: jax.Array, shape: Sizes, rank: int, add: bool) -> jax.Array:
    """Return zeros with `values` added or written at flat indices of each plane (the last `rank` dimensions)."""
    outer = math.prod(shape[: len(shape) - rank])
    size = math.prod(shape[len(shape) - rank :])
    if outer * size == 0 or values.size == 0:
        return jnp.zeros(shape, values.dtype)

    def plane(some: jax.Array, where: jax.Array) -> jax.Array:
        place = jnp.zeros(size, some.dtype).at[where]
        return place.add(some, mode="drop") if add else place.set(some, mode="drop")

    rows = values.reshape(outer, -1), index.reshape(outer, -1)
    return jax.vmap(plane)(*rows).reshape(tuple(shape))
