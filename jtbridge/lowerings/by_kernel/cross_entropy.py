"""Cross entropy with class numbers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from torch import fx

from jtbridge.kernels.cross_entropy import op as cross_entropy
from jtbridge.lowerings.loss import MEAN, NONE

from ._table import by_kernel


@by_kernel("jtbridge::cross_entropy")
def _cross_entropy(
    logits: jax.Array, target: jax.Array, reduction: int, ignore_index: int, smoothing: float, *, node: fx.Node
) -> Any:
    """What is kept of each row is the logarithm of its sum of exponentials, in two terms, the second of which is 0."""
    del node
    if cross_entropy.supports(logits, target):
        return NotImplemented
    losses, lse = cross_entropy.rows_forward(ignore_index, smoothing)(logits, target)
    kept = jnp.stack([lse, jnp.zeros_like(lse)], 1)
    if reduction == NONE:
        return losses, kept
    loss = losses.sum()
    return loss / _count(target, ignore_index) if reduction == MEAN else loss, kept


def _count(target: jax.Array, ignore_index: int) -> jax.Array:
    return (target != ignore_index).sum().astype(jnp.float32)


@by_kernel("jtbridge::cross_entropy_backward")
def _cross_entropy_backward(
    grad: jax.Array,
    logits: jax.Array,
    target: jax.Array,
    kept: jax.Array,
    reduction: int,
    ignore_index: int,
    smoothing: float,
    *,
    node: fx.Node,
) -> Any:
    del node
    if cross_entropy.supports(logits, target):
        return NotImplemented
    if reduction == MEAN:
        grad = grad / _count(target, ignore_index)
    rows = jnp.broadcast_to(grad, target.shape)
    return cross_entropy.rows_backward(ignore_index, smoothing)(logits, target, kept.sum(1), rows)[0]
