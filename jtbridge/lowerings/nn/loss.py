"""Losses of predictions against targets of the same shape, and their gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from torch import fx

from jtbridge.lowerings._common import opmath, out_dtype, size_of
from jtbridge.lowerings._registry import register_lowering

NONE, MEAN, SUM = 0, 1, 2  # torch's numbers of the reductions


def reduced_loss(loss: jax.Array, reduction: int) -> jax.Array:
    """Return the losses of the elements, their mean, or their sum."""
    if reduction == MEAN:
        return jnp.mean(loss)
    return jnp.sum(loss, dtype=loss.dtype) if reduction == SUM else loss


def _elementwise_loss(
    function: Callable[..., jax.Array], x: Any, target: Any, reduction: int, node: fx.Node
) -> jax.Array:
    dtype = out_dtype(node)
    inner = opmath(dtype)
    return reduced_loss(function(x.astype(inner), target.astype(inner)), reduction).astype(dtype)


def _elementwise_backward(
    function: Callable[..., jax.Array], grad: Any, x: Any, target: Any, reduction: int, node: fx.Node
) -> jax.Array:
    dtype = out_dtype(node)
    inner = opmath(dtype)
    slope = function(x.astype(inner), target.astype(inner))
    share = 1.0 / max(size_of(x), 1) if reduction == MEAN else 1.0
    return (share * slope * grad.astype(inner)).astype(dtype)


@register_lowering("mse_loss", node=True)
def _mse_loss(x: jax.Array, target: jax.Array, reduction: int = MEAN, *, node: fx.Node) -> jax.Array:
    return _elementwise_loss(lambda a, b: jnp.square(a - b), x, target, reduction, node)


@register_lowering("mse_loss_backward", node=True)
def _mse_loss_backward(grad: jax.Array, x: jax.Array, target: jax.Array, reduction: int, *, node: fx.Node) -> jax.Array:
    return _elementwise_backward(lambda a, b: 2 * (a - b), grad, x, target, reduction, node)


@register_lowering("huber_loss", node=True)
def _huber_loss(
    x: jax.Array, target: jax.Array, reduction: int = MEAN, delta: float = 1.0, *, node: fx.Node
) -> jax.Array:
    def loss(a: jax.Array, b: jax.Array) -> jax.Array:
        z = jnp.abs(a - b)
        return jnp.where(z <= delta, 0.5 * z * z, delta * (z - 0.5 * delta))

    return _elementwise_loss(loss, x, target, reduction, node)


@register_lowering("huber_loss_backward", node=True)
def _huber_loss_backward(
    grad: jax.Array, x: jax.Array, target: jax.Array, reduction: int, delta: float, *, node: fx.Node
) -> jax.Array:
    return _elementwise_backward(lambda a, b: jnp.clip(a - b, -delta, delta), grad, x, target, reduction, node)


@register_lowering("smooth_l1_loss", node=True)
def _smooth_l1_loss(
    x: jax.Array, target: jax.Array, reduction: int = MEAN, beta: float = 1.0, *, node: fx.Node
) -> jax.Array:
    def loss(a: jax.Array, b: jax.Array) -> jax.Array:
        z = jnp.abs(a - b)
        return jnp.where(z < beta, 0.5 * z * z / beta, z - 0.5 * beta) if beta else z

    return _elementwise_loss(loss, x, target, reduction, node)


@register_lowering("smooth_l1_loss_backward", node=True)
def _smooth_l1_loss_backward(
    grad: jax.Array, x: jax.Array, target: jax.Array, reduction: int, beta: float, *, node: fx.Node
) -> jax.Array:
    def slope(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.clip((a - b) / beta, -1, 1) if beta else jnp.where(a <= b, -1.0, 1.0).astype(a.dtype)

    return _elementwise_backward(slope, grad, x, target, reduction, node)


@register_lowering("soft_margin_loss", node=True)
def _soft_margin_loss(x: jax.Array, target: jax.Array, reduction: int = MEAN, *, node: fx.Node) -> jax.Array:
    return _elementwise_loss(lambda a, b: jnp.log1p(jnp.exp(-a * b)), x, target, reduction, node)


@register_lowering("soft_margin_loss_backward", node=True)
def _soft_margin_loss_backward(
    grad: jax.Array, x: jax.Array, target: jax.Array, reduction: int, *, node: fx.Node
) -> jax.Array:
    def slope(a: jax.Array, b: jax.Array) -> jax.Array:
        z = jnp.exp(-b * a)
        return -b * z / (1 + z)

    return _elementwise_backward(slope, grad, x, target, reduction, node)


@register_lowering("binary_cross_entropy", node=True)
def _binary_cross_entropy(
    x: jax.Array, target: jax.Array, weight: jax.Array | None = None, reduction: int = MEAN, *, node: fx.Node
) -> jax.Array:
    def loss(a: jax.Array, b: jax.Array) -> jax.Array:
        value = (b - 1) * jnp.maximum(jnp.log1p(-a), -100) - b * jnp.maximum(jnp.log(a), -100)
        return value if weight is None else value * weight.astype(a.dtype)

    return _elementwise_loss(loss, x, target, reduction, node)


@register_lowering("binary_cross_entropy_backward", node=True)
def _binary_cross_entropy_backward(
    grad: jax.Array,
    x: jax.Array,
    target: jax.Array,
    weight: jax.Array | None = None,
    reduction: int = MEAN,
    *,
    node: fx.Node,
) -> jax.Array:
    def slope(a: jax.Array, b: jax.Array) -> jax.Array:
        value = (a - b) / jnp.maximum((1 - a) * a, 1e-12)
        return value if weight is None else value * weight.astype(a.dtype)

    return _elementwise_backward(slope, grad, x, target, reduction, node)


@register_lowering("binary_cross_entropy_with_logits", node=True)
def _binary_cross_entropy_with_logits(
    x: jax.Array,
    target: jax.Array,
    weight: jax.Array | None = None,
    pos_weight: jax.Array | None = None,
    reduction: int = MEAN,
    *,
    node: fx.Node,
) -> jax.Array:
    def loss(a: jax.Array, b: jax.Array) -> jax.Array:
        log_sigmoid = jnp.minimum(a, 0) - jnp.log1p(jnp.exp(-jnp.abs(a)))
        if pos_weight is not None:
            log_sigmoid = ((pos_weight.astype(a.dtype) - 1) * b + 1) * log_sigmoid
        value = (1 - b) * a - log_sigmoid
        return value if weight is None else value * weight.astype(a.dtype)

    return _elementwise_loss(loss, x, target, reduction, node)
