"""Cross-entropy of a linear layer's outputs, in jnp, with all logits at once."""

from __future__ import annotations

import jax

from jtbridge.kernels._cross_entropy import cross_entropy
from jtbridge.kernels._cross_entropy.op import Reduction


def forward(
    hidden: jax.Array,
    weight: jax.Array,
    labels: jax.Array,
    bias: jax.Array | None,
    *,
    label_smoothing: float,
    ignore_index: int,
    reduction: Reduction,
) -> jax.Array:
    """Compute ``cross_entropy(hidden @ weight.T + bias, labels)``."""
    logits = hidden @ weight.T
    return cross_entropy(
        logits if bias is None else logits + bias,
        labels,
        label_smoothing=label_smoothing,
        ignore_index=ignore_index,
        reduction=reduction,
    )
