"""Pooling into a given number of windows: adaptive and fractional pooling. Gradients of the maxima are in `pooling`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jtbridge.lowerings._common import opmath
from jtbridge.lowerings._registry import register_lowering

from ._windows import bins, flat_positions, largest

Sizes = Sequence[int]


def _even(lengths: Sizes, counts: Sizes) -> bool:
    """Return whether all windows have the same length and do not overlap."""
    return all(count and length % count == 0 for length, count in zip(lengths, counts, strict=True))


def _split_windows(x: Any, counts: Sizes) -> Any:
    """Split each of the last dimensions in two: the window, and the place in the window."""
    outer = x.shape[: x.ndim - len(counts)]
    inner = [n for length, count in zip(x.shape[len(outer) :], counts, strict=True) for n in (count, length // count)]
    return x.reshape(*outer, *inner)


def _window_axes(ndim: int, rank: int) -> tuple[int, ...]:
    """Return the axes of an array from `_split_windows` that hold the places in a window."""
    return tuple(ndim - rank + 1 + 2 * i for i in range(rank))


def _window_sum(x: jax.Array, axis: int, count: int) -> jax.Array:
    found = bins(x.shape[axis], count)
    parts = jnp.take(x, found.index.reshape(-1), axis=axis)
    parts = parts.reshape(*x.shape[:axis], *found.index.shape, *x.shape[axis + 1 :])
    inside = found.inside.reshape(*found.inside.shape, *(1,) * (x.ndim - axis - 1))
    return jnp.sum(jnp.where(inside, parts, 0), axis=axis + 1)


def _adaptive_average(x: jax.Array, output_size: Sizes) -> jax.Array:
    rank = len(output_size)
    lengths = x.shape[x.ndim - rank :]
    if _even(lengths, output_size):
        return jnp.mean(_split_windows(x, output_size), axis=_window_axes(x.ndim, rank))
    sizes = np.ones((), np.int64)
    for i, (length, count) in enumerate(zip(lengths, output_size, strict=True)):
        x = _window_sum(x, x.ndim - rank + i, count)
        sizes = sizes[..., None] * bins(length, count).lengths
    return x / jnp.asarray(sizes, x.dtype)


@register_lowering("_adaptive_avg_pool2d", "_adaptive_avg_pool3d")
def _adaptive_avg_pool(x: jax.Array, output_size: Sizes) -> jax.Array:
    return _adaptive_average(x.astype(opmath(x.dtype)), output_size).astype(x.dtype)


def _adaptive_average_backward(grad: jax.Array, x: jax.Array, rank: int) -> jax.Array:
    inner = opmath(grad.dtype)
    counts = grad.shape[grad.ndim - rank :]
    wide = jax.ShapeDtypeStruct(x.shape, inner)
    (found,) = jax.linear_transpose(lambda a: _adaptive_average(a, counts), wide)(grad.astype(inner))
    return found.astype(grad.dtype)


@register_lowering("_adaptive_avg_pool2d_backward")
def _adaptive_avg_pool2d_backward(grad: jax.Array, x: jax.Array) -> jax.Array:
    return _adaptive_average_backward(grad, x, 2)


@register_lowering("_adaptive_avg_pool3d_backward")
def _adaptive_avg_pool3d_backward(grad: jax.Array, x: jax.Array) -> jax.Array:
    return _adaptive_average_backward(grad, x, 3)


@register_lowering("adaptive_max_pool2d", "adaptive_max_pool3d")
def _adaptive_max_pool(x: jax.Array, output_size: Sizes) -> tuple[jax.Array, jax.Array]:
    rank = len(output_size)
    lengths = x.shape[x.ndim - rank :]
    place = flat_positions(lengths)
    if _even(lengths, output_size):
        axes = _window_axes(x.ndim, rank)
        value, found = largest(_split_windows(x, output_size), jnp.asarray(_split_windows(place, output_size)), axes)
        return value, found.astype(np.int64)
    value, found = x, jnp.broadcast_to(jnp.asarray(place), x.shape)
    for i, count in enumerate(output_size):
        value, found = _bin_maxima(value, found, x.ndim - rank + i, count)
    return value, found.astype(np.int64)


def _bin_maxima(x: jax.Array, place: jax.Array, axis: int, count: int) -> tuple[jax.Array, jax.Array]:
    found = bins(x.shape[axis], count)
    shape = (*x.shape[:axis], *found.index.shape, *x.shape[axis + 1 :])
    # A bin that is shorter than others repeats its first element, which changes no maximum and no position.
    index = found.index.reshape(-1)
    values, places = (jnp.take(a, index, axis=axis).reshape(shape) for a in (x, place))
    return largest(values, places, (axis + 1,))


def _window_starts(sample: jax.Array, length: int, count: int, size: int) -> jax.Array:
    """Return the starts of windows that are spread at random. The last window ends where the dimension ends."""
    last = jnp.full((*sample.shape, 1), length - size, np.int32)
    if count == 1:
        return last
    alpha = jnp.asarray(length - size, sample.dtype) / jnp.asarray(count - 1, sample.dtype)
    number = jnp.arange(count - 1).astype(sample.dtype)
    sample = sample[..., None]
    drawn = ((number + sample) * alpha).astype(np.int32) - (sample * alpha).astype(np.int32)
    return jnp.concatenate([drawn, last], axis=-1)


def _fractional(
    x: jax.Array, kernel_size: Sizes, output_size: Sizes, samples: jax.Array, order: Sizes
) -> tuple[jax.Array, jax.Array]:
    """Return the maxima of a fractional pooling and their flat positions.

    Pooled dimension `i` uses random sample `order[i]` of each plane.
    """
    rank = len(order)
    lengths = x.shape[x.ndim - rank :]
    planes = x.reshape(-1, *lengths)
    samples = samples.reshape(-1, rank)

    def of_plane(plane: jax.Array, drawn: jax.Array) -> tuple[jax.Array, jax.Array]:
        index = []
        for i, (n, o, k) in enumerate(zip(lengths, output_size, kernel_size, strict=True)):
            window = _window_starts(drawn[order[i]], n, o, k)[:, None] + jnp.arange(k, dtype=np.int32)
            index.append(window.reshape(*(1,) * (2 * i), o, k, *(1,) * (2 * (rank - i - 1))))
        place = jnp.asarray(flat_positions(lengths))
        return largest(plane[tuple(index)], place[tuple(index)], range(1, 2 * rank, 2))

    value, found = jax.vmap(of_plane)(planes, samples)
    shape = (*x.shape[: x.ndim - rank], *output_size)
    return value.reshape(shape), found.reshape(shape).astype(np.int64)


@register_lowering("fractional_max_pool2d")
def _fractional_max_pool2d(
    x: jax.Array, kernel_size: Sizes, output_size: Sizes, samples: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return _fractional(x, kernel_size, output_size, samples, (1, 0))


@register_lowering("fractional_max_pool3d")
def _fractional_max_pool3d(
    x: jax.Array, kernel_size: Sizes, output_size: Sizes, samples: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return _fractional(x, kernel_size, output_size, samples, (0, 1, 2))
