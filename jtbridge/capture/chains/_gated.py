"""``activation(gate) * up``, as models write SwiGLU and GeGLU. The activation is rounded before the product.

``gelu_new`` is the tanh approximation of GELU, written out. In half precision each of its operators rounds. The kernel
does not, so ``gelu_new`` is matched in float32 only.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from ._matcher import FLOATS, Match, Matcher, NoMatch
from ._operators import with_backward

_aten = torch.ops.aten


def _activated_gate(gate: torch.Tensor, activation: str) -> torch.Tensor:
    if activation == "silu":
        return _aten.silu.default(gate)
    if activation == "gelu_new":
        cubes = _aten.mul.Tensor(_aten.pow.Tensor_Scalar(gate, 3.0), _OF_CUBE)
        shifted = _aten.add.Tensor(_aten.tanh.default(_aten.mul.Tensor(_aten.add.Tensor(gate, cubes), _INNER)), 1.0)
        return _aten.mul.Tensor(_aten.mul.Tensor(gate, 0.5), shifted)
    return _aten.gelu.default(gate, approximate=_approximation(activation))


def _approximation(activation: str) -> str:
    return "none" if activation == "gelu" else "tanh"


def _forward(gate: torch.Tensor, up: torch.Tensor, activation: str) -> tuple[torch.Tensor]:
    return (_aten.mul.Tensor(_activated_gate(gate, activation), up),)


def _backward(
    ct: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, activation: str
) -> tuple[torch.Tensor, torch.Tensor]:
    by_activated = _aten.mul.Tensor(ct, up)
    if activation == "silu":
        by_gate = _aten.silu_backward.default(by_activated, gate)
    else:
        by_gate = _aten.gelu_backward.default(by_activated, gate, approximate=_approximation(activation))
    return by_gate, _aten.mul.Tensor(ct, _activated_gate(gate, activation))


def _fake(gate: torch.Tensor, up: torch.Tensor, activation: str) -> tuple[torch.Tensor]:
    return (torch.empty_like(gate),)


gated = with_backward(
    "gated",
    "Tensor gate, Tensor up",
    "str activation",
    forward=_forward,
    backward=_backward,
    fake=_fake,
    differentiated=2,
)


def gated_product(matcher: Matcher, out: torch.Tensor, activated: Any, up: Any) -> Match:
    """Match an activation times a tensor of the same shape and dtype."""
    if matcher.sees(activated, "silu"):
        (gate,) = matcher(activated, "silu")
        activation = "silu"
    elif matcher.sees(activated, "mul"):
        gate = _match_gelu_new(matcher, activated)
        activation = "gelu_new"
    else:
        gate, approximate = matcher(activated, "gelu")
        matcher.demand(approximate in ("none", "tanh"))
        activation = "gelu_tanh" if approximate == "tanh" else "gelu"
    matcher.demand(isinstance(up, torch.Tensor) and up.shape == gate.shape and up.dtype is gate.dtype)
    matcher.demand(gate.dtype in FLOATS and gate.numel() > 0)
    return lambda: gated(gate, up, activation)


def _match_gelu_new(matcher: Matcher, activated: Any) -> torch.Tensor:
    """Match ``0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3)))`` and return x, which is in float32."""
    for halved, shifted in matcher.both_ways(activated, "mul"):
        if matcher.sees(halved, "mul") and matcher.sees(shifted, "add"):
            x = _beside(matcher, halved, "mul", 0.5)
            (scaled,) = matcher(_beside(matcher, shifted, "add", 1.0), "tanh")
            for plain, cubes in matcher.both_ways(_beside(matcher, scaled, "mul", _INNER), "add"):
                if plain is x:
                    (base,) = matcher(_beside(matcher, cubes, "mul", _OF_CUBE), "cube")
                    matcher.demand(base is x and x.dtype is torch.float32)
                    return x
    raise NoMatch


def _beside(matcher: Matcher, value: Any, name: str, number: float) -> torch.Tensor:
    """Return the tensor argument of a recorded call whose other argument is a given number."""
    for x, other in matcher.both_ways(value, name):
        if isinstance(x, torch.Tensor) and isinstance(other, float | int) and other == number:
            return x
    raise NoMatch


_INNER, _OF_CUBE = math.sqrt(2.0 / math.pi), 0.044715
