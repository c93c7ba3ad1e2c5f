"""Tests whether the value of a graph's node is a number that depends on data, or has a size that does."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from jtbridge.core.array_types import SYMBOLIC_NUMBERS


def is_data_dependent(node: fx.Node) -> bool:
    """Return whether the value of a node is a number that depends on data, or has a size that does."""
    return _has_symbol(node.meta.get("val"))


def _has_symbol(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_has_symbol, value))
    if isinstance(value, torch.Tensor):
        strides = value.stride() if value.layout is torch.strided else ()
        return any(isinstance(size, torch.SymInt) for size in (*value.shape, *strides))
    return isinstance(value, SYMBOLIC_NUMBERS)
