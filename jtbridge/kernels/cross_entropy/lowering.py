"""Cross entropy with class numbers.

Its kernels have no weights of classes: what a row counts for is multiplied with its loss, and with its cotangent.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from torch import fx

from jtbridge.kernels.cross_entropy import op as cross_entropy
from jtbridge.lowerings._registry import register_lowering
from jtbridge.lowerings.nn.class_loss import class_weights
from jtbridge.lowerings.nn.loss import MEAN, NONE

Maybe = jax.Array | None


@register_lowering("jtbridge::cross_entropy", node=True, kernel=True)
def _cross_entropy(
    logits: jax.Array,
    target: jax.Array,
    weight: Maybe,
    reduction: int,
    ignore_index: int,
    smoothing: float,
    *,
    node: fx.Node,
) -> Any:
    """What is kept of each row is the logarithm of its sum of exponentials, in two terms, the second of which is 0."""
    del node
    if cross_entropy.unsupported_reason(logits, target):
        return NotImplemented
    losses, lse = cross_entropy.rows_forward(ignore_index, smoothing)(logits, target)
    kept = jnp.stack([lse, jnp.zeros_like(lse)], 1)
    each = class_weights(logits, target, weight, ignore_index)
    if weight is not None:
        losses = losses * each
    if reduction == NONE:
        return losses, kept
    loss = losses.sum()
    return loss / each.sum() if reduction == MEAN else loss, kept


@register_lowering("jtbridge::cross_entropy_backward", node=True, kernel=True)
def _cross_entropy_backward(
    grad: jax.Array,
    logits: jax.Array,
    target: jax.Array,
    weight: Maybe,
    kept: jax.Array,
    reduction: int,
    ignore_index: int,
    smoothing: float,
    *,
    node: fx.Node,
) -> Any:
    del node
    if cross_entropy.unsupported_reason(logits, target):
        return NotImplemented
    each = class_weights(logits, target, weight, ignore_index)
    if reduction == MEAN:
        grad = grad / each.sum()
    rows = jnp.broadcast_to(grad, target.shape) if weight is None else grad * each
    return cross_entropy.rows_backward(ignore_index, smoothing)(logits, target, kept.sum(1), rows)[0]
