"""Factorizations of matrices and solutions of linear systems, which several lowerings share.

Leading dimensions are batch dimensions.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.lax import Precision


def adjoint(x: jax.Array) -> jax.Array:
    """Return the conjugate transpose of each matrix."""
    return jnp.conj(x.mT)


def precise_product(a: jax.Array, b: jax.Array) -> jax.Array:
    """Return ``a @ b``, computed on every device in at least the precision of its dtype."""
    return jnp.matmul(a, b, precision=Precision.HIGHEST)


def real_dtype(dtype: np.dtype) -> np.dtype:
    """Return the dtype of the real part of numbers of `dtype`."""
    return np.dtype(np.finfo(dtype).dtype)


def identity_like(x: jax.Array, size: int) -> jax.Array:
    """Return an identity matrix of the given size for each matrix of `x`."""
    return jnp.broadcast_to(jnp.eye(size, dtype=x.dtype), (*x.shape[:-2], size, size))


def common_batch(*matrices: jax.Array) -> list[jax.Array]:
    """Broadcast the batch dimensions of matrices together."""
    batch = jnp.broadcast_shapes(*(x.shape[:-2] for x in matrices))
    return [jnp.broadcast_to(x, (*batch, *x.shape[-2:])) for x in matrices]


def solve_triangular(
    a: jax.Array, b: jax.Array, *, lower: bool, left: bool = True, adjoint: bool = False, unit: bool = False
) -> jax.Array:
    """Return X of ``A X = B`` (or of ``X A = B`` if not `left`), reading one triangle of A.

    With `adjoint`, A^H takes the place of A. With `unit`, the diagonal of A counts as 1.
    """
    a, b = common_batch(a, b)
    if b.size == 0:
        return b
    return lax.linalg.triangular_solve(
        a, b, left_side=left, lower=lower, transpose_a=adjoint, conjugate_a=adjoint, unit_diagonal=unit
    )


def lu_factor(a: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return packed L and U, the row with which each row was swapped, and the number of the first zero pivot.

    Rows and pivots are counted from 1; 0 means that no pivot is zero.
    """
    size = min(a.shape[-2:])
    if a.size == 0:
        return a, jnp.zeros((*a.shape[:-2], size), jnp.int32), jnp.zeros(a.shape[:-2], jnp.int32)
    lu, pivots, _ = lax.linalg.lu(a)
    return lu, pivots.astype(jnp.int32) + 1, _first_true_position(_main_diagonal(lu) == 0)


def _main_diagonal(x: jax.Array) -> jax.Array:
    return jnp.diagonal(x, axis1=-2, axis2=-1)


def _first_true_position(found: jax.Array) -> jax.Array:
    """Return the first true position along the last axis, counted from 1; 0 if no position is true."""
    return jnp.where(found.any(-1), jnp.argmax(found, -1) + 1, 0).astype(jnp.int32)


def lu_diagonal(lu: jax.Array, pivots: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the diagonal of U, and the sign of the row permutation that `pivots` stands for."""
    swaps = jnp.sum(pivots != jnp.arange(1, pivots.shape[-1] + 1), -1)
    return _main_diagonal(lu), jnp.where(swaps % 2 == 1, -1, 1).astype(lu.dtype)


def permutation_of(pivots: jax.Array, size: int) -> jax.Array:
    """Return the row numbers of a matrix, from 0, in their order after the row swaps `pivots`, which count from 1."""
    if pivots.shape[-1] == 0 or pivots.size == 0:
        return jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), (*pivots.shape[:-1], size))
    return lax.linalg.lu_pivots_to_permutation(pivots.astype(jnp.int32) - 1, size)  # torch's pivots may be int64


def take_rows(x: jax.Array, rows: jax.Array) -> jax.Array:
    """Return the rows of each matrix in the order that `rows` gives for this matrix."""
    return jnp.take_along_axis(x, rows[..., None], axis=-2)


def lu_solve(
    lu: jax.Array, pivots: jax.Array, b: jax.Array, *, left: bool = True, transposed: bool = False
) -> jax.Array:
    """Return X of ``A X = B``, or of ``A^H X = B`` if `transposed`; if not `left`, of ``X A = B`` or ``X A^H = B``."""
    if not left:
        return adjoint(lu_solve(lu, pivots, adjoint(b), transposed=not transposed))
    rows = permutation_of(pivots, lu.shape[-1])[..., None]
    lu, b, rows = common_batch(lu, b, rows)
    if b.size == 0:
        return b
    rows = rows[..., 0]
    if not transposed:
        y = solve_triangular(lu, take_rows(b, rows), lower=True, unit=True)
        return solve_triangular(lu, y, lower=False)
    y = solve_triangular(lu, b, lower=False, adjoint=True)
    y = solve_triangular(lu, y, lower=True, adjoint=True, unit=True)
    return take_rows(y, jnp.argsort(rows, axis=-1))
