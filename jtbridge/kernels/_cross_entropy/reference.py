"""Cross-entropy of each row of logits with a class index, in jnp."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def forward(
    logits: jax.Array, labels: jax.Array, *, ignore_index: int, smoothing: float
) -> tuple[jax.Array, jax.Array]:
    """Return ``lse - (1 - smoothing) * x[label] - smoothing * mean(x)`` and `lse`, the log-sum-exp, of each row x.

    Both are float32, or float64 for logits in float64. The log-sum-exp of a row is 0 if the row is
    ignored or its label is not a class.
    """
    wide = _at_least_float32(logits)
    counted, factor = _counted_labels(labels, logits.shape[-1], ignore_index)
    top = jax.lax.stop_gradient(wide.max(-1))
    log_sum = jnp.log(jnp.exp(wide - top[..., None]).sum(-1))
    known = counted & ~jnp.isnan(factor)
    inside = jnp.where(known, labels, 0)
    # The largest logit is subtracted first, so that a small loss is not a difference of large numbers.
    loss = log_sum + (1 - smoothing) * (top - jnp.take_along_axis(wide, inside[..., None], -1)[..., 0])
    if smoothing:
        loss += smoothing * (top - wide.mean(-1))
    return jnp.where(counted, loss * factor.astype(loss.dtype), 0), jnp.where(known, top + log_sum, 0)


def backward(
    logits: jax.Array, labels: jax.Array, lse: jax.Array, ct: jax.Array, *, ignore_index: int, smoothing: float
) -> tuple[jax.Array]:
    """Return the gradient of the logits; it is 0 for a row that is ignored.

    For a row x it is ``ct * (exp(x - lse) - (1 - smoothing) * onehot(label) - smoothing / classes)``.
    """
    classes = logits.shape[-1]
    wide = _at_least_float32(logits)
    counted, factor = _counted_labels(labels, classes, ignore_index)
    # The exponential of an ignored row must not overflow: the value is discarded, but its derivative would be NaN.
    p = jnp.exp(jnp.where(counted[..., None], wide - lse[..., None], -jnp.inf))
    hot = (labels[..., None] == jnp.arange(classes, dtype=labels.dtype)).astype(wide.dtype)
    scale = jnp.where(counted, ct * factor.astype(ct.dtype), 0)
    return ((scale[..., None] * (p - (1 - smoothing) * hot - smoothing / classes)).astype(logits.dtype),)


def _at_least_float32(x: jax.Array) -> jax.Array:
    return x if x.dtype == jnp.float64 else x.astype(jnp.float32)


def _counted_labels(labels: jax.Array, classes: int, ignore_index: int) -> tuple[jax.Array, jax.Array]:
    """Return which labels are not ignored, and a factor of each loss: NaN for a label that is not a class, else 1.

    The factor of an ignored label is 1.
    """
    counted = labels != ignore_index
    return counted, jnp.where(counted & ((labels < 0) | (labels >= classes)), jnp.nan, 1.0)
