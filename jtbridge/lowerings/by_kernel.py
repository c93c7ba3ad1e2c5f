"""Operators by the kernels of `jtbridge.kernels`: what the `triton` backend prefers to the lowerings in JAX.

Each takes what the lowering of the operator takes, and gives ``NotImplemented`` where its kernel does not apply: then
the lowering in JAX is used. A kernel is a JAX primitive, which on other platforms than a GPU is jnp.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from torch import fx

from jtbridge.kernels.softmax import op as softmax_kernel

from ._common import out_dtype
from ._registry import Lowering

_BY_KERNEL: dict[str, Lowering] = {}


def find_by_kernel(operator: Any) -> Lowering | None:
    """What computes an operator by a kernel, if anything does."""
    return _BY_KERNEL.get(operator.name())


def _by_kernel(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        for name in names:
            _BY_KERNEL[f"aten::{name}"] = Lowering(function, node=True)
        return function

    return register


def _along_the_last(x: jax.Array, dim: int) -> jax.Array:
    return jnp.moveaxis(x, dim, -1)


@_by_kernel("_softmax", "_log_softmax")
def _softmax(x: jax.Array, dim: int, half_to_float: bool, *, node: fx.Node) -> Any:
    if half_to_float or x.ndim == 0 or softmax_kernel.supports(x):
        return NotImplemented
    operation = softmax_kernel.operation(log="log" in str(node.target))
    (y,) = operation.forward(_along_the_last(x, dim))
    return jnp.moveaxis(y, -1, dim)


@_by_kernel("_softmax_backward_data", "_log_softmax_backward_data")
def _softmax_backward(grad: jax.Array, y: jax.Array, dim: int, input_dtype: Any, *, node: fx.Node) -> Any:
    if y.ndim == 0 or grad.dtype != y.dtype or y.dtype != out_dtype(node) or softmax_kernel.supports(y):
        return NotImplemented
    operation = softmax_kernel.operation(log="log" in str(node.target))
    (by_x,) = operation.backward(_along_the_last(y, dim), _along_the_last(grad, dim))
    return jnp.moveaxis(by_x, -1, dim)
