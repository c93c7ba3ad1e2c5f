"""Attention by cuDNN, through JAX's primitives, instead of the Triton kernels.

The forward returns what the kernels return: the rounded output, and in float32 the natural logarithm of the sum of the
exponentials of the scores.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jtbridge._compat import cudnn_attention, cudnn_backward, cudnn_forward

from .reference import AttentionSettings


def forward(*arrays: jax.Array, settings: AttentionSettings) -> list[jax.Array]:
    """Return the results of :func:`reference.forward`."""
    return cudnn_forward(**_cudnn_arguments(*arrays, settings=settings), is_training=True)


def output(*arrays: jax.Array, settings: AttentionSettings) -> list[jax.Array]:
    """Return the output alone, without the logarithm."""
    return cudnn_forward(**_cudnn_arguments(*arrays, settings=settings), is_training=False)


def backward(*arrays: jax.Array, settings: AttentionSettings) -> list[jax.Array]:
    """Return the gradients of query, key and value.

    The arguments are query, key and value, the results of :func:`forward`, and the cotangent of the output.
    """
    query, key, value, out, logsumexp, ct = arrays
    gradients = cudnn_backward(
        **_cudnn_arguments(query, key, value, settings=settings), activation=logsumexp, fwd_output=out, grad_output=ct
    )
    return list(gradients[:3])


# Unused arguments of cuDNN: a bias, lengths and offsets of packed sequences, page tables. Each gets an empty array.
_UNUSED = ("bias", "q_seqlen", "kv_seqlen", "q_offsets", "kv_offsets", "page_table_k", "page_table_v")


def _cudnn_arguments(
    query: jax.Array, key: jax.Array, value: jax.Array, *, settings: AttentionSettings
) -> dict[str, Any]:
    module = cudnn_attention()
    causal = settings.right == 0
    return {
        "query": query,
        "key": key,
        "value": value,
        **{name: jnp.zeros(0, query.dtype) for name in _UNUSED},
        "scale": settings.scale,
        "seed": 42,  # not used: cuDNN's dropout is off
        "dropout_rate": 0.0,
        "variadic_args": (False, False),  # no bias, and no gradient of a bias
        "mask_type": module.MaskType.CAUSAL if causal else module.MaskType.NO_MASK,
        "layout": module.AttentionLayout.BNTH.value,
        # cuDNN's window includes the query's own position.
        "sliding_window_length": None if settings.left is None else settings.left + 1,
    }
