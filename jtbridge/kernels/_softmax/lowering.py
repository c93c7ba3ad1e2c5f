"""Lowerings of softmax and its logarithm to the kernels."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from torch import fx

from jtbridge.lowerings._common import out_dtype
from jtbridge.lowerings._registry import register_lowering

from . import op as softmax_kernel


def _along_the_last(x: jax.Array, dim: int) -> jax.Array:
    return jnp.moveaxis(x, dim, -1)


@register_lowering("_softmax", "_log_softmax", node=True, kernel=True)
def _softmax(x: jax.Array, dim: int, half_to_float: bool, *, node: fx.Node) -> Any:
    if half_to_float or x.ndim == 0 or softmax_kernel.unsupported_reason(x):
        return NotImplemented
    kernel = softmax_kernel.differentiable_kernel(log="log" in str(node.target))
    (y,) = kernel.forward(_along_the_last(x, dim))
    return jnp.moveaxis(y, -1, dim)


@register_lowering("_softmax_backward_data", "_log_softmax_backward_data", node=True, kernel=True)
def _softmax_backward(grad: jax.Array, y: jax.Array, dim: int, input_dtype: Any, *, node: fx.Node) -> Any:
    if y.ndim == 0 or grad.dtype != y.dtype or y.dtype != out_dtype(node) or softmax_kernel.unsupported_reason(y):
        return NotImplemented
    kernel = softmax_kernel.differentiable_kernel(log="log" in str(node.target))
    (by_x,) = kernel.backward(_along_the_last(y, dim), _along_the_last(grad, dim))
    return jnp.moveaxis(by_x, -1, dim)
