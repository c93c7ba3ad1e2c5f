"""Softmax over the last dimension, in jnp."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def forward(x: jax.Array, *, log: bool) -> tuple[jax.Array]:
    """Compute ``exp(x) / sum(exp(x))``, or its logarithm, in float32 and rounded once."""
    wide = x.astype(jnp.float32)
    return ((jax.nn.log_softmax(wide) if log else jax.nn.softmax(wide)).astype(x.dtype),)


def backward(y: jax.Array, ct: jax.Array, *, log: bool) -> tuple[jax.Array]:
    """Return the gradient of `forward`: ``y * (ct - sum(ct * y))``, or with `log` ``ct - exp(y) * sum(ct)``.

    The arguments are the result of `forward` and its cotangent.
    """
    wide, wide_ct = y.astype(jnp.float32), ct.astype(jnp.float32)
    if log:
        grad = wide_ct - jnp.exp(wide) * wide_ct.sum(-1, keepdims=True)
    else:
        grad = wide * (wide_ct - (wide_ct * wide).sum(-1, keepdims=True))
    return (grad.astype(y.dtype),)
