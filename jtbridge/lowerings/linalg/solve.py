"""Systems of linear equations, inverses and determinants."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from torch import fx

from jtbridge.lowerings._common import input_value
from jtbridge.lowerings._registry import register_lowering

from ._matrices import (
    common_batch,
    identity_like,
    lu_diagonal,
    lu_factor,
    lu_solve,
    real_dtype,
    solve_triangular,
)


@register_lowering("_linalg_solve_ex")
def _solve_ex(
    a: jax.Array, b: jax.Array, *, left: bool = True, check_errors: bool = False
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    del check_errors  # a compiled program cannot raise; a singular system gives inf and NaN
    vectors = b.ndim == 1 or (a.ndim - 1 == b.ndim and b.shape == a.shape[:-1])
    lu, pivots, info = lu_factor(a)
    x = lu_solve(lu, pivots, b[..., None] if vectors else b, left=left)
    return x[..., 0] if vectors else x, lu, pivots, info


@register_lowering("linalg_inv_ex")
def _inv_ex(a: jax.Array, *, check_errors: bool = False) -> tuple[jax.Array, jax.Array]:
    del check_errors
    lu, pivots, info = lu_factor(a)
    return lu_solve(lu, pivots, identity_like(a, a.shape[-1])), info


@register_lowering("linalg_lu_solve")
def _lu_solve(lu: jax.Array, pivots: jax.Array, b: jax.Array, *, left: bool = True, adjoint: bool = False) -> jax.Array:
    return lu_solve(lu, pivots, b, left=left, transposed=adjoint)


@register_lowering("linalg_solve_triangular")
def _solve_triangular(
    a: jax.Array, b: jax.Array, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> jax.Array:
    return solve_triangular(a, b, lower=not upper, left=left, unit=unitriangular)


@register_lowering("triangular_solve")
def _triangular_solve(
    b: jax.Array, a: jax.Array, upper: bool = True, transpose: bool = False, unitriangular: bool = False
) -> tuple[jax.Array, jax.Array]:
    a, b = common_batch(a, b)
    # This operator does not conjugate the transpose.
    chosen, lower = (a.mT, upper) if transpose else (a, not upper)
    return solve_triangular(chosen, b, lower=lower, unit=unitriangular), a


def _factors_transpose(node: fx.Node) -> bool:
    """Return whether torch factors the transpose of a matrix for its determinant.

    Torch does so to save a copy, and its gradients rely on the choice.
    """
    value = input_value(node, 0)
    return value.is_contiguous() and not value.is_complex()


@register_lowering("_linalg_det", node=True)
def _det(a: jax.Array, *, node: fx.Node) -> tuple[jax.Array, jax.Array, jax.Array]:
    lu, pivots, _ = lu_factor(a.mT if _factors_transpose(node) else a)
    diagonal, sign = lu_diagonal(lu, pivots)
    return sign * jnp.prod(diagonal, -1, dtype=diagonal.dtype), lu, pivots


@register_lowering("_linalg_slogdet", node=True)
def _slogdet(a: jax.Array, *, node: fx.Node) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    lu, pivots, _ = lu_factor(a.mT if _factors_transpose(node) else a)
    diagonal, sign = lu_diagonal(lu, pivots)
    size = jnp.abs(diagonal)
    return sign * jnp.prod(jnp.sign(diagonal), -1), jnp.sum(jnp.log(size), -1, dtype=real_dtype(a.dtype)), lu, pivots


@register_lowering("_linalg_check_errors", node=True)
def _check_errors(info: jax.Array, api_name: str, *, is_matrix: bool, node: fx.Node) -> tuple[()] | None:
    """Return no result, and check nothing.

    A compiled program cannot raise. Where torch would raise, the results hold NaN or inf.
    """
    del info, api_name, is_matrix
    return None if node.meta.get("val") is None else ()


@register_lowering("linalg_cross")
def _cross(a: jax.Array, b: jax.Array, *, dim: int = -1) -> jax.Array:
    a, b = (jnp.moveaxis(x, dim, 0) for x in jnp.broadcast_arrays(a, b))
    one, two = jnp.array([1, 2, 0]), jnp.array([2, 0, 1])
    return jnp.moveaxis(a[one] * b[two] - a[two] * b[one], 0, dim)
