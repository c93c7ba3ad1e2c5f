"""Eigenvalues, singular values and functions of matrices by them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from torch import fx

from ._common import opmath, out_dtype, out_shape
from ._matrices import adjoint, identity_like, product, real_dtype
from ._registry import lowers


def _eigh(a: jax.Array, lower: bool) -> tuple[jax.Array, jax.Array]:
    """Eigenvalues in ascending order and eigenvectors, reading one triangle."""
    if a.size == 0:
        return jnp.zeros(a.shape[:-1], real_dtype(a.dtype)), a
    vectors, values = lax.linalg.eigh(a, lower=lower, symmetrize_input=False)
    return values.astype(real_dtype(a.dtype)), vectors


@lowers("_linalg_eigh")
def _linalg_eigh(a: jax.Array, UPLO: str = "L", compute_v: bool = True) -> tuple[jax.Array, jax.Array]:
    values, vectors = _eigh(a, UPLO.upper() == "L")
    return values, vectors if compute_v else jnp.zeros((0,), a.dtype)


@lowers("linalg_eig", node=True)
def _eig(a: jax.Array, *, node: fx.Node) -> tuple[jax.Array, jax.Array]:
    dtype = out_dtype(node)
    if a.size == 0:
        return jnp.zeros(a.shape[:-1], dtype), a.astype(dtype)
    values, vectors = lax.linalg.eig(a, compute_left_eigenvectors=False)
    return values, vectors


@lowers("_linalg_eigvals", "linalg_eigvals", node=True)
def _eigvals(a: jax.Array, *, node: fx.Node) -> jax.Array:
    if a.size == 0:
        return jnp.zeros(a.shape[:-1], out_dtype(node))
    (values,) = lax.linalg.eig(a, compute_left_eigenvectors=False, compute_right_eigenvectors=False)
    return values


@lowers("_linalg_svd", node=True)
def _svd(
    a: jax.Array, full_matrices: bool = False, compute_uv: bool = True, *, driver: str | None = None, node: fx.Node
) -> tuple[jax.Array, jax.Array, jax.Array]:
    del driver  # a choice among algorithms
    none = jnp.zeros((0,), a.dtype)
    if a.size == 0:
        s = jnp.zeros(out_shape(node, 1), out_dtype(node, 1))
        if not compute_uv:
            return none, s, none
        rows, columns = out_shape(node), out_shape(node, 2)
        u, v = identity_like(a, rows[-2])[..., : rows[-1]], identity_like(a, columns[-1])[..., : columns[-2], :]
        return u, s, v
    if not compute_uv:
        return none, lax.linalg.svd(a, compute_uv=False), none  # type: ignore[return-value]
    u, s, v = lax.linalg.svd(a, full_matrices=full_matrices)
    return u, s, v


@lowers("linalg_pinv.atol_rtol_tensor")
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
        u, values, v = lax.linalg.svd(a, full_matrices=False)
        left, right = adjoint(u), adjoint(v)
    sizes = jnp.abs(values)
    least = jnp.maximum(atol[..., None], rtol[..., None] * sizes.max(-1, keepdims=True))
    inverse = jnp.where(sizes > least, 1 / values, 0).astype(a.dtype)
    return product(right * inverse[..., None, :], left)


# Numerators of the diagonal Padé approximants of exp, and the norms up to which they are exact (Higham 2005).
_PADE = {
    np.dtype(np.float32): ((17297280, 8648640, 1995840, 277200, 25200, 1512, 56, 1), 3.925724783138660),
    np.dtype(np.float64): (
        (
            *(64764752532480000, 32382376266240000, 7771770303897600, 1187353796428800, 129060195264000),
            *(10559470521600, 670442572800, 33522128640, 1323241920, 40840800, 960960, 16380, 182, 1),
        ),
        5.371920351148152,
    ),
}


@lowers("linalg_matrix_exp")
def _matrix_exp(x: jax.Array) -> jax.Array:
    if x.size == 0:
        return x
    a = x.astype(opmath(x.dtype))
    coefficients, largest = _PADE[real_dtype(a.dtype)]
    norm = jnp.max(jnp.sum(jnp.abs(a), -2), -1)
    halvings = jnp.where(norm > largest, jnp.ceil(jnp.log2(norm / largest)), 0)
    halvings = jnp.where(jnp.isfinite(halvings), halvings, 0)
    a = a * jnp.exp2(-halvings)[..., None, None].astype(a.dtype)
    even, odd = _by_parity(a, coefficients)
    result = jnp.linalg.solve(even - odd, even + odd)

    def square(i: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.where((i < halvings)[..., None, None], product(y, y), y)

    return lax.fori_loop(0, jnp.max(halvings).astype(int), square, result).astype(x.dtype)


def _by_parity(a: jax.Array, coefficients: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """The even and the odd part of a polynomial of a matrix."""
    squared, one = product(a, a), identity_like(a, a.shape[-1])
    even, odd = coefficients[-2] * one, coefficients[-1] * one
    for c_even, c_odd in zip(coefficients[-4::-2], coefficients[-3::-2], strict=True):
        even, odd = product(even, squared) + c_even * one, product(odd, squared) + c_odd * one
    return even, product(a, odd)
