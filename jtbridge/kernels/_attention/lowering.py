"""Lowerings of torch's scaled dot product attention to the kernels or cuDNN."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from torch import fx

from jtbridge.kernels._differentiable import DifferentiableKernel
from jtbridge.lowerings._common import out_dtype
from jtbridge.lowerings._registry import register_lowering

from . import op as attention
from .choice import cudnn_unsupported_reason
from .differentiable import kernel_or_cudnn

Maybe = jax.Array | None


def _kernel_for(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    dropout_p: float,
    is_causal: bool,
    mask: Maybe,
    scale: float | None,
) -> tuple[DifferentiableKernel, list[jax.Array], bool] | None:
    """Return the differentiable kernel, its arrays, and whether it may run cuDNN; None where no kernel applies."""
    factor = 1 / math.sqrt(max(query.shape[-1], 1)) if scale is None else scale
    if dropout_p or factor <= 0 or attention.unsupported_reason(query, key, value):
        return None
    arrays = [query, key, value]
    kind = "none"
    if mask is not None:
        kind = "boolean" if mask.dtype == bool else "additive"
        arrays.append(mask.reshape((1,) * (4 - mask.ndim) + mask.shape))
    settings = attention.AttentionSettings(factor, None, 0 if is_causal else None, kind, 0.0)
    if cudnn_unsupported_reason(query, key, settings, logsumexp=False) is None:
        # Only torch's backward operator uses the logarithm, so the logarithm has no cotangent.
        return kernel_or_cudnn(settings, None), arrays, True
    return attention.differentiable_kernel(settings), arrays, False


@register_lowering("_scaled_dot_product_flash_attention_for_cpu", node=True, kernel=True)
def _attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Maybe = None,
    scale: float | None = None,
    node: fx.Node,
) -> Any:
    found = _kernel_for(query, key, value, dropout_p, is_causal, attn_mask, scale)
    if found is None or out_dtype(node, 1) != np.float32:
        return NotImplemented
    kernel, arrays, _ = found
    return tuple(kernel.forward(*arrays))


@register_lowering("_scaled_dot_product_flash_attention_for_cpu_backward", node=True, kernel=True)
def _attention_backward(
    grad_out: jax.Array,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    out: jax.Array,
    logsumexp: jax.Array,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Maybe = None,
    scale: float | None = None,
    node: fx.Node,
) -> Any:
    del node
    found = _kernel_for(query, key, value, dropout_p, is_causal, attn_mask, scale)
    if found is None or logsumexp.dtype != np.float32:
        return NotImplemented
    kernel, arrays, either = found
    cotangents = [grad_out] if either else [grad_out, jnp.zeros_like(logsumexp)]
    return tuple(kernel.backward(*arrays, out, logsumexp, *cotangents)[:3])
