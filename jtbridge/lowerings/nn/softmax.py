"""Softmax, its logarithm, and their gradients."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from torch import fx

from jtbridge.lowerings._common import axis_of, opmath, out_dtype, size_of
from jtbridge.lowerings._registry import register_lowering


@register_lowering("_softmax", node=True)
def _softmax(x: jax.Array, dim: int, half_to_float: bool, *, node: fx.Node) -> jax.Array:
    del half_to_float
    weights, total = _exponentials_and_sum(x, dim)
    return (weights / total).astype(out_dtype(node))


@register_lowering("_safe_softmax", node=True)
def _safe_softmax(x: jax.Array, dim: int, dtype: Any = None, *, node: fx.Node) -> jax.Array:
    """Return the softmax, with 0 instead of NaN where all elements are masked out (-inf)."""
    del dtype
    result = out_dtype(node)
    x = x.astype(result)
    weights, total = _exponentials_and_sum(x, dim)
    if size_of(x) == 0:
        return weights.astype(result)
    masked = jnp.all(x == -jnp.inf, axis=_axis(x, dim), keepdims=x.ndim > 0)
    return jnp.where(masked, jnp.zeros((), result), (weights / total).astype(result))


@register_lowering("_log_softmax", node=True)
def _log_softmax(x: jax.Array, dim: int, half_to_float: bool, *, node: fx.Node) -> jax.Array:
    del half_to_float
    result = out_dtype(node)
    x = x.astype(opmath(x.dtype))
    if size_of(x) == 0:
        return x.astype(result)
    x = x - _top(x, dim)
    return (x - jnp.log(_sum_along(jnp.exp(x), dim))).astype(result)


@register_lowering("_softmax_backward_data", node=True)
def _softmax_backward(grad: jax.Array, y: jax.Array, dim: int, input_dtype: Any, *, node: fx.Node) -> jax.Array:
    del input_dtype
    grad, y = grad.astype(opmath(grad.dtype)), y.astype(opmath(y.dtype))
    product = grad * y
    return (product - y * _sum_along(product, dim)).astype(out_dtype(node))


@register_lowering("_log_softmax_backward_data", node=True)
def _log_softmax_backward(grad: jax.Array, y: jax.Array, dim: int, input_dtype: Any, *, node: fx.Node) -> jax.Array:
    del input_dtype
    grad, y = grad.astype(opmath(grad.dtype)), y.astype(opmath(y.dtype))
    return (grad - jnp.exp(y) * _sum_along(grad, dim)).astype(out_dtype(node))


@register_lowering("_masked_softmax", node=True)
def _masked_softmax(
    x: jax.Array, mask: jax.Array, dim: int | None = None, mask_type: int | None = None, *, node: fx.Node
) -> jax.Array:
    """Return the softmax of the elements where the mask is False, 0 elsewhere; NaN where the mask leaves no element."""
    masked = _broadcast_mask(mask, x, mask_type)
    top = jnp.where(masked, -jnp.inf, x.astype(opmath(x.dtype)))
    dim = x.ndim - 1 if dim is None else dim
    weights, total = _exponentials_and_sum(top, dim)
    return (weights / total).astype(out_dtype(node))


@register_lowering("_masked_softmax_backward", node=True)
def _masked_softmax_backward(
    grad: jax.Array, y: jax.Array, mask: jax.Array, dim: int | None = None, *, node: fx.Node
) -> jax.Array:
    masked = jnp.broadcast_to(mask, y.shape)
    dim = y.ndim - 1 if dim is None else dim
    zero = jnp.zeros((), opmath(y.dtype))
    product = jnp.where(masked, zero, grad.astype(zero.dtype) * y.astype(zero.dtype))
    return jnp.where(masked, zero, product - y * _sum_along(product, dim)).astype(out_dtype(node))


def _broadcast_mask(mask: jax.Array, x: jax.Array, mask_type: int | None) -> jax.Array:
    if mask_type == 1 and mask.ndim == 2 and x.ndim == 4:  # a padding mask: (batch, key)
        mask = mask[:, None, None, :]
    return jnp.broadcast_to(mask, x.shape)


def _exponentials_and_sum(x: jax.Array, dim: int) -> tuple[jax.Array, jax.Array]:
    """Return the exponentials of `x` minus its maximum, and their sum."""
    x = x.astype(opmath(x.dtype))
    if size_of(x) == 0:
        return x, jnp.ones((), x.dtype)
    weights = jnp.exp(x - _top(x, dim))
    return weights, _sum_along(weights, dim)


def _axis(x: jax.Array, dim: int) -> tuple[int, ...]:
    return (axis_of(dim, x.ndim),) if x.ndim else ()


def _top(x: jax.Array, dim: int) -> jax.Array:
    return jnp.max(x, axis=_axis(x, dim), keepdims=x.ndim > 0)


def _sum_along(x: jax.Array, dim: int) -> jax.Array:
    return jnp.sum(x, axis=_axis(x, dim), keepdims=x.ndim > 0, dtype=np.dtype(x.dtype))
