"""The random numbers of ``tl.philox``, in jnp, with the same bits for the same counters.

Salmon, Moraes, Dror and Shaw, Parallel random numbers: as easy as 1, 2, 3, SC 2011.
"""

from __future__ import annotations

import jax
import numpy as np

_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_INCREMENTS = (np.uint32(0x9E3779B9), np.uint32(0xBB67AE85))


def philox(
    seed: tuple[jax.Array, jax.Array], c0: jax.Array, c1: jax.Array, c2: jax.Array, c3: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Compute Philox4x32-10.

    Args:
        seed: the low and the high half of the seed, uint32.
        c0: the first word of the counter, uint32; `c1`, `c2` and `c3` are the other words. All arrays are broadcast.

    Returns:
        Four uint32 arrays of random bits.
    """
    k0, k1 = seed
    for _ in range(_ROUNDS):
        high0, low0 = _multiplied(c0, _MULTIPLIERS[0])
        high2, low2 = _multiplied(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high2 ^ c1 ^ k0, low2, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + _INCREMENTS[0], k1 + _INCREMENTS[1]
    return c0, c1, c2, c3


def _multiplied(x: jax.Array, factor: int) -> tuple[jax.Array, jax.Array]:
    """Return the upper and the lower 32 bits of a product, computed by halves: JAX may have no 64-bit integers."""
    low, high = np.uint32(factor & 0xFFFF), np.uint32(factor >> 16)
    x_low, x_high = x & np.uint32(0xFFFF), x >> np.uint32(16)
    lows, middle = x_low * low, x_high * low
    cross = (lows >> np.uint32(16)) + (middle & np.uint32(0xFFFF)) + x_low * high
    return x_high * high + (middle >> np.uint32(16)) + (cross >> np.uint32(16)), x * np.uint32(factor)
