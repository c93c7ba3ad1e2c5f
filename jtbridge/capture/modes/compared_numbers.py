"""Numbers that a function reads from tensors only to compare them, for example in checks of arguments.

``lengths.max().item() <= n`` needs no value while the function is traced. The comparison of the number becomes a
comparison of the tensor, whose truth value is a condition on data (`modes/branches.py`).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from jtbridge._compat import outside_modes
from jtbridge.triton.launches import LateScalar

from .branches import BranchOracle

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_INT32 = torch.iinfo(torch.int32)
_EXACT = 2**53  # Python floats represent integers up to this one exactly

# A comparison, and the one with the same result after the number on its right was rounded down, or up.
_IF_ROUNDED_DOWN = {operator.lt: operator.le, operator.ge: operator.gt}
_IF_ROUNDED_UP = {operator.le: operator.lt, operator.gt: operator.ge}


class ComparableScalar(LateScalar):
    """The unknown number in a tensor of one element. It can be compared; any other use needs its value, and raises.

    ``isinstance`` treats it as an `int` or a `float`, the type that ``.item()`` returns in torch.
    """

    @property
    def __class__(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return float if self.tensor.dtype in _FLOATS else int

    def __copy__(self) -> ComparableScalar:
        return self

    def __deepcopy__(self, memo: Any) -> ComparableScalar:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._value()

    def __format__(self, spec: str) -> str:
        return self._value()

    def __getattr__(self, name: str) -> Any:
        if hasattr(self.__class__, name):  # such as `is_integer`
            self._value()
        raise AttributeError(f"{self.__class__.__name__!r} object has no attribute {name!r}")

    def _compared(self, compare: Callable[[Any, Any], Any], other: Any) -> bool:
        if not self.is_tracing:
            self._value()
        if type(other) is ComparableScalar and other.tensor.dtype == self.tensor.dtype:
            return bool(compare(self.tensor, other.tensor))
        if (other is None or isinstance(other, str)) and compare in (operator.eq, operator.ne):
            return compare is operator.ne
        if type(other) not in (int, float, bool):
            self._value()
        assert isinstance(other, int | float)
        near = self._rounded(other)
        if near is None:
            return self._value()
        if near != other and compare in (operator.eq, operator.ne) and other == other:
            return compare is operator.ne
        if near < other:
            compare = _IF_ROUNDED_DOWN.get(compare, compare)
        elif near > other:
            compare = _IF_ROUNDED_UP.get(compare, compare)
        return bool(compare(self.tensor, near))

    def _rounded(self, number: float) -> float | None:
        """Return `number`, or a neighbour of it, as a number of the tensor's dtype; None if it is not known."""
        if self.tensor.dtype in _FLOATS:
            if abs(number) > _EXACT and isinstance(number, int):
                return None
            with outside_modes():
                return torch.tensor(number, dtype=self.tensor.dtype).item()
        # `ScalarComparisonMode` converted other integer dtypes to int64: compared with uint8, torch treats -1 as 255.
        return math.floor(number) if _INT32.min <= number <= _INT32.max else None

    def __eq__(self, other: object) -> bool:
        return self._compared(operator.eq, other) if self.is_tracing else self is other

    def __ne__(self, other: object) -> bool:
        return self._compared(operator.ne, other) if self.is_tracing else self is not other

    __hash__ = LateScalar.__hash__

    def __lt__(self, other: Any) -> bool:
        return self._compared(operator.lt, other)

    def __le__(self, other: Any) -> bool:
        return self._compared(operator.le, other)

    def __gt__(self, other: Any) -> bool:
        return self._compared(operator.gt, other)

    def __ge__(self, other: Any) -> bool:
        return self._compared(operator.ge, other)

    def __bool__(self) -> bool:
        return self._compared(operator.ne, 0)


class ScalarComparisonMode(TorchFunctionMode):
    """Makes ``.item()`` return a :class:`ComparableScalar` for a number that is not known during the trace."""

    def __init__(self, oracle: BranchOracle):
        super().__init__()
        self._oracle = oracle
        self._numbers: list[ComparableScalar] = []

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        for number in self._numbers:
            number.is_tracing = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.Tensor.item or args[0].dtype not in (*_INTEGERS, *_FLOATS):
            return func(*args, **(kwargs or {}))
        (tensor,) = args
        value, is_known = self._oracle.number(lambda: func(tensor))
        if is_known:
            return value
        copy = tensor.detach().clone()  # the function may write to the tensor later
        self._numbers.append(ComparableScalar(copy.long() if tensor.dtype in _INTEGERS else copy))
        return self._numbers[-1]
