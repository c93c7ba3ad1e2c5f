"""LDL factorization of symmetric or Hermitian indefinite matrices, with Bunch-Kaufman pivoting as in LAPACK."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jtbridge.lowerings._registry import register_lowering

from ._matrices import adjoint, common_batch, permutation_of, solve_triangular, take_rows

# The least size of a 1x1 pivot, as a share of the largest element with which the pivot is compared.
_SHARE = (1 + math.sqrt(17)) / 8


class _State(NamedTuple):
    """The state of the factorization after `k` columns.

    `rest` is the part that is not yet factored, as a full matrix with zeros in the finished rows and columns.
    """

    k: jax.Array
    rest: jax.Array
    factors: jax.Array
    pivots: jax.Array
    info: jax.Array


@register_lowering("linalg_ldl_factor_ex")
def _ldl_factor_ex(
    x: jax.Array, *, hermitian: bool = False, check_errors: bool = False
) -> tuple[jax.Array, jax.Array, jax.Array]:
    del check_errors  # a compiled program cannot raise
    hermitian = hermitian and jnp.iscomplexobj(x)
    batch, n = x.shape[:-2], x.shape[-1]
    if x.size == 0:
        return x, jnp.zeros((*batch, n), jnp.int32), jnp.zeros(batch, jnp.int32)
    found = jax.vmap(lambda a: _factored(a, hermitian))(x.reshape(-1, n, n))
    return found[0].reshape(x.shape), found[1].reshape(*batch, n), found[2].reshape(batch)


def _factored(a: jax.Array, hermitian: bool) -> tuple[jax.Array, jax.Array, jax.Array]:
    n = a.shape[-1]
    lower = jnp.tril(a, -1)
    diagonal = jnp.diagonal(a)
    if hermitian:
        diagonal = jnp.real(diagonal).astype(a.dtype)
    whole = lower + jnp.diag(diagonal) + (adjoint(lower) if hermitian else lower.mT)
    zero = jnp.int32(0)
    start = _State(zero, whole, jnp.zeros_like(a), jnp.zeros((n,), jnp.int32), zero)
    end = lax.while_loop(lambda state: state.k < n, lambda state: _factor_columns(state, hermitian), start)
    return end.factors, end.pivots, end.info


def _factor_columns(state: _State, hermitian: bool) -> _State:
    """Factor one or two columns."""
    k, n = state.k, state.rest.shape[-1]
    rows = jnp.arange(n, dtype=jnp.int32)
    partner, double, singular = _pivot(state.rest, k)
    swapped = jnp.where(double, k + 1, k)
    order = jnp.where(rows == swapped, partner, jnp.where(rows == partner, swapped, rows))
    rest = state.rest[order][:, order]
    after = jnp.minimum(k + 1, n - 1)
    columns = jnp.stack([rest[:, k], rest[:, after]], -1)
    block = jnp.stack([columns[k], columns[after]])
    inverse = _pivot_inverse(block, double, singular)
    below = (rows > jnp.where(double, k + 1, k))[:, None]
    scaled = jnp.where(below, columns, 0) @ inverse
    scaled = jnp.where(double | (jnp.arange(2) == 0), scaled, 0)
    other = jnp.conj(columns) if hermitian else columns
    done = rows <= jnp.where(double, k + 1, k)
    rest = jnp.where(done[:, None] | done, 0, rest - jnp.where(singular, 0, scaled @ other.T))
    # The finished columns: the diagonal block, and the multipliers below it (unchanged where the pivot is zero).
    first = jnp.where(below[:, 0] & ~singular, scaled[:, 0], jnp.where(rows >= k, columns[:, 0], 0))
    second = jnp.where(below[:, 0], scaled[:, 1], jnp.where(rows == k + 1, columns[:, 1], 0))
    factors = state.factors.at[:, k].set(first)
    factors = factors.at[:, after].set(jnp.where(double, second, factors[:, after]))
    entry = jnp.where(double, -partner - 1, partner + 1)
    pivots = state.pivots.at[k].set(entry)
    pivots = pivots.at[after].set(jnp.where(double, entry, pivots[after]))
    info = jnp.where((state.info == 0) & singular, k + 1, state.info)
    return _State(jnp.where(double, k + 2, k + 1), rest, factors, pivots, info)


def _pivot(rest: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the row to swap with, whether the pivot has two rows, and whether the matrix is singular at column `k`.

    The matrix is singular there if the column is zero from the diagonal on, or if its diagonal element is NaN.
    """
    rows = jnp.arange(rest.shape[-1], dtype=jnp.int32)
    # LAPACK compares complex numbers by |re| + |im|.
    sizes = jnp.abs(rest.real) + jnp.abs(rest.imag) if jnp.iscomplexobj(rest) else jnp.abs(rest)
    here = sizes[k, k]
    column = jnp.where(rows > k, sizes[:, k], -1)
    at = jnp.argmax(column).astype(jnp.int32)
    largest = jnp.maximum(column[at], 0)
    across = jnp.max(jnp.where((rows >= k) & (rows != at), sizes[at], 0))
    singular = (jnp.maximum(here, largest) == 0) | jnp.isnan(here)
    stays = singular | (here >= _SHARE * largest) | (here >= _SHARE * largest * (largest / across))
    alone = sizes[at, at] >= _SHARE * across
    return jnp.where(stays, k, at), ~stays & ~alone, singular


