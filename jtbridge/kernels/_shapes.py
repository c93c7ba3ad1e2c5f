"""Helpers that the kernels share: checks of dtypes and options, sizes of grids and blocks, and rounding."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

FLOATS = (jnp.dtype("float32"), jnp.dtype("bfloat16"), jnp.dtype("float16"))


def unsupported_dtype_reason(name: str, dtype: np.dtype, known: Sequence[np.dtype]) -> str | None:
    """Return the reason that the kernel does not take an argument of this dtype; None if it does."""
    if dtype in known:
        return None
    return f"`{name}` is {dtype}, the kernel takes {', '.join(str(d) for d in known)}"


def check_floating(**named: jax.Array | None) -> None:
    """Raise a TypeError for an argument that is not real and floating-point: its dtype could not hold the result."""
    for name, array in named.items():
        if array is not None and not jnp.issubdtype(array.dtype, jnp.floating):
            raise TypeError(f"`{name}` is {array.dtype}, not of a real floating-point dtype")


def check_same_dtype(**named: jax.Array) -> None:
    """Raise a TypeError unless all arguments have the dtype of the first one."""
    (first, wanted), *others = named.items()
    for name, array in others:
        if array.dtype != wanted.dtype:
            raise TypeError(f"`{name}` is {array.dtype}, expected the dtype of `{first}`, {wanted.dtype}")


def integer(name: str, value: Any) -> int:
    """Return an argument that must be an integer as an int, or raise a TypeError."""
    if not isinstance(value, bool):
        with contextlib.suppress(TypeError):
            return operator.index(value)
    raise TypeError(f"`{name}` is {value!r}, expected an integer that is known when JAX traces")


def switch(name: str, value: Any) -> bool:
    """Return an argument that must be True or False, or raise a TypeError."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"`{name}` is {value!r}, expected True or False")
    return bool(value)


def factor(name: str, value: Any) -> float:
    """Return an argument that must be a number as a float, or raise a TypeError."""
    if not isinstance(value, bool | str):
        with contextlib.suppress(TypeError, ValueError):
            number = float(value)
            if number == number:
                return number
    raise TypeError(f"`{name}` is {value!r}, expected a number that is known when JAX traces")


def next_power_of_2(n: int) -> int:
    """Return the smallest power of two that is not below `n`."""
    return 1 << max(n - 1, 0).bit_length()


def row_block(n: int, most: int, piece: int) -> int:
    """Return how many elements of a row of `n` a program takes at a time.

    A row of up to `most` elements is taken whole, padded to a power of two; a longer row in pieces of `piece` elements.
    """
    return next_power_of_2(n) if n <= most else piece


def tile_rows(rows: int, block: int, most: int) -> int:
    """Return how many rows of `block` elements a program takes together: up to `most` elements, and up to 64 rows."""
    return min(next_power_of_2(rows), max(1, most // block), 64)


def warps(block: int) -> int:
    """Return the number of warps for a block: one for every 256 elements (8 per thread), at least 1 and at most 16."""
    return min(16, max(1, block // 256))


def accumulation_dtype(x: jax.Array) -> np.dtype:
    """Return the dtype in which sums over a floating-point array are accumulated: float32, or float64 for float64."""
    return np.dtype("float64" if x.dtype == np.dtype("float64") else "float32")


def to_precision(y: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Round values to the precision of a narrower dtype, but keep their dtype.

    A conversion to the narrower dtype and back would not be safe: XLA may remove both conversions.
    """
    info = jnp.finfo(dtype)
    return jax.lax.reduce_precision(y, info.nexp, info.nmant)
