"""Conversions of dtype."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch import fx

from jtbridge.errors import TranslationError
from jtbridge.lowerings._common import convert, jax_dtype, out_dtype
from jtbridge.lowerings._registry import register_lowering


@register_lowering("_to_copy", node=True)
def _to_copy(
    x: jax.Array | float,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: Any = None,
    pin_memory: bool | None = None,
    non_blocking: bool = False,
    memory_format: Any = None,
    node: fx.Node,
) -> jax.Array:
    del dtype, device, pin_memory, non_blocking, memory_format
    if layout not in (None, torch.strided):
        raise TranslationError(f"a conversion to layout `{layout}` has no JAX form")
    # `x` may be a Python number: torch.vmap converts a number to a tensor, and torch writes its value into the graph.
    return convert(jnp.asarray(x), out_dtype(node))


@register_lowering("prims::convert_element_type")
def _convert_element_type(x: jax.Array, dtype: torch.dtype) -> jax.Array:
    return convert(x, jax_dtype(dtype))
