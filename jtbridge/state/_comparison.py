"""Compare values of state, and find tensors of a trace in them."""

from __future__ import annotations

import collections
import types
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from jtbridge._compat import FakeTensor, innermost
from jtbridge.core.array_types import SYMBOLIC_NUMBERS
from jtbridge.core.closures import read_cell
from jtbridge.core.containers import CONTAINERS, entries_of, items_of

from ._escaped import PoisonTensor

MISSING = object()
DEPTH = 20  # how deep two new objects are compared
PLAIN = frozenset({int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size})
VALUES = (
    *PLAIN,
    *(range, slice, type(...), torch.layout, torch.memory_format, np.generic, np.dtype),
    *(types.CodeType, types.BuiltinFunctionType, types.GetSetDescriptorType, types.MemberDescriptorType),
)


def same(a: Any, b: Any, depth: int = DEPTH) -> bool:
    """Return whether two values are interchangeable: the same object, or objects of one type with equal contents."""
    if a is b:
        return True
    if type(a) is not type(b) or depth == 0 or isinstance(a, FakeTensor | PoisonTensor):
        return False
    if isinstance(a, torch.Tensor):
        return same_tensors(a, b)
    if isinstance(a, np.ndarray):
        return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()
    if isinstance(a, float | complex):
        number: Any = complex if isinstance(a, complex) else float
        return number.__repr__(a) == number.__repr__(b)  # all digits, whatever a subclass shows; 0.0 is not -0.0
    if isinstance(a, (*VALUES, types.MethodType)):
        return bool(a == b)
    if isinstance(a, list | tuple | collections.deque):
        items, others = items_of(a), items_of(b)
        return len(items) == len(others) and all(same(x, y, depth - 1) for x, y in zip(items, others, strict=True))
    if isinstance(a, dict):
        return same(entries_of(a), entries_of(b), depth + 1)  # pairs are one level deeper
    if isinstance(a, set | frozenset | bytearray):
        return a == b
    if isinstance(a, types.FunctionType):
        return a.__code__ is b.__code__ and same(_closed_over(a), _closed_over(b), depth - 1)
    attributes = getattr(a, "__dict__", None)
    return isinstance(attributes, dict) and same(attributes, b.__dict__, depth - 1)


def same_tensors(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two dense tensors have the same type and elements; a real NaN equals a NaN.

    The result is False for sparse tensors, and for a tensor that escaped from a transform of `torch.func`, whose
    elements cannot be read.
    """
    if innermost(a) is not a or innermost(b) is not b:
        return False
    if any(getattr(a, name) != getattr(b, name) for name in ("shape", "dtype", "device", "layout", "requires_grad")):
        return False
    if a.layout is not torch.strided or a.is_quantized:
        return a.layout is torch.strided and torch.equal(a.detach(), b.detach())
    a, b = a.detach(), b.detach()
    if a.is_complex():
        a, b = torch.view_as_real(a.resolve_conj()), torch.view_as_real(b.resolve_conj())
    if a.dtype.itemsize == 1 and a.is_floating_point():
        a, b = a.float(), b.float()  # torch has no `signbit` of float8
    return torch.allclose(a, b, rtol=0, atol=0, equal_nan=True) and torch.equal(a.signbit(), b.signbit())  # -0.0


def same_results(results: Sequence[Any], others: Sequence[Any]) -> bool:
    """Return whether the results of two runs are the same up to rounding: one run may read what the other computes."""
    return len(results) == len(others) and all(map(_same_up_to_rounding, results, others))


def _same_up_to_rounding(a: Any, b: Any) -> bool:
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor) or a.layout is not torch.strided:
        return same(a, b)
    if (a.shape, a.dtype, a.device) != (b.shape, b.dtype, b.device):
        return False
    if not a.is_floating_point() and not a.is_complex():
        return torch.equal(a, b)
    tolerance = torch.finfo(a.dtype).eps ** 0.5
    return torch.allclose(a.detach(), b.detach(), rtol=tolerance, atol=tolerance, equal_nan=True)


def _closed_over(fn: types.FunctionType) -> list[Any]:
    cells = fn.__closure__ or ()
    return [*(read_cell(cell, MISSING) for cell in cells), fn.__defaults__, fn.__kwdefaults__]


def holds_traced(value: Any, depth: int) -> bool:
    """Return whether a value is, or holds, a tensor or a symbolic number of a trace, down to a depth."""
    if isinstance(value, (FakeTensor, PoisonTensor, *SYMBOLIC_NUMBERS)):
        return True
    if depth == 0 or isinstance(value, (torch.Tensor, type, types.ModuleType, *VALUES)):
        return isinstance(value, torch.Tensor) and value.is_leaf and isinstance(value.grad, FakeTensor | PoisonTensor)
    if isinstance(value, dict):
        return any(holds_traced(part, depth - 1) for part in [*dict.keys(value), *dict.values(value)])
    if isinstance(value, CONTAINERS):
        return any(holds_traced(part, depth - 1) for part in items_of(value))
    attributes = getattr(value, "__dict__", None)
    is_walked = isinstance(attributes, dict) and not isinstance(value, types.FunctionType)
    return is_walked and holds_traced(attributes, min(depth - 1, 3))  # objects may refer to each other in a circle
