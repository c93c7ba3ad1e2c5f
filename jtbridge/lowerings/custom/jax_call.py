"""Lowering of calls of JAX functions: the function becomes part of the program."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from torch import fx

from jtbridge.core.jax_calls import OPERATOR, START
from jtbridge.lowerings._registry import register_lowering


@register_lowering(OPERATOR, node=True)
def _jax_call(tensors: Sequence[jax.Array], handle: str, *, node: fx.Node) -> list[jax.Array]:
    del handle  # `node.meta` has the function, and keeps it alive
    return node.meta["custom"]["jax_function"](*tensors)


@register_lowering(START)
def _start_of_call(tensors: Sequence[jax.Array], use: str) -> list[jax.Array]:
    del use
    return [jnp.zeros(0, jnp.uint8), *tensors]
