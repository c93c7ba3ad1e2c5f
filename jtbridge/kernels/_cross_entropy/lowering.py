"""Lowerings of cross-entropy with class indices to the kernels.

The kernels do not take weights of classes. The loss of a row and its cotangent are multiplied by the weight of its
class outside of the kernels.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from torch import fx

from jtbridge.lowerings._registry import register_lowering
from jtbridge.lowerings.nn.class_loss import class_weights
from jtbridge.lowerings.nn.loss import MEAN, NONE

from . import op as cross_entropy

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
    """Return the loss and, for the backward, the log-sum-exp of each row.

    The operator returns each log-sum-exp as two terms. Here the second term is 0.
    """
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
