"""Lowering of rotary position embedding to the kernel. With `rounded`, products are rounded before they are added."""

from __future__ import annotations

from typing import Any

import jax
from torch import fx

from jtbridge.lowerings._registry import register_lowering

from . import op as rope
from .reference import Rotation


@register_lowering("jtbridge::rope", node=True, kernel=True)
def _rope(
    x: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    transposed: bool,
    interleaved: bool,
    rounded: bool,
    rounded_back: bool,
    *,
    node: fx.Node,
) -> Any:
    del rounded_back, node
    # The two dimensions in the middle are tokens and heads, in either order. The angles have size 1 for the heads.
    tokens_first = cos.shape[1:3] != (1, x.shape[2])
    angles = [angle[:, :, 0] if tokens_first else angle[:, 0] for angle in (cos, sin)]
    if rope.unsupported_reason(*angles, x):
        return NotImplemented
    kernel = rope.differentiable_kernel(1, Rotation(rounded, interleaved, tokens_first))
    given = x[None], *(angle[None] for angle in angles)
    # If `transposed`, x is the cotangent. It is passed as the primal too: the gradient of the primal does not depend on
    # the primal, and the gradients of the angles are not used.
    return (kernel.backward(*given, x[None]) if transposed else kernel.forward(*given))[0][0]
