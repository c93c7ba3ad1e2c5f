"""Lowerings of gated activations to the kernels. As in torch, the activation is rounded before the product."""

from __future__ import annotations

from typing import Any

import jax
from torch import fx

from jtbridge.kernels._differentiable import DifferentiableKernel
from jtbridge.lowerings._registry import register_lowering

from . import op as gated


def _operation(activation: str) -> DifferentiableKernel:
    return gated.differentiable_kernel("gelu_tanh" if activation == "gelu_new" else activation, rounded=True)


@register_lowering("jtbridge::gated", node=True, kernel=True)
def _gated(gate: jax.Array, up: jax.Array, activation: str, *, node: fx.Node) -> Any:
    del node
    if gated.unsupported_reason(gate, up):
        return NotImplemented
    return _operation(activation).forward(gate, up)[0]


@register_lowering("jtbridge::gated_backward", node=True, kernel=True)
def _gated_backward(grad: jax.Array, gate: jax.Array, up: jax.Array, activation: str, *, node: fx.Node) -> Any:
    del node
    if gated.unsupported_reason(gate, up) or grad.dtype != gate.dtype:
        return NotImplemented
    return tuple(_operation(activation).backward(gate, up, grad))
