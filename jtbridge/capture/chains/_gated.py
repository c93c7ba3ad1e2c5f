"""``activation(gate) * up``, as models write SwiGLU and GeGLU. The activation is rounded before it is multiplied."""

from __future__ import annotations

from typing import Any

import torch

from ._operators import with_backward
from ._steps import FLOATS, Look, Match

_aten = torch.ops.aten


def _activated(gate: torch.Tensor, activation: str) -> torch.Tensor:
    if activation == "silu":
        return _aten.silu.default(gate)
    return _aten.gelu.default(gate, approximate="tanh" if activation == "gelu_tanh" else "none")


def _forward(gate: torch.Tensor, up: torch.Tensor, activation: str) -> tuple[torch.Tensor]:
    return (_aten.mul.Tensor(_activated(gate, activation), up),)


def _backward(
    ct: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, activation: str
) -> tuple[torch.Tensor, torch.Tensor]:
    by_activated = _aten.mul.Tensor(ct, up)
    if activation == "silu":
        by_gate = _aten.silu_backward.default(by_activated, gate)
    else:
        approximate = "tanh" if activation == "gelu_tanh" else "none"
        by_gate = _aten.gelu_backward.default(by_activated, gate, approximate=approximate)
    return by_gate, _aten.mul.Tensor(ct, _activated(gate, activation))


def _fake(gate: torch.Tensor, up: torch.Tensor, activation: str) -> tuple[torch.Tensor]:
    return (torch.empty_like(gate),)


gated = with_backward(
    "gated",
    "Tensor gate, Tensor up",
    "str activation",
    forward=_forward,
    backward=_backward,
    fake=_fake,
    moving=2,
)


def product(look: Look, out: torch.Tensor, activated: Any, up: Any) -> Match:
    """An activation times a tensor like it."""
    if look.sees(activated, "silu"):
        (gate,) = look(activated, "silu")
        activation = "silu"
    else:
        gate, approximate = look(activated, "gelu")
        look.demand(approximate in ("none", "tanh"))
        activation = "gelu_tanh" if approximate == "tanh" else "gelu"
    look.demand(isinstance(up, torch.Tensor) and up.shape == gate.shape and up.dtype is gate.dtype)
    look.demand(gate.dtype in FLOATS and gate.numel() > 0)
    return lambda: gated(gate, up, activation)
