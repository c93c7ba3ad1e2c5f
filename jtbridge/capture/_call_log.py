"""The operators that a function ran while it was traced, so that two traces of it can be compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import torch

from jtbridge._compat import FakeTensor, OpOverload, outside_modes
from jtbridge._static import value_key

_SAME_VALUE = frozenset({torch.ops.aten.detach.default, torch.ops.aten.alias.default})


class CallLog:
    """Every operator with its arguments: tensors by where they come from, everything else by value.

    Two logs are equal when the functions ran the same graph: the same operators in the same order, on the same inputs,
    earlier results, closed-over tensors and constants, and returned the same of them.
    """

    def __init__(self, inputs: Sequence[torch.Tensor]):
        self._entries: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._keep: list[torch.Tensor] = []  # an id may be used again once its object is gone
        for tensor in inputs:
            self._number(tensor)

    def add(self, operator: OpOverload, args: tuple, kwargs: dict[str, Any], out: Any, *, lifts: bool) -> None:
        """Note a call. With `lifts` the operator turns a Python literal into a tensor, which counts by value."""
        if operator in _SAME_VALUE:
            self._numbers[id(out)] = self._number(args[0])
            self._keep.append(out)
            return
        self._entries.append((operator, self._key(args, lifts), self._key(kwargs, lifts)))
        for result in jax.tree.leaves(out):
            if isinstance(result, torch.Tensor):
                self._number(result)

    def add_results(self, leaves: Sequence[Any]) -> None:
        """Note what the function returns."""
        self._entries.append(self._key(tuple(leaves), False))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CallLog) and self._entries == other._entries

    __hash__ = None  # type: ignore[assignment]

    def _key(self, value: Any, lifts: bool) -> Any:
        if isinstance(value, torch.Tensor):
            if isinstance(value, FakeTensor):
                return "traced", self._number(value)
            if lifts:
                return "literal", value.dtype, tuple(value.shape), _bytes_of(value)
            return "closed over", id(value)
        if isinstance(value, list | tuple):
            return type(value), tuple(self._key(item, lifts) for item in value)
        if isinstance(value, dict):
            return dict, tuple((name, self._key(item, lifts)) for name, item in value.items())
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            return type(value), str(value)
        if isinstance(value, torch.Generator):
            return torch.Generator, id(value)  # kept by nobody here: that would seem to be the function
        return value_key(value)

    def _number(self, tensor: torch.Tensor) -> int:
        if id(tensor) not in self._numbers:
            self._numbers[id(tensor)] = len(self._numbers)
            self._keep.append(tensor)
        return self._numbers[id(tensor)]


def _bytes_of(tensor: torch.Tensor) -> bytes:
    with outside_modes():
        return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
