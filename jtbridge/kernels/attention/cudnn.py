"""Attention by cuDNN, as JAX lowers to it, in place of the Triton kernels.

Its results are those that the kernels have: the rounded result, and in float32 the natural logarithm of the sum of the
exponentials of the scores.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jtbridge._compat import cudnn_attention, cudnn_backward, cudnn_forward, without_function_of_scores

from .reference import Settings


def forward(*arrays: jax.Array, settings: Settings) -> list[jax.Array]:
    """As :func:`reference.forward`."""
    return cudnn_forward(**_options(*arrays, settings=settings), is_training=True)


def output(*arrays: jax.Array, settings: Settings) -> list[jax.Array]:
    """The result alone."""
    return cudnn_forward(**_options(*arrays, settings=settings), is_training=False)


def backward(*arrays: jax.Array, settings: Settings) -> list[jax.Array]:
    """Gradients of query, key and value, from them, the results of :func:`forward` and the cotangent of the first."""
    query, key, value, out, logsumexp, ct = arrays
    gradients = cudnn_backward(
        **_options(query, key, value, settings=settings), activation=logsumexp, fwd_output=out, grad_output=ct
    )
    return list(gradients[:3])


# A bias, lengths and offsets of packed texts, and tables of pages.
_UNUSED = ("bias", "q_seqlen", "kv_seqlen", "q_offsets", "kv_offsets", "page_table_k", "page_table_v")


def _options(query: jax.Array, key: jax.Array, value: jax.Array, *, settings: Settings) -> dict[str, Any]:
    module = cudnn_attention()
    causal = settings.right == 0
    return {
        "query": query,
        "key": key,
        "value": value,
        **{name: jnp.zeros(0, query.dtype) for name in _UNUSED},
        **without_function_of_scores(),
        "scale": settings.scale,
        "seed": 42,  # of its dropout, which there is none of
        "dropout_rate": 0.0,
        "variadic_args": (False, False),  # neither a bias nor its gradient
        "mask_type": module.MaskType.CAUSAL if causal else module.MaskType.NO_MASK,
        "layout": module.AttentionLayout.BNTH.value,
        # cuDNN counts a query's own position.
        "sliding_window_length": None if settings.left is None else settings.left + 1,
    }
