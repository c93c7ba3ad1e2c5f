"""What pooling lowerings share: windows along the last dimensions, and planes addressed by flat indices."""

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
    """The windows of a pooling over the last dimensions of an array."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    @property
    def rank(self) -> int:
        return len(self.kernel)

    def arguments(self, ndim: int) -> dict[str, Any]:
        """Of `lax.reduce_window`."""
        outer = (1,) * (ndim - self.rank)
        return {
            "window_dimensions": (*outer, *self.kernel),
            "window_strides": (*outer, *self.stride),
            "padding": ((0, 0),) * len(outer) + self._pads(),
            "window_dilation": (*outer, *self.dilation),
        }

    def _pads(self) -> tuple[tuple[int, int], ...]:
        """On the right as much as the last window needs, which with `ceil_mode` may be more than on the left."""
        parts = zip(self.inputs, self.outputs, self.kernel, self.stride, self.padding, self.dilation, strict=True)
        return tuple((p, (o - 1) * s + d * (k - 1) + 1 - n - p) for n, o, k, s, p, d in parts)


def windows(
    x: jax.Array, kernel: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes, ceil_mode: bool, rank: int
) -> Windows:
    """The windows that torch's pooling has; no stride means as long as the kernel."""
    sizes = _full(kernel, rank)
    steps = _full(stride, rank) if stride else sizes
    pads, gaps = _full(padding, rank), _full(dilation, rank)
    inputs = x.shape[x.ndim - rank :]
    counts = tuple(map(_count, inputs, sizes, steps, pads, gaps, (ceil_mode,) * rank))
    return Windows(sizes, steps, pads, gaps, inputs, counts)


def _full(sizes: Sizes | int, rank: int) -> tuple[int, ...]:
    sizes = (sizes,) if isinstance(sizes, int) else tuple(sizes)
    return sizes * rank if len(sizes) == 1 else sizes


def _count(length: int, kernel: int, stride: int, padding: int, dilation: int, ceil_mode: bool) -> int:
    room = length + 2 * padding - dilation * (kernel - 1) - 1
    count = (room + (stride - 1 if ceil_mode else 0)) // stride + 1
    if ceil_mode and (count - 1) * stride >= length + padding:
        count -= 1  # a window must begin inside the input or the padding before it
    return count


@dataclasses.dataclass(frozen=True)
class Bins:
    """The windows of an adaptive pooling along one dimension: as many as asked for, of about the same length."""

    index: np.ndarray  # (bin, place): positions, repeated where a bin is shorter than others
    inside: np.ndarray  # (bin, place): whether it counts

    @property
    def lengths(self) -> np.ndarray:
        return self.inside.sum(axis=1)


def bins(length: int, count: int) -> Bins:
    """Torch's bins of an adaptive pooling."""
    number = np.arange(count)
    start, end = number * length // max(count, 1), -(-(number + 1) * length // max(count, 1))
    place = np.arange(max((end - start).max(initial=0), 0))
    index = start[:, None] + place
    inside = index < end[:, None]
    return Bins(np.where(inside, index, start[:, None]), inside)


def flat_positions(shape: Sizes) -> np.ndarray:
    """The flat index of each place of a plane, in 32 bits where they suffice."""
    size = math.prod(shape)
    return np.arange(size, dtype=np.int32 if size < 2**31 else np.int64).reshape(shape)


def lowest(dtype: np.dtype) -> np.ndarray:
    """What no value of a dtype is below."""
    if jnp.issubdtype(dtype, jnp.integer):
        return np.asarray(jnp.iinfo(dtype).min, dtype)
    return np.asarray(-np.inf, dtype)


def larger(a: tuple[Any, Any], b: tuple[Any, Any]) -> tuple[Any, Any]:
    """Of two values with their places the larger: the first of equal ones, and the last NaN if there is one.

    `jnp.where` would be a call in the body of a reduction: XLA's CPU compiler (jaxlib 0.10.2) crashes on some programs
    with two of them.
    """
    (x, i), (y, j) = a, b
    x_nan, y_nan = x != x, y != y
    second = (y_nan & (~x_nan | (j > i))) | (~y_nan & ~x_nan & ((y > x) | ((y == x) & (j < i))))
    return lax.select(second, y, x), lax.select(second, j, i)


def largest(x: jax.Array, place: jax.Array, axes: Sequence[int]) -> tuple[jax.Array, jax.Array]:
    """The largest values along some axes, and their places."""
    none = np.asarray(np.iinfo(place.dtype).max, place.dtype)
    place = jnp.broadcast_to(place, x.shape)
    value, found = lax.reduce((x, place), (lowest(x.dtype), none), larger, tuple(axes))
    return value, found


def added_to_planes(values: jax.Array, index: jax.Array, shape: Sizes, rank: int) -> jax.Array:
    """Values added up at flat indices of each plane (the last `rank` dimensions) of an array of zeros."""
    return _into_planes(values, index, shape, rank, add=True)


def put_into_planes(values: jax.Array, index: jax.Array, shape: Sizes, rank: int) -> jax.Array:
    """Values written at flat indices of each plane (the last `rank` dimensions) of an array of zeros."""
    return _into_planes(values, index, shape, rank, add=False)


def _into_planes(values: jax.Array, index: jax.Array, shape: Sizes, rank: int, add: bool) -> jax.Array:
    outer = math.prod(shape[: len(shape) - rank])
    size = math.prod(shape[len(shape) - rank :])
    if outer * size == 0 or values.size == 0:
        return jnp.zeros(shape, values.dtype)

    def plane(some: jax.Array, where: jax.Array) -> jax.Array:
        place = jnp.zeros(size, some.dtype).at[where]
        return place.add(some, mode="drop") if add else place.set(some, mode="drop")

    rows = values.reshape(outer, -1), index.reshape(outer, -1)
    return jax.vmap(plane)(*rows).reshape(tuple(shape))
