"""Positions of the largest and smallest elements. For floats on CPUs they are faster than XLA's own operation.

XLA's CPU compiler does not vectorize a reduction of pairs of an element and its position. It vectorizes reductions of
floats, which along the last axis are several times faster than those of integers. So the extreme element is found
first, and then the first position that holds it. Positions along the last axis are computed as floats. XLA must not
compute the array once for each of these reductions, so `materialized` is used.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .materialized import materialized

_EXACT_IN_FLOAT32 = 2**24


def first_largest(x: jax.Array, axis: int, dtype: Any) -> jax.Array:
    """Return the position along an axis of the first largest element, or of the first NaN if there is one.

    Args:
        x: an array with at least one element along the axis.
        axis: the axis, 0 or positive.
        dtype: the dtype of the positions.
    """
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return lax.argmax(x, axis, dtype)
    x = materialized(x)
    return _first_position(x, jnp.max(x, axis, keepdims=True), axis, dtype)


def first_smallest(x: jax.Array, axis: int, dtype: Any) -> jax.Array:
    """Return the position along an axis of the first smallest element, or of the first NaN if there is one.

    Args:
        x, axis, dtype: as for :func:`first_largest`.
    """
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return lax.argmin(x, axis, dtype)
    x = materialized(x)
    return _first_position(x, jnp.min(x, axis, keepdims=True), axis, dtype)


def _first_position(x: jax.Array, extreme: jax.Array, axis: int, dtype: Any) -> jax.Array:
    size = x.shape[axis]
    number: Any = np.int64
    if isinstance(size, int) and size < 2**31:  # not a symbol of an exported program
        number = np.float32 if axis == x.ndim - 1 and size <= _EXACT_IN_FLOAT32 else np.int32
    positions = lax.broadcasted_iota(number, x.shape, axis)
    held = jnp.where((x == extreme) | (x != x), positions, jnp.asarray(size, number))
    return jnp.min(held, axis).astype(dtype)
