"""Helpers of the lowerings that move elements."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from jax import lax

from jtbridge.lowerings._common import is_below


def box(x: jax.Array, starts: Sequence[int], ends: Sequence[int]) -> jax.Array:
    """Return ``x[starts[0]:ends[0], ...]`` without the bounds checks of indexing."""
    if all(s == 0 for s in starts) and tuple(ends) == x.shape:
        return x
    return lax.slice(x, tuple(starts), tuple(ends))


def positions(shape: Sequence[int], axis: int) -> jax.Array:
    """Return the coordinates along an axis, shaped to broadcast with arrays of `shape`."""
    dtype = np.int32 if is_below(shape[axis], 2**31) else np.int64
    return lax.broadcasted_iota(dtype, [n if i == axis else 1 for i, n in enumerate(shape)], axis)
