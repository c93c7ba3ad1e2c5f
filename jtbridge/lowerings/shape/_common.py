"""Helpers of the lowerings that move elements."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jtbridge.lowerings._common import is_below


def cast(x: jax.Array, dtype: np.dtype) -> jax.Array:
    """Return the values in another dtype, converted as by torch's ``copy_`` and ``to``."""
    if x.dtype == dtype:
        return x
    if jnp.issubdtype(x.dtype, jnp.complexfloating) and not jnp.issubdtype(dtype, jnp.complexfloating):
        x = x != 0 if dtype.kind == "b" else lax.real(x)
    if jnp.issubdtype(x.dtype, jnp.floating) and jnp.issubdtype(dtype, jnp.integer) and dtype.itemsize < 4:
        x = x.astype(jnp.int32)  # torch wraps out-of-range values of narrow integers; XLA saturates them
    return x.astype(dtype)


def box(x: jax.Array, starts: Sequence[int], ends: Sequence[int]) -> jax.Array:
    """Return ``x[starts[0]:ends[0], ...]`` without the bounds checks of indexing."""
    if all(s == 0 for s in starts) and tuple(ends) == x.shape:
        return x
    return lax.slice(x, tuple(starts), tuple(ends))


def positions(shape: Sequence[int], axis: int) -> jax.Array:
    """Return the coordinates along an axis, shaped to broadcast with arrays of `shape`."""
    dtype = np.int32 if is_below(shape[axis], 2**31) else np.int64
    return lax.broadcasted_iota(dtype, [n if i == axis else 1 for i, n in enumerate(shape)], axis)
