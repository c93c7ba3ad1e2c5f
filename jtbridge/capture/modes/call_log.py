"""A log of the operators that ran in a trace, to compare two traces of a function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import torch

from jtbridge._compat import FakeTensor, OpOverload, outside_modes
from jtbridge.core.array_types import SYMBOLIC_NUMBERS, to_bytes
from jtbridge.core.static import value_key

_SAME_VALUE = frozenset({torch.ops.aten.detach.default, torch.ops.aten.alias.default})


class CallLog:
    """The operators of one trace with their arguments: tensors by their origin, other arguments by value.

    Two logs are equal if both traces ran the same graph: the same operators in the same order, on the same inputs,
    earlier results, closed-over tensors and constants, with the same results of the function.
    """

    def __init__(self, inputs: Sequence[torch.Tensor]):
        self._entries: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._keep: list[torch.Tensor] = []  # Python may reuse an id once its object is gone
        for tensor in inputs:
            self._number(tensor)

    def add(self, operator: OpOverload, args: tuple, kwargs: dict[str, Any], out: Any, *, lifts: bool) -> None:
        """Record a call. With `lifts`, the operator makes a tensor from a Python literal, which is logged by value."""
        if operator in _SAME_VALUE:
            self._numbers[id(out)] = self._number(args[0])
            self._keep.append(out)
            return
        self._entries.append((operator, self._key(args, lifts), self._key(kwargs, lifts)))
        for result in jax.tree.leaves(out):
            if isinstance(result, torch.Tensor):
                self._number(result)

    def add_results(self, leaves: Sequence[Any]) -> None:
        """Record the results of the function."""
        self._entries.append(self._key(tuple(leaves), False))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CallLog) and self._entries == other._entries

    __hash__ = None  # type: ignore[assignment]

    def _key(self, value: Any, lifts: bool) -> Any:
        if isinstance(value, torch.Tensor):
            if isinstance(value, FakeTensor):
                return "traced", self._number(value)
            if lifts:
                return "literal", value.dtype, tuple(value.shape), _copied_bytes(value)
            return "closed over", id(value)
        if isinstance(value, list | tuple):
            return type(value), tuple(self._key(item, lifts) for item in value)
        if isinstance(value, dict):
            return dict, tuple((name, self._key(item, lifts)) for name, item in value.items())
        if isinstance(value, SYMBOLIC_NUMBERS):
            return type(value), str(value)
        if isinstance(value, torch.Generator):
            return torch.Generator, id(value)  # without a reference: `EffectRecorder.keeps_generator` counts them
        return value_key(value)

    def _number(self, tensor: torch.Tensor) -> int:
        if id(tensor) not in self._numbers:
            self._numbers[id(tensor)] = len(self._numbers)
            self._keep.append(tensor)
        return self._numbers[id(tensor)]


def _copied_bytes(tensor: torch.Tensor) -> bytes:
    with outside_modes():
        # Copies first: after `numpy()`, the memory of a tensor can no longer be resized, like that of a NumPy array.
        return to_bytes(tensor.detach().cpu().clone()).numpy().tobytes()
