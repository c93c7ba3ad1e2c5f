"""Eigenvalues, singular values, pseudoinverses computed from them, and matrix exponentials."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from torch import fx

from jtbridge.lowerings._common import opmath, out_dtype, out_shape
from jtbridge.lowerings._registry import register_lowering

from ._matrices import adjoint, identity_like, precise_product, real_dtype


def _of_finite(function: Callable[[jax.Array], Any], a: jax.Array, read: jax.Array | None = None) -> Any:
    """Return the results of an iterative LAPACK function; all NaN for a matrix with elements that are not finite.

    For such matrices torch raises, and LAPACK may not terminate. `read` is the part of `a` that the function reads.
    """
    finite = jnp.all(jnp.isfinite(a if read is None else read), axis=(-2, -1))

    def checked(result: jax.Array) -> jax.Array:
        mask = finite.reshape(finite.shape + (1,) * (result.ndim - finite.ndim))
        return jnp.where(mask, result, jnp.asarray(jnp.nan, result.dtype))

    return jax.tree.map(checked, function(jnp.where(finite[..., None, None], a, jnp.zeros((), a.dtype))))


def _eigh(a: jax.Array, lower: bool) -> tuple[jax.Array, jax.Array]:
    """Return eigenvalues in ascending order and eigenvectors, reading one triangle of `a`."""
    if a.size == 0:
        return jnp.zeros(a.shape[:-1], real_dtype(a.dtype)), a
    read = jnp.tril(a) if lower else jnp.triu(a)
    vectors, values = _of_finite(lambda a: lax.linalg.eigh(a, lower=lower, symmetrize_input=False), a, read)
    return values.astype(real_dtype(a.dtype)), vectors


@register_lowering("_linalg_eigh")
def _linalg_eigh(a: jax.Array, UPLO: str = "L", compute_v: bool = True) -> tuple[jax.Array, jax.Array]:
    values, vectors = _eigh(a, UPLO.upper() == "L")
    return values, vectors if compute_v else jnp.zeros((0,), a.dtype)


@register_lowering("linalg_eig", node=True)
def _eig(a: jax.Array, *, node: fx.Node) -> tuple[jax.Array, jax.Array]:
    dtype = out_dtype(node)
    if a.size == 0:
        return jnp.zeros(a.shape[:-1], dtype), a.astype(dtype)
    values, vectors = _of_finite(lambda a: lax.linalg.eig(a, compute_left_eigenvectors=False), a)
    return values, vectors


@register_lowering("_linalg_eigvals", node=True)
def _eigvals(a: jax.Array, *, node: fx.Node) -> jax.Array:
    if a.size == 0:
        return jnp.zeros(a.shape[:-1], out_dtype(node))

    def values(a: jax.Array) -> Any:
        return lax.linalg.eig(a, compute_left_eigenvectors=False, compute_right_eigenvectors=False)[0]

    return _of_finite(values, a)


@register_lowering("_linalg_svd", node=True)
def _svd(
    a: jax.Array, full_matrices: bool = False, compute_uv: bool = True, *, driver: str | None = None, node: fx.Node
) -> tuple[jax.Array, jax.Array, jax.Array]:
    del driver  # selects an algorithm
    none = jnp.zeros((0,), a.dtype)
    if a.size == 0:
        s = jnp.zeros(out_shape(node, 1), out_dtype(node, 1))
        if not compute_uv:
            return none, s, none
        rows, columns = out_shape(node), out_shape(node, 2)
        u, v = identity_like(a, rows[-2])[..., : rows[-1]], identity_like(a, columns[-1])[..., : columns[-2], :]
        return u, s, v
    if not compute_uv:
        return none, _of_finite(lambda a: lax.linalg.svd(a, compute_uv=False), a), none
    u, s, v = _of_finite(lambda a: lax.linalg.svd(a, full_matrices=full_matrices), a)
    return u, s, v


@register_lowering("linalg_pinv.atol_rtol_tensor")
def _pinv(
    a: jax.Array, *, atol: jax.Array | None = None, rtol: jax.Array | None = None, hermitian: bool = False
) -> jax.Array:
    if a.size == 0:
        return a.mT
    real = real_dtype(a.dtype)
    if rtol is None:
        rtol = jnp.asarray(np.finfo(real).eps * max(a.shape[-2:]), real)
        rtol = rtol if atol is None else jnp.where(atol > 0, jnp.zeros((), real), rtol)
    atol = jnp.zeros((), real) if atol is None else atol
    if hermitian:
        values, right = _eigh(a, True)
        left = adjoint(right)
    else:
        u, values, v = _of_finite(lambda a: lax.linalg.svd(a, full_matrices=False), a)
        left, right = adjoint(u), adjoint(v)
    sizes = jnp.abs(values)
    least = jnp.maximum(atol[..., None], rtol[..., None] * sizes.max(-1, keepdims=True))
    inverse = jnp.where(sizes > least, 1 / values, 0).astype(a.dtype)
    return precise_product(right * inverse[..., None, :], left)


# The degree of the Taylor polynomial, and the 1-norm up to which it is accurate to rounding, as in torch (Bader, Blanes
# and Casas, 2019).
_DEGREE = 18
_MAX_BY_DTYPE = {np.dtype(np.float32): 3.010066362817634, np.dtype(np.float64): 1.090863719290036}


@register_lowering("linalg_matrix_exp")
def _matrix_exp(x: jax.Array) -> jax.Array:
    """Return matrix exponentials by scaling, a Taylor polynomial and repeated squaring.

    Rational approximations lose digits if one block of the matrix determines its norm.
    """
    if x.size == 0:
        return x
    a = x.astype(opmath(x.dtype))
    largest = _MAX_BY_DTYPE[real_dtype(a.dtype)]
    norm = jnp.max(jnp.sum(jnp.abs(a), -2), -1)
    halvings = jnp.where(norm > largest, jnp.ceil(jnp.log2(norm / largest)), 0)
    halvings = jnp.where(jnp.isfinite(halvings), halvings, 0)
    result = _taylor(a * jnp.exp2(-halvings)[..., None, None].astype(a.dtype))

    def square(i: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.where((i < halvings)[..., None, None], precise_product(y, y), y)

    return lax.fori_loop(0, jnp.max(halvings).astype(int), square, result).astype(x.dtype)


def _taylor(a: jax.Array) -> jax.Array:
    """Return the Taylor polynomial of exp, computed in blocks of four powers (Paterson and Stockmeyer)."""
    squared = precise_product(a, a)
    powers = (identity_like(a, a.shape[-1]), a, squared, precise_product(squared, a))
    fourth = precise_product(squared, squared)
    terms = [1 / math.factorial(k) for k in range(_DEGREE + 1)]
    total = jnp.zeros_like(a)
    for start in range(_DEGREE // 4 * 4, -1, -4):
        block = sum(c * power for c, power in zip(terms[start : start + 4], powers, strict=False))
        total = precise_product(total, fourth) + block
    return total