def _pivot_inverse(block: jax.Array, double: jax.Array, singular: jax.Array) -> jax.Array:
    """Return the inverse of a 2x2 pivot (`double`), or of its first element in a matrix of zeros."""
    (a, b), (c, d) = block
    both = jnp.stack([jnp.stack([d, -b]), jnp.stack([-c, a])]) / (a * d - b * c)
    first = jnp.zeros_like(block).at[0, 0].set(1 / jnp.where(singular, 1, a))
    return jnp.where(double, both, first)


@register_lowering("linalg_ldl_solve")
def _ldl_solve(factors: jax.Array, pivots: jax.Array, b: jax.Array, *, hermitian: bool = False) -> jax.Array:
    factors, b, pivots = common_batch(factors, b, pivots[..., None])
    pivots = pivots[..., 0]
    if b.size == 0:
        return b
    hermitian = hermitian and jnp.iscomplexobj(factors)
    n = factors.shape[-1]
    paired = pivots < 0
    second = paired & (jnp.cumsum(paired, -1) % 2 == 0)
    first = paired & ~second
    index = jnp.arange(n, dtype=pivots.dtype)
    targets = jnp.where(paired, jnp.where(second, -pivots - 1, index), pivots - 1)
    lower = _unit_lower(factors, targets, first, second)
    order = permutation_of(targets + 1, n)
    y = solve_triangular(lower, take_rows(b, order), lower=True, unit=True)
    y = _solve_blocks(factors, first, second, y, hermitian)
    transposed = adjoint(lower) if hermitian else lower.mT
    return take_rows(solve_triangular(transposed, y, lower=False, unit=True), jnp.argsort(order, axis=-1))


def _unit_lower(factors: jax.Array, targets: jax.Array, first: jax.Array, second: jax.Array) -> jax.Array:
    """Return L. Its columns are stored without the row swaps of later columns, which are applied here."""
    n = factors.shape[-1]
    index = jnp.arange(n)
    beside = index[:, None] == index + 1
    stored = jnp.where(beside & first[..., None, :], 0, jnp.tril(factors, -1))

    def swap(k: jax.Array, lower: jax.Array) -> jax.Array:
        target = targets[..., k, None]
        order = jnp.where(index == k, target, jnp.where(index == target, k, index))
        earlier = index < k - second[..., k, None]
        return jnp.where(earlier[..., None, :], take_rows(lower, order), lower)

    return lax.fori_loop(0, n, swap, stored)


def _solve_blocks(factors: jax.Array, first: jax.Array, second: jax.Array, b: jax.Array, hermitian: bool) -> jax.Array:
    """Return X of ``D X = B``, where D has blocks of one and of two rows on its diagonal."""
    diagonal = jnp.diagonal(factors, axis1=-2, axis2=-1)[..., None]
    beside = jnp.pad(jnp.diagonal(factors, -1, -2, -1), [(0, 0)] * (factors.ndim - 2) + [(0, 1)])[..., None]
    below, above = beside, (jnp.conj(beside) if hermitian else beside)
    one = b / diagonal
    following, preceding = (lambda x: jnp.roll(x, -1, -2)), (lambda x: jnp.roll(x, 1, -2))
    determinant = diagonal * following(diagonal) - below * above
    upper = (following(diagonal) * b - above * following(b)) / determinant
    lower = (preceding(diagonal) * b - preceding(below) * preceding(b)) / preceding(determinant)
    return jnp.where(first[..., None], upper, jnp.where(second[..., None], lower, one))
