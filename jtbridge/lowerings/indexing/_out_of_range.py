"""Indices that are out of range, for which torch raises on a CPU.

A compiled program cannot raise, so its result holds an *invalid value* instead: NaN for floats, the least value of the
dtype for integers, False for bools. For int64 the invalid value is the number whose 32-bit halves are both the least
int32, because int64 results become int32 while x64 is off. A read out of range gives the invalid value. A write out of
range makes every element of the result invalid, because a silently dropped write could not be distinguished from one
that took place. Negative indices count from the end if they do so in torch's operator, and are out of range otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jtbridge.core.dtypes import NO_INT64

Places = tuple[Any, ...]


def invalid_value(dtype: np.dtype) -> Any:
    """Return the invalid value of a dtype, which stands for a value that torch would not compute."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return complex(np.nan, np.nan)
    if jnp.issubdtype(dtype, jnp.floating):
        return float("nan")
    if dtype == np.int64:
        return NO_INT64
    return False if dtype == np.bool_ else int(jnp.iinfo(dtype).min)


def read_at(x: jax.Array, places: Places, *, wrap: bool) -> jax.Array:
    """Return the elements of `x` at indices; the value of :func:`invalid_value` where an index is out of range."""
    return x.at[places].get(mode="fill", fill_value=invalid_value(x.dtype), wrap_negative_indices=wrap)


def read_along(x: jax.Array, index: jax.Array, axis: int) -> jax.Array:
    """Return elements at positions along an axis, one for each element of `index`; negative indices are invalid."""
    if x.shape[axis] == 0:
        return jnp.full(index.shape, invalid_value(x.dtype), x.dtype)
    inside = jnp.where(index < 0, jnp.asarray(x.shape[axis], index.dtype), index)
    return jnp.take_along_axis(x, inside, axis, mode="fill", fill_value=invalid_value(x.dtype))


def is_outside(shape: Sequence[int], places: Places, *, wrap: bool) -> jax.Array:
    """Return whether any of the places, one index array or slice for each axis, is out of range."""
    outside = jnp.zeros((), bool)
    for place, size in zip(places, shape, strict=False):
        if not isinstance(place, slice):
            outside |= jnp.any((place >= size) | (place < (-size if wrap else 0)))
    return outside


def invalid_if(outside: jax.Array, result: jax.Array) -> jax.Array:
    """Return `result`, or an array of the same shape that holds the invalid value, if `outside` is true.

    This is a branch, not a selection, so that `result` need not be copied.
    """

    def nothing(x: jax.Array) -> jax.Array:
        return jnp.full_like(x, invalid_value(x.dtype))

    return lax.cond(outside, nothing, lambda x: x, result)
