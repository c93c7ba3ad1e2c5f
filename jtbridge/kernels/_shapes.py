"""Rows and blocks: the sizes that kernels over rows are launched with."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from ._primitive import BatchingRule, KernelPrimitive

FLOATS = (jnp.dtype("float32"), jnp.dtype("bfloat16"), jnp.dtype("float16"))


def unsupported_dtype(name: str, dtype: np.dtype, known: Sequence[np.dtype]) -> str | None:
    """Why an argument of this dtype is refused; None if it is not."""
    if dtype in known:
        return None
    return f"`{name}` is {dtype}, the kernel takes {', '.join(str(d) for d in known)}"


def check_floating(**named: jax.Array | None) -> None:
    """Raises a TypeError for arguments that are not real floating-point arrays: their results could not be held."""
    for name, array in named.items():
        if array is not None and not jnp.issubdtype(array.dtype, jnp.floating):
            raise TypeError(f"`{name}` is {array.dtype}, not of a real floating-point dtype")


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


def accumulated(x: jax.Array) -> np.dtype:
    """What sums over a floating-point array are taken in: float32, or float64 for that."""
    return np.dtype("float64" if x.dtype == np.dtype("float64") else "float32")


def grouped(shared: Sequence[int]) -> BatchingRule:
    """For steps whose arguments and results begin with an axis of groups: a batch of `b` is `b` times the groups.

    The arguments in `shared` may have one group for all, then each of them. What they get as gradients is by group all
    the same.
    """

    def batching_rule(
        step: KernelPrimitive, batched: Sequence[bool], arrays: Sequence[jax.Array]
    ) -> Sequence[jax.Array]:
        size = next(x.shape[0] for b, x in zip(batched, arrays, strict=True) if b)
        groups = max(x.shape[b] for b, x in zip(batched, arrays, strict=True))
        one = not any(batched[i] or arrays[i].shape[0] > 1 for i in shared)

        def merged(i: int, b: bool, x: jax.Array) -> jax.Array:
            if one and i in shared:
                return x
            inner = x.shape[b + 1 :]
            return jnp.broadcast_to(x if b else x[None], (size, groups, *inner)).reshape(size * groups, *inner)

        results = step(*(merged(i, b, x) for i, (b, x) in enumerate(zip(batched, arrays, strict=True))))
        return [y.reshape(size, groups, *y.shape[1:]) for y in results]

    return batching_rule


def to_precision(y: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Values rounded to a narrower dtype and kept in their own; XLA may skip a conversion there and back."""
    info = jnp.finfo(dtype)
    return jax.lax.reduce_precision(y, info.nexp, info.nmant)
