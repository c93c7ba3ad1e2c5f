"""Gated activations, which a model's code rounds before it multiplies."""

from __future__ import annotations

from typing import Any

import jax
from torch import fx

from jtbridge.kernels._operation import Operation
from jtbridge.kernels.gated import op as gated

from ._table import by_kernel


def _operation(activation: str) -> Operation:
    return gated.operation("gelu_tanh" if activation == "gelu_new" else activation, rounded=True)


@by_kernel("jtbridge::gated")
def _gated(gate: jax.Array, up: jax.Array, activation: str, *, node: fx.Node) -> Any:
    del node
    if gated.supports(gate, up):
        return NotImplemented
    return _operation(activation).forward(gate, up)[0]


@by_kernel("jtbridge::gated_backward")
def _gated_backward(grad: jax.Array, gate: jax.Array, up: jax.Array, activation: str, *, node: fx.Node) -> Any:
    del node
    if gated.supports(gate, up) or grad.dtype != gate.dtype:
        return NotImplemented
    return tuple(_operation(activation).backward(gate, up, grad))
