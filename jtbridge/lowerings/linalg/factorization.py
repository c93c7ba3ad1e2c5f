"""Cholesky, LU and QR factorizations, with factors packed as in LAPACK."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from torch import fx

from jtbridge.errors import TranslationError
from jtbridge.lowerings._common import out_shape
from jtbridge.lowerings._registry import register_lowering

from ._matrices import adjoint, identity_like, lu_factor, permutation_of, precise_product, solve_triangular


def _cholesky_factor(a: jax.Array, upper: bool) -> jax.Array:
    """Return the Cholesky factors of the matrices that one triangle of `a` stores; NaN if not positive definite."""
    if a.size == 0:
        return a
    factor = lax.linalg.cholesky(adjoint(a) if upper else a, symmetrize_input=False)
    return adjoint(factor) if upper else factor


@register_lowering("cholesky")
def _cholesky(x: jax.Array, upper: bool = False) -> jax.Array:
    return _cholesky_factor(x, upper)


@register_lowering("linalg_cholesky_ex")
def _cholesky_ex(x: jax.Array, *, upper: bool = False, check_errors: bool = False) -> tuple[jax.Array, jax.Array]:
    del check_errors  # a compiled program cannot raise; factors that do not exist are NaN
    factor = _cholesky_factor(x, upper)
    if x.size == 0:
        return factor, jnp.zeros(x.shape[:-2], jnp.int32)
    return factor, _first_bad_minor(adjoint(x) if upper else x, jnp.isnan(factor).any((-2, -1)))


@jax.custom_batching.custom_vmap
def _first_bad_minor(a: jax.Array, failed: jax.Array) -> jax.Array:
    """Return the order of the first leading minor that is not positive, where the factorization failed; elsewhere 0."""
    found = lax.cond(failed.any(), _count_of_positive_minors, lambda a: jnp.zeros(a.shape[:-2], jnp.int32), a)
    return jnp.where(failed, found + 1, 0).astype(jnp.int32)


@_first_bad_minor.def_vmap
def _of_batch(size: int, batched: list[bool], a: jax.Array, failed: jax.Array) -> tuple[jax.Array, bool]:
    """Batch `_first_bad_minor` by a leading dimension of its arguments.

    The default batching rule would always run the branch of `lax.cond` that is hardly ever needed.
    """
    a = a if batched[0] else jnp.broadcast_to(a, (size, *a.shape))
    failed = failed if batched[1] else jnp.broadcast_to(failed, (size, *failed.shape))
    return _first_bad_minor(a, failed), True


def _count_of_positive_minors(a: jax.Array) -> jax.Array:
    """Return the number of leading minors before the first one that is not positive, by Gaussian elimination."""
    n = a.shape[-1]
    lower = jnp.tril(a)
    whole = lower + adjoint(jnp.tril(lower, -1))
    later = jnp.arange(n)

    def step(k: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        rest, count = carry
        column = lax.dynamic_index_in_dim(rest, k, axis=-1, keepdims=False)
        pivot = jnp.real(lax.dynamic_index_in_dim(column, k, axis=-1, keepdims=False))
        count = jnp.where((count == k) & (pivot > 0), count + 1, count)
        column = jnp.where(later > k, column, 0)
        return rest - column[..., :, None] * jnp.conj(column[..., None, :]) / pivot[..., None, None], count

    start = (whole, jnp.zeros(a.shape[:-2], jnp.int32))
    return lax.fori_loop(jnp.int32(0), jnp.int32(n), step, start)[1]


@register_lowering("cholesky_inverse")
def _cholesky_inverse(x: jax.Array, upper: bool = False) -> jax.Array:
    inverse = solve_triangular(x, identity_like(x, x.shape[-1]), lower=not upper)
    return precise_product(inverse, adjoint(inverse)) if upper else precise_product(adjoint(inverse), inverse)


@register_lowering("cholesky_solve")
def _cholesky_solve(b: jax.Array, factor: jax.Array, upper: bool = False) -> jax.Array:
    y = solve_triangular(factor, b, lower=not upper, adjoint=upper)
    return solve_triangular(factor, y, lower=not upper, adjoint=not upper)


def _refuse_without_pivots(pivot: bool) -> None:
    if not pivot:
        raise TranslationError("an LU factorization is translated with pivoting only")


@register_lowering("linalg_lu_factor_ex")
def _lu_factor_ex(
    a: jax.Array, *, pivot: bool = True, check_errors: bool = False
) -> tuple[jax.Array, jax.Array, jax.Array]:
    del check_errors
    _refuse_without_pivots(pivot)
    return lu_factor(a)


@register_lowering("linalg_lu")
def _lu(a: jax.Array, *, pivot: bool = True) -> tuple[jax.Array, jax.Array, jax.Array]:
    _refuse_without_pivots(pivot)
    lu, pivots, _ = lu_factor(a)
    return _permutation(lu, pivots), *_triangles(lu)


@register_lowering("lu_unpack")
def _lu_unpack(
    lu: jax.Array, pivots: jax.Array, unpack_data: bool = True, unpack_pivots: bool = True
) -> tuple[jax.Array, jax.Array, jax.Array]:
    none = jnp.zeros((0,), lu.dtype)
    return (
        _permutation(lu, pivots) if unpack_pivots else none,
        *(_triangles(lu) if unpack_data else (none, none)),
    )


def _permutation(lu: jax.Array, pivots: jax.Array) -> jax.Array:
    """Return P of ``A = P L U``."""
    rows = lu.shape[-2]
    return (jnp.arange(rows)[:, None] == permutation_of(pivots, rows)[..., None, :]).astype(lu.dtype)


def _triangles(lu: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return L and U of packed factors."""
    size = min(lu.shape[-2:])
    lower = jnp.tril(lu[..., :, :size], -1) + jnp.eye(lu.shape[-2], size, dtype=lu.dtype)
    return lower, jnp.triu(lu[..., :size, :])


