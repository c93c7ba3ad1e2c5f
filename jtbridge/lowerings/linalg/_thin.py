"""Products of a few rows and the transpose of a row-major matrix, such as the weight of a linear layer."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax.interpreters import mlir

from jtbridge.core.cpu_identity import cpu_identity

# Measured on a CPU with two cores and AVX-512, for matrices 256 to 8192 wide: `times_transposed` takes 0.35 to 0.75 of
# the time of ``x @ weight.T`` for 2 to 32 rows, 0.7 to 1.0 for 64 rows, and more than 1 for 256 rows. One row is a
# matrix-vector product, and small matrices take the same time both ways.
_ROWS = range(2, 65)
_MIN_SIZE = 1 << 16


def is_thin(x: jax.Array, weight: jax.Array) -> bool:
    """Return whether ``times_transposed`` is faster on a CPU than ``x @ weight.T``."""
    if not all(isinstance(size, int) for size in (*x.shape, *weight.shape)):  # symbolic sizes
        return False
    is_wide_float = x.dtype == weight.dtype and x.dtype in (jnp.float32, jnp.float64)
    return is_wide_float and weight.ndim == 2 and math.prod(x.shape[:-1]) in _ROWS and weight.size >= _MIN_SIZE


def times_transposed(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Return ``x @ weight.T``, which XLA's CPU compiler computes as the transpose of ``weight @ x.T``.

    XLA computes a product in blocks, several times slower if the first matrix has fewer rows than a block. XLA would
    merge the transpose into the product, so an optimization barrier separates the two.

    Args:
        x: (..., k), a few rows.
        weight: (n, k).
    """
    rows = x.reshape(-1, x.shape[-1])
    product = jax.lax.dot_general(weight, rows, (((1,), (1,)), ((), ())))
    return _barrier_p.bind(product).T.reshape(*x.shape[:-1], weight.shape[0])


_barrier_p = cpu_identity("jtbridge_barrier", mlir.lower_fun(jax.lax.optimization_barrier, multiple_results=False))
