"""Resizing the last dimensions: nearest, linear, cubic and antialiased, and their gradients.

Each dimension is resized on its own: each output element is a weighted sum of a few input elements. Their indices and
weights depend only on the sizes and options, so they are NumPy arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax
from torch import fx

from jtbridge.errors import TranslationError
from jtbridge.lowerings._common import computed_once, input_value, opmath
from jtbridge.lowerings._registry import register_lowering

Sizes = Sequence[int]
Taps = tuple[np.ndarray, np.ndarray]  # (output element, tap): indices of input elements, and their weights
_SMALL_IMAGE = 128  # the largest height + width of a result for which torch has another kernel for nearest elements
_CHANNELS_LAST = {2: torch.channels_last, 3: torch.channels_last_3d}


def _resizes_channels_together(x: torch.Tensor, memory_format: torch.memory_format) -> bool:
    """Return whether torch resizes all channels of a position together, in the loops that it has for small images."""
    return x.shape[1] > 3 and x.is_contiguous(memory_format=memory_format)


def _position_dtype(x: jax.Array) -> Any:
    """Return the dtype in which positions and weights are computed."""
    return np.float64 if x.dtype == np.float64 else np.float32


def _output_spacing(length: int, count: int, factor: float | None, dtype: Any, align_corners: bool = False) -> Any:
    """Return the distance between two output elements, in input elements, in the precision that torch uses."""
    if align_corners:
        return dtype(length - 1) / dtype(count - 1) if count > 1 else dtype(0)
    return dtype(1.0 / factor) if factor is not None and factor > 0 else dtype(length) / dtype(count)


def _nearest_index(length: int, count: int, factor: float | None, exact: bool, dtype: Any) -> np.ndarray:
    scale = _output_spacing(length, count, factor, dtype)
    place = (np.arange(count).astype(dtype) + dtype(0.5 if exact else 0)) * scale
    return np.minimum(np.floor(place.astype(np.float32)).astype(np.int64), length - 1)


def _nearest_index_of_loops(length: int, count: int, factor: float | None, exact: bool, dtype: Any) -> np.ndarray:
    """Return the input index of each output element, as torch's loops compute it.

    Torch has these loops for backwards, for small images, and for images whose channels are last in memory.
    """
    del dtype
    if count in (length, 2 * length) and not exact:
        return np.arange(count) * length // count
    return _nearest_index(length, count, factor, exact, np.float32)


def _taken_along(x: jax.Array, index: np.ndarray, axis: int) -> jax.Array:
    """Return elements along a dimension. Evenly spaced or repeated elements are taken without a gather."""
    length, count = x.shape[axis], len(index)
    if np.array_equal(index, np.arange(length)):
        return x
    if length and count % length == 0 and np.array_equal(index, np.arange(count) // (count // length)):
        axes = [i if i <= axis else i + 1 for i in range(x.ndim)]
        wide = lax.broadcast_in_dim(x, (*x.shape[: axis + 1], count // length, *x.shape[axis + 1 :]), axes)
        return wide.reshape(*x.shape[:axis], count, *x.shape[axis + 1 :])
    step = int(index[1] - index[0]) if count > 1 else 1
    if count and step > 0 and np.array_equal(index, index[0] + step * np.arange(count)):
        return lax.slice_in_dim(x, int(index[0]), int(index[-1]) + 1, step, axis)
    return jnp.take(x, index, axis=axis)


def _nearest_resized(
    x: jax.Array, output_size: Sizes, factors: Sequence[float | None], exact: bool, places: Callable[..., np.ndarray]
) -> jax.Array:
    dtype = _position_dtype(x)
    for i, (count, factor) in enumerate(zip(output_size, factors, strict=True)):
        axis = x.ndim - len(output_size) + i
        x = _taken_along(x, places(x.shape[axis], count, factor, exact, dtype), axis)
    return x


def _source_positions(length: int, count: int, factor: float | None, align_corners: bool, dtype: Any) -> np.ndarray:
    """Return the positions of the output elements in units of input elements."""
    scale = _output_spacing(length, count, factor, dtype, align_corners)
    number = np.arange(count).astype(dtype)
    return scale * number if align_corners else scale * (number + dtype(0.5)) - dtype(0.5)


def _linear_taps(length: int, count: int, factor: float | None, align_corners: bool, dtype: Any) -> Taps:
    if count == length:
        return np.arange(count)[:, None], np.ones((count, 1), dtype)
    source = np.maximum(_source_positions(length, count, factor, align_corners, dtype), dtype(0))
    first = np.minimum(source.astype(np.int64), length - 1)
    second = np.minimum(first + 1, length - 1)
    share = np.clip(source - first.astype(dtype), 0, 1)
    return np.stack([first, second], 1), np.stack([1 - share, share], 1).astype(dtype)


def _cubic_taps(length: int, count: int, factor: float | None, align_corners: bool, dtype: Any) -> Taps:
    source = _source_positions(length, count, factor, align_corners, dtype)
    first = np.minimum(np.floor(source).astype(np.int64), length - 1)
    t = np.clip(source - first.astype(dtype), 0, 1)
    distance = np.stack([t + 1, t, 1 - t, 2 - t], 1)
    index = np.clip(first[:, None] + np.arange(-1, 3), 0, length - 1)
    return index, _cubic_kernel(distance, -0.75).astype(dtype)


def _cubic_kernel(distance: np.ndarray, a: float) -> np.ndarray:
    x = np.abs(distance)
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * a
    return np.where(x < 1, near, np.where(x < 2, far, 0))


def _triangle(distance: np.ndarray) -> np.ndarray:
    return np.maximum(1 - np.abs(distance), 0)


def _keys(distance: np.ndarray) -> np.ndarray:
    return _cubic_kernel(distance, -0.5)


def _lanczos(distance: np.ndarray) -> np.ndarray:
    inside = (distance >= -3) & (distance < 3)
    return np.where(inside, np.sinc(distance) * np.sinc(distance / 3), 0)


def _antialiased_taps(shape: Callable[[np.ndarray], np.ndarray], reach: int) -> Callable[..., Taps]:
    """Return a function that computes taps weighted by the filter `shape`, of half width `reach`.

    Where the image shrinks, the filter is widened by the distance between output elements.
    """

    def taps(length: int, count: int, factor: float | None, align_corners: bool, dtype: Any) -> Taps:
        scale = _output_spacing(length, count, factor, dtype, align_corners)
        support = dtype(reach) * scale if scale >= 1 else dtype(reach)
        narrowing = dtype(1) / scale if scale >= 1 else dtype(1)
        center = scale * (np.arange(count).astype(dtype) + dtype(0.5))
        start = np.maximum((center - support + dtype(0.5)).astype(np.int64), 0)
        size = np.clip(np.minimum((center + support + dtype(0.5)).astype(np.int64), length) - start, 0, None)
        place = np.arange(max(size.max(initial=1), 1))
        inside = place < size[:, None]
        distance = ((place + start[:, None]).astype(dtype) - center[:, None] + dtype(0.5)) * narrowing
        weight = np.where(inside, shape(distance), 0)
        total = weight.sum(axis=1, keepdims=True)
        weight = np.where(total != 0, weight / np.where(total == 0, 1, total), weight)
        return np.where(inside, start[:, None] + place, np.minimum(start, length - 1)[:, None]), weight.astype(dtype)

    return taps


def _resized_along(x: jax.Array, taps: Taps, axis: int) -> jax.Array:
    index, weight = taps
    if index.shape[1] == 1 and (weight == 1).all():
        return _taken_along(x, index[:, 0], axis)
    return computed_once(lambda x: _sum_of_taps(x, index, weight, axis))(x)


def _sum_of_taps(x: jax.Array, index: np.ndarray, weight: np.ndarray, axis: int) -> jax.Array:
    factor = jnp.asarray(weight, x.dtype).reshape(*index.shape, *(1,) * (x.ndim - axis - 1))
    if index.shape[1] <= 4:
        parts = [
            _taken_along(x, index[:, i], axis) * lax.index_in_dim(factor, i, 1, False) for i in range(index.shape[1])
        ]
        return sum(parts[1:], parts[0])
    parts = jnp.take(x, index.reshape(-1), axis=axis).reshape(*x.shape[:axis], *index.shape, *x.shape[axis + 1 :])
    return jnp.sum(jnp.where(factor == 0, 0, parts * factor), axis=axis + 1)  # an element of weight 0 may be NaN


def _resized(
    x: jax.Array, taps: Callable[..., Taps], output_size: Sizes, factors: Sequence[float | None], align_corners: bool
) -> jax.Array:
    dtype = _position_dtype(x)
    rank = len(output_size)
    for i in reversed(range(rank)):  # the last dimension first, as in torch
        axis = x.ndim - rank + i
        x = _resized_along(x, taps(x.shape[axis], output_size[i], factors[i], align_corners, dtype), axis)
    return x


def _register_nearest(name: str, rank: int, exact: bool) -> None:
    @register_lowering(name, node=True)
    def _(x: jax.Array, output_size: Sizes, *factors: float | None, node: fx.Node) -> jax.Array:
        is_small = rank == 2 and sum(output_size) <= _SMALL_IMAGE
        loops = is_small or (
            rank in _CHANNELS_LAST and _resizes_channels_together(input_value(node, 0), _CHANNELS_LAST[rank])
        )
        places = _nearest_index_of_loops if loops else _nearest_index
        return _nearest_resized(x, output_size, _factor_per_dimension(factors, rank), exact, places)

    @register_lowering(f"{name}_backward")
    def _(grad: jax.Array, output_size: Sizes, input_size: Sizes, *factors: float | None) -> jax.Array:
        how = _factor_per_dimension(factors, rank)
        return _transposed(
            lambda x: _nearest_resized(x, output_size, how, exact, _nearest_index_of_loops), grad, input_size
        )


def _register_weighted(name: str, rank: int, taps: Callable[..., Taps]) -> None:
    @register_lowering(name)
    def _(x: jax.Array, output_size: Sizes, align_corners: bool, *factors: float | None) -> jax.Array:
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            raise TranslationError(
                f"`{name}` of {x.dtype}, which torch computes with rounded weights, is not translated"
            )
        wide = x.astype(opmath(x.dtype))
        return _resized(wide, taps, output_size, _factor_per_dimension(factors, rank), align_corners).astype(x.dtype)

    @register_lowering(f"{name}_backward")
    def _(
        grad: jax.Array, output_size: Sizes, input_size: Sizes, align_corners: bool, *factors: float | None
    ) -> jax.Array:
        how = _factor_per_dimension(factors, rank)
        return _transposed(lambda x: _resized(x, taps, output_size, how, align_corners), grad, input_size)


def _factor_per_dimension(factors: Sequence[float | None], rank: int) -> list[float | None]:
    return [*factors, *(None,) * (rank - len(factors))]


def _transposed(forward: Callable[[jax.Array], jax.Array], grad: jax.Array, input_size: Sizes) -> jax.Array:
    inner = opmath(grad.dtype)
    (found,) = jax.linear_transpose(forward, jax.ShapeDtypeStruct(tuple(input_size), inner))(grad.astype(inner))
    return found.astype(grad.dtype)


for _rank in (1, 2, 3):
    _register_nearest(f"upsample_nearest{_rank}d", _rank, exact=False)
    _register_nearest(f"_upsample_nearest_exact{_rank}d", _rank, exact=True)
_register_weighted("upsample_linear1d", 1, _linear_taps)
_register_weighted("upsample_bilinear2d", 2, _linear_taps)
_register_weighted("upsample_trilinear3d", 3, _linear_taps)
_register_weighted("upsample_bicubic2d", 2, _cubic_taps)
_register_weighted("_upsample_bilinear2d_aa", 2, _antialiased_taps(_triangle, 1))
_register_weighted("_upsample_bicubic2d_aa", 2, _antialiased_taps(_keys, 2))
_register_weighted("_upsample_lanczos2d_aa", 2, _antialiased_taps(_lanczos, 3))