@register_lowering("linalg_qr", node=True)
def _qr(a: jax.Array, mode: str = "reduced", *, node: fx.Node) -> tuple[jax.Array, jax.Array]:
    m, n = a.shape[-2:]
    if a.size == 0:
        q = identity_like(a, m)[..., : out_shape(node)[-1]] if mode != "r" else jnp.zeros((0,), a.dtype)
        return q, jnp.zeros(out_shape(node, 1), a.dtype)
    if mode == "r":
        packed, _ = _reflectors(a)
        return jnp.zeros((0,), a.dtype), jnp.triu(packed[..., : min(m, n), :])
    q, r = lax.linalg.qr(a, full_matrices=mode == "complete")
    return q, r


def _reflectors(a: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return R and the Householder vectors, packed in one matrix, and the scales of the reflectors."""
    if a.size == 0:
        return a, jnp.zeros((*a.shape[:-2], min(a.shape[-2:])), a.dtype)
    transposed, scales = jnp.linalg.qr(a, mode="raw")
    return transposed.mT, scales


@register_lowering("geqrf")
def _geqrf(a: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _reflectors(a)


@register_lowering("linalg_householder_product")
def _householder_product(reflectors: jax.Array, scales: jax.Array) -> jax.Array:
    if reflectors.size == 0:
        return reflectors
    if scales.size == 0:
        return identity_like(reflectors, reflectors.shape[-2])[..., : reflectors.shape[-1]]
    return lax.linalg.householder_product(reflectors, scales)


@register_lowering("ormqr")
def _ormqr(
    reflectors: jax.Array, scales: jax.Array, other: jax.Array, left: bool = True, transpose: bool = False
) -> jax.Array:
    if other.size == 0 or scales.size == 0:
        return other
    return lax.linalg.ormqr(reflectors, scales, other, left=left, transpose=transpose)
