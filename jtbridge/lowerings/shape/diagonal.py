"""Diagonals, as strided slices of flattened matrices."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jtbridge.lowerings._common import axis_of, convert
from jtbridge.lowerings._registry import register_lowering

from ._common import positions


def _diagonal_span(rows: int, columns: int, offset: int) -> tuple[int, int]:
    """Return the index at which a diagonal starts in a flattened matrix, and its length."""
    start = offset if offset >= 0 else -offset * columns
    length = min(rows, columns - offset) if offset >= 0 else min(rows + offset, columns)
    return start, max(length, 0)


@register_lowering("diagonal", "diagonal_copy")
def _diagonal(x: jax.Array, offset: int = 0, dim1: int = 0, dim2: int = 1) -> jax.Array:
    x = jnp.moveaxis(x, (axis_of(dim1, x.ndim), axis_of(dim2, x.ndim)), (-2, -1))
    *batch, rows, columns = x.shape
    start, length = _diagonal_span(rows, columns, offset)
    if length == 0:
        return jnp.zeros((*batch, 0), x.dtype)
    step = columns + 1
    flat = x.reshape(*batch, rows * columns)
    return lax.slice_in_dim(flat, start, start + (length - 1) * step + 1, step, axis=-1)


def _diagonal_matrix(line: jax.Array, rows: int, columns: int, offset: int) -> jax.Array:
    """Return zeros with `line` (last axis) as a diagonal of the last two axes."""
    start, length = _diagonal_span(rows, columns, offset)
    batch = line.shape[:-1]
    if length == 0 or line.size == 0:
        return jnp.zeros((*batch, rows, columns), line.dtype)
    after = rows * columns - start - ((length - 1) * (columns + 1) + 1)
    config = [(0, 0, 0)] * len(batch) + [(start, after, columns)]
    return lax.pad(line, jnp.zeros((), line.dtype), config).reshape(*batch, rows, columns)


@register_lowering("diag_embed")
def _diag_embed(x: jax.Array, offset: int = 0, dim1: int = -2, dim2: int = -1) -> jax.Array:
    size = x.shape[-1] + abs(offset)
    matrix = _diagonal_matrix(x, size, size, offset)
    return jnp.moveaxis(matrix, (-2, -1), (axis_of(dim1, matrix.ndim), axis_of(dim2, matrix.ndim)))


@register_lowering("diagonal_backward")
def _diagonal_backward(grad: jax.Array, input_sizes: Sequence[int], offset: int, dim1: int, dim2: int) -> jax.Array:
    axes = axis_of(dim1, len(input_sizes)), axis_of(dim2, len(input_sizes))
    matrix = _diagonal_matrix(grad, input_sizes[axes[0]], input_sizes[axes[1]], offset)
    return jnp.moveaxis(matrix, (-2, -1), axes)


@register_lowering("diagonal_scatter")
def _diagonal_scatter(x: jax.Array, src: jax.Array, offset: int = 0, dim1: int = 0, dim2: int = 1) -> jax.Array:
    axes = axis_of(dim1, x.ndim), axis_of(dim2, x.ndim)
    matrix = _diagonal_matrix(convert(src, np.dtype(x.dtype)), x.shape[axes[0]], x.shape[axes[1]], offset)
    on_it = positions(x.shape, axes[1]) - positions(x.shape, axes[0]) == offset
    return jnp.where(on_it, jnp.moveaxis(matrix, (-2, -1), axes), x)
