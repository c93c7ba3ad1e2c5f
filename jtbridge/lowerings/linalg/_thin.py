"""Products of few rows by a matrix whose rows lie in the order of memory, such as the weight of a linear layer."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax.interpreters import mlir

from jtbridge.core.cpu_identity import cpu_identity

# Measured on a CPU of two cores with AVX-512, 256 to 8192 wide: 2 to 32 rows take 0.35 to 0.75 of the time, 64 rows 0.7
# to 1.0 of it, 256 rows more. One row is a product of a vector, and small matrices take the same time both ways.
_ROWS = range(2, 65)
_LEAST_SIZE = 1 << 16


def is_thin(x: jax.Array, weight: jax.Array) -> bool:
    """Return whether ``times_transposed`` is faster on a CPU than a product in the order of its operands."""
    if not all(isinstance(size, int) for size in (*x.shape, *weight.shape)):  # symbolic sizes
        return False
    is_wide_float = x.dtype == weight.dtype and x.dtype in (jnp.float32, jnp.float64)
    return is_wide_float and weight.ndim == 2 and math.prod(x.shape[:-1]) in _ROWS and weight.size >= _LEAST_SIZE


def times_transposed(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Return ``x @ weight.T``, which XLA's CPU compiler computes as the transpose of ``weight @ x.T``.

    The product of XLA is several times slower if its first matrix has fewer rows than a block of the product has. XLA
    would move the transpose into the product, so an optimization barrier stands between them.

    Args:
        x: (..., k), a few rows.
        weight: (n, k).
    """
    rows = x.reshape(-1, x.shape[-1])
    product = jax.lax.dot_general(weight, rows, (((1,), (1,)), ((), ())))
    return _barrier_p.bind(product).T.reshape(*x.shape[:-1], weight.shape[0])


_barrier_p = cpu_identity("jtbridge_barrier", mlir.lower_fun(jax.lax.optimization_barrier, multiple_results=False))
