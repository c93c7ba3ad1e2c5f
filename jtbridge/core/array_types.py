"""Types of arrays, and the structure of a result that holds arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from jtbridge._compat import SharedTensor, has_own_dispatch, has_plain_memory, is_of_trace
from jtbridge.errors import ArgumentError

from .dtypes import is_differentiable, numpy_dtype
from .positions import replaced

Tensors = tuple[torch.Tensor, ...]
# The types of numbers without a value, such as a size that depends on data.
SYMBOLIC_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)


@dataclasses.dataclass(frozen=True)
class ArrayType:
    """Shape and JAX dtype of one flat argument or result."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def differentiable(self) -> bool:
        return is_differentiable(self.dtype)


def array_type(tensor: torch.Tensor, what: str = "a tensor") -> ArrayType:
    """Return the type of an array with a tensor's shape and dtype; `what` names the tensor in the error."""
    return ArrayType(tuple(tensor.shape), numpy_dtype(tensor.dtype, what))


@dataclasses.dataclass(frozen=True)
class OutputTree:
    """Structure of the result of a torch function: its pytree, and which leaves are arrays."""

    tree: Any
    array_positions: tuple[int, ...]
    statics: tuple[Any, ...]  # one entry for each leaf: the value of a leaf that is not an array; it depends on shapes
    order: Any = None  # see `key_order`: the insertion order of the result's dicts, if it differs from JAX's order

    def unflatten(self, arrays: Sequence[Any]) -> Any:
        """Build a result from its array leaves."""
        leaves = replaced(self.statics, self.array_positions, arrays)
        if self.order is None:
            return self.tree.unflatten(leaves)
        structure, numbers = self.order
        return structure.unflatten([leaves[number] for number in numbers])


# The types of symbolic numbers, which depend on data, and the dtypes of their tensors.
_SYMBOLIC = {torch.SymInt: torch.int64, torch.SymFloat: torch.float64, torch.SymBool: torch.bool}


def is_array_leaf(leaf: Any, untraceable: bool) -> bool:
    """Return whether an output leaf becomes a JAX array.

    A Python number that a traceable function returns depends only on shapes and stays a number. A Python number that
    an untraceable function returns may depend on the data and becomes an array.
    """
    if isinstance(leaf, torch.Tensor | np.ndarray | np.generic):
        return True
    return untraceable and isinstance(leaf, bool | int | float | complex)


def as_tensor(leaf: Any) -> torch.Tensor:
    """Return an output leaf as a tensor; convert NumPy arrays and Python numbers."""
    if isinstance(leaf, torch.Tensor):
        if not is_dense(leaf):
            kind, dense = kind_of_layout(leaf)
            raise ArgumentError(f"A result {kind}, which JAX does not have. Return {dense}.")
        return leaf
    if isinstance(leaf, bool):
        return torch.tensor(leaf)
    if isinstance(leaf, tuple(_SYMBOLIC)):
        return torch.scalar_tensor(leaf, dtype=_SYMBOLIC[type(leaf)])  # type: ignore[arg-type]
    if isinstance(leaf, float | complex):
        return torch.tensor(leaf, dtype=torch.complex128 if isinstance(leaf, complex) else torch.float64)
    return torch.as_tensor(leaf)


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is one array: not sparse, not nested, and not of a class with its own operators.

    The memory of a tensor with its own operators does not hold its values: a `MaskedTensor` has no memory. A tensor of
    a trace and a `SharedTensor` are dense all the same.
    """
    if tensor.layout is not torch.strided or tensor.is_nested:
        return False
    return not has_own_dispatch(tensor) or is_of_trace(tensor) or isinstance(tensor, SharedTensor)


def has_values(tensor: torch.Tensor) -> bool:
    """Return whether a dense tensor has values: it belongs neither to a trace nor to a torch.func transform."""
    return isinstance(tensor, SharedTensor) or has_plain_memory(tensor)


def kind_of_layout(tensor: torch.Tensor) -> tuple[str, str]:
    """Describe a tensor that is not dense, and name dense tensors to use in its place."""
    if tensor.is_nested:
        return "is a nested tensor", "`.to_padded_tensor(0.0)` of it"
    if tensor.layout is not torch.strided:
        return f"has layout {tensor.layout}", "`.to_dense()` of it"
    name = type(tensor).__name__
    calls = {"MaskedTensor": "`.to_tensor(0.0)` of it", "DTensor": "`.full_tensor()` of it"}
    return f"is a `{name}`, a class of tensors with operators of its own", calls.get(name, "plain tensors")


def to_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor, as uint8 in one dimension."""
    flat = tensor.contiguous().reshape(-1)
    if flat.stride(0) != 1:  # a tensor of at most one element is contiguous with any stride
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)
