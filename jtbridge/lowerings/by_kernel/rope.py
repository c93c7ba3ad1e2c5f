"""Rotary position embedding of [batch, heads, tokens, d], whose products a model's code rounds before it adds them."""

from __future__ import annotations

from typing import Any

import jax
from torch import fx

from jtbridge.kernels.rope import op as rope

from ._table import by_kernel


@by_kernel("jtbridge::rope")
def _rope(x: jax.Array, cos: jax.Array, sin: jax.Array, transposed: bool, *, node: fx.Node) -> Any:
    del node
    if rope.supports(cos, sin, x) or cos.dtype != x.dtype or sin.dtype != x.dtype:
        return NotImplemented
    operation = rope.operation(1, rounded=True)
    angles = [angle[:, 0][None] for angle in (cos, sin)]
    # Of the backward only the gradient by x is wanted, which x itself has no part in.
    step = operation.backward(x[None], *angles, x[None]) if transposed else operation.forward(x[None], *angles)
    return step[0][0]
