"""Distances between rows."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax.lax import Precision
from torch import fx

from jtbridge.lowerings._common import out_shape
from jtbridge.lowerings._norm import norm_over
from jtbridge.lowerings._registry import register_lowering

# With more rows than this, torch computes the Euclidean distance by a matrix product, unless `compute_mode` forbids it.
_MANY_ROWS = 25
_BY_PRODUCT_IF_MANY, _BY_PRODUCT = 0, 1


def _distance(difference: jax.Array, p: float) -> jax.Array:
    """Return the p-norm of differences along the last axis."""
    if p == 0:
        return jnp.sum(jnp.minimum(jnp.ceil(jnp.abs(difference)), 1), -1)  # a NaN is kept, as in torch
    return norm_over(difference, p, (-1,), False, difference.dtype)


def _gradient_by_difference(difference: jax.Array, distance: jax.Array, grad: jax.Array, p: float) -> jax.Array:
    """Return `grad` times the derivative of the distance with respect to the difference.

    The derivative is 0 where the distance is 0, as in torch.
    """
    sign, size = jnp.sign(difference), jnp.abs(difference)
    if p == 0:
        return jnp.zeros_like(difference)
    if p == 1:
        return grad * sign
    if math.isinf(p):
        return grad * sign * (size == distance)
    nonzero = jnp.where(distance == 0, 1, distance)
    if p == 2:
        return jnp.where(distance == 0, 0, grad * difference / nonzero)
    if p < 2:
        slope = sign * size ** (p - 1) * grad / nonzero ** (p - 1)
        return jnp.where((distance == 0) | ((difference == 0) & (p < 1)), 0, slope)
    return jnp.where(distance == 0, 0, difference * size ** (p - 2) * grad / nonzero ** (p - 1))


@register_lowering("_cdist_forward")
def _cdist(x1: jax.Array, x2: jax.Array, p: float, compute_mode: int | None) -> jax.Array:
    mode = compute_mode or 0
    many = x1.shape[-2] > _MANY_ROWS or x2.shape[-2] > _MANY_ROWS
    if p == 2 and (mode == _BY_PRODUCT or (mode == _BY_PRODUCT_IF_MANY and many)):
        return _euclidean(x1, x2)
    return _distance(x1[..., :, None, :] - x2[..., None, :, :], p)


@register_lowering("_euclidean_dist")
def _euclidean(x1: jax.Array, x2: jax.Array) -> jax.Array:
    products = jnp.matmul(x1, x2.mT, precision=Precision.HIGHEST)
    squares = jnp.sum(x1 * x1, -1)[..., :, None] + jnp.sum(x2 * x2, -1)[..., None, :]
    return jnp.sqrt(jnp.maximum(squares - 2 * products, 0))


@register_lowering("_cdist_backward", node=True)
def _cdist_backward(
    grad: jax.Array, x1: jax.Array, x2: jax.Array, p: float, cdist: jax.Array, *, node: fx.Node
) -> jax.Array:
    if cdist.size == 0 or x1.size == 0:
        return jnp.zeros(out_shape(node), x1.dtype)
    difference = x1[..., :, None, :] - x2[..., None, :, :]
    return jnp.sum(_gradient_by_difference(difference, cdist[..., None], grad[..., None], p), -2)


@register_lowering("_pdist_forward")
def _pdist(x: jax.Array, p: float = 2.0) -> jax.Array:
    first, second = _pairs(x.shape[0])
    return _distance(x[first] - x[second], p)


@register_lowering("_pdist_backward")
def _pdist_backward(grad: jax.Array, x: jax.Array, p: float, pdist: jax.Array) -> jax.Array:
    n = x.shape[0]
    if n < 2:
        return jnp.zeros_like(x)
    first, second = _pairs(n)

    def whole(values: jax.Array) -> jax.Array:
        upper = jnp.zeros((n, n), values.dtype).at[first, second].set(values, unique_indices=True)
        return (upper + upper.T)[..., None]

    return jnp.sum(_gradient_by_difference(x[:, None] - x, whole(pdist), whole(grad), p), 1)


def _pairs(n: int) -> tuple[jax.Array, jax.Array]:
    """Return the pairs i < j of `n` rows in order, as an array of i and an array of j."""
    rows = jnp.arange(n)
    starts = rows * (2 * n - rows - 1) // 2  # the first pair whose first row is this row
    pair = jnp.arange(n * (n - 1) // 2)
    first = jnp.searchsorted(starts, pair, side="right") - 1
    # The last row is the first row of no pair, so its start belongs to no pair.
    first = jnp.minimum(first, n - 2)
    return first, pair - starts[first] + first + 1
