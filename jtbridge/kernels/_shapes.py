"""Rows and blocks: the sizes that kernels over rows are launched with."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

FLOATS = (jnp.dtype("float32"), jnp.dtype("bfloat16"), jnp.dtype("float16"))


def unsupported_dtype(name: str, dtype: np.dtype, known: Sequence[np.dtype]) -> str | None:
    """Why an argument of this dtype is refused; None if it is not."""
    if dtype in known:
        return None
    return f"`{name}` is {dtype}, the kernel takes {', '.join(str(d) for d in known)}"


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is not below `n`."""
    return 1 << max(n - 1, 0).bit_length()


def rows_grid(x: jax.Array) -> tuple[int]:
    """A program for each row of ``x[..., n]``."""
    return (math.prod(x.shape[:-1]),)


def row_block(n: int, most: int, piece: int) -> int:
    """How many elements of a row of `n` a program takes at a time: all if they are not more than `most`, or a piece."""
    return next_power_of_2(n) if n <= most else piece


def warps(block: int) -> int:
    """Warps for a program over a block: 8 to 16 elements a thread, up to 16 warps."""
    return min(16, max(1, block // 256))
