"""Storage of residuals as JAX arrays."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from torch import fx

from jtbridge.core.array_types import ArrayType, to_bytes
from jtbridge.core.dtypes import canonical_dtype, numpy_dtype
from jtbridge.errors import DTypeError


class CannotSplit(Exception):
    """A joint graph cannot be split; the text says why."""


@dataclasses.dataclass(frozen=True)
class Packing:
    """How JAX stores a residual: unchanged, or as bytes if JAX lacks the dtype, for example int64 without x64."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    as_bytes: bool

    @property
    def type(self) -> ArrayType:
        if self.as_bytes:
            return ArrayType((int(np.prod(self.shape)) * self.dtype.itemsize,), np.dtype(np.uint8))
        return ArrayType(self.shape, numpy_dtype(self.dtype, "a residual"))

    def pack(self, graph: fx.Graph, node: fx.Node) -> fx.Node:
        return graph.call_function(to_bytes, (node,)) if self.as_bytes else node

    def unpack(self, graph: fx.Graph, placeholder: fx.Node) -> None:
        if self.as_bytes:
            with graph.inserting_after(graph.find_nodes(op="placeholder")[-1]):
                value = graph.call_function(from_bytes, (placeholder, self.dtype, self.shape))
            value.meta = dict(placeholder.meta)
            placeholder.replace_all_uses_with(value, delete_user_cb=lambda user: user is not value)


def from_bytes(data: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the residual that :func:`to_bytes` was called with."""
    return data.view(dtype).reshape(shape)


def packing(node: fx.Node) -> Packing:
    value: Any = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        raise CannotSplit(f"its backward needs {type(value).__name__} `{node.name}`, which is not a dense tensor")
    try:
        dtype = numpy_dtype(value.dtype, "a residual")
    except DTypeError as error:
        raise CannotSplit(str(error)) from error
    return Packing(tuple(value.shape), value.dtype, canonical_dtype(dtype) != dtype)
