"""Late scalars: numbers that a function reads from a tensor only to pass them to a kernel.

``n = mask.sum().item()`` has no value while a function is traced. If `n` is only an argument of kernels, no value is
needed: the kernel gets the tensor and reads the number itself. Assertions about tensors, such as
``assert labels.max() < n``, are assumed to hold while late scalars are in use, because a JAX program cannot raise.
"""

from __future__ import annotations

import contextlib
import dis
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any, NoReturn

import torch
from torch.overrides import TorchFunctionMode

from jtbridge._compat import DataDependentOutputException
from jtbridge.core.library_files import is_library
from jtbridge.errors import LaunchError


class LateScalar:
    """The number in a tensor of one element, to be read by a kernel."""

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor
        self.is_kernel_argument = False
        self.is_tracing = True  # a late scalar that outlives the trace is an object without a value

    def _value(self, *_: Any) -> NoReturn:
        torch.ops.aten._local_scalar_dense(self.tensor)  # raises the error of `.item()`
        raise RuntimeError("the value of a tensor is needed while the function is traced")

    def __eq__(self, other: object) -> bool:
        return self._value() if self.is_tracing else self is other

    def __hash__(self) -> int:
        return self._value() if self.is_tracing else id(self)

    def __repr__(self) -> str:
        return self._value() if self.is_tracing else "<number without a value while its function was traced>"

    __bool__ = __int__ = __float__ = __index__ = _value  # type: ignore[assignment]
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _value
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = __lshift__ = __rlshift__ = __rshift__ = __rrshift__ = (
        _value
    )
    __invert__ = __pos__ = __divmod__ = __rdivmod__ = __trunc__ = __floor__ = __ceil__ = __complex__ = _value
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = __neg__ = __abs__ = __round__ = _value
    __lt__ = __le__ = __gt__ = __ge__ = _value  # type: ignore[assignment]


class _LateScalarMode(TorchFunctionMode):
    """A mode in which ``.item()`` returns late scalars and assertions about tensors are assumed to hold."""

    def __init__(self) -> None:
        super().__init__()
        self.scalars: list[LateScalar] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.item:
            self.scalars.append(LateScalar(args[0]))
            return self.scalars[-1]
        if func is torch.Tensor.__bool__ and _is_assertion(_user_frame()):
            return True
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def late_scalars() -> Iterator[None]:
    """Let ``.item()`` return late scalars while a function is traced.

    Raises:
        UnusedLateScalarError: no number was read, or one was not passed to a kernel.
    """
    mode = _LateScalarMode()
    try:
        with mode:
            yield
    finally:
        for scalar in mode.scalars:
            scalar.is_tracing = False
    if not mode.scalars or not all(scalar.is_kernel_argument for scalar in mode.scalars):
        raise UnusedLateScalarError("a number that was read from a tensor is not an argument of a kernel")


def may_need_late_scalars(error: Exception) -> bool:
    """Return whether a trace failed because it needs the value of a tensor that perhaps only a kernel reads."""
    if "triton.runtime.jit" not in sys.modules:
        return False
    # A number read from a tensor may also be an unbacked symbol, which raises another error when it is first used.
    symbolic = type(error).__name__ == "GuardOnDataDependentSymNode"
    return symbolic or isinstance(error, DataDependentOutputException | SymbolicScalarError)


class UnusedLateScalarError(Exception):
    """A function reads no number from a tensor, or does not pass such a number to a kernel."""


class SymbolicScalarError(LaunchError):
    """A kernel is launched with a symbolic number, which has no value while tracing."""


def _user_frame() -> FrameType | None:
    """Return the innermost frame of the user's code."""
    frame = sys._getframe(1)
    while frame is not None and is_library(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def _is_assertion(frame: FrameType | None) -> bool:
    """Return whether a frame is evaluating the condition of an ``assert`` statement."""
    if frame is None:
        return False
    code = [x for x in dis.get_instructions(frame.f_code) if x.offset >= frame.f_lasti]
    # From Python 3.12 on a comparison or TO_BOOL comes before the jump.
    code = [x for x in code[:8] if x.opname not in ("COMPARE_OP", "TO_BOOL", "CACHE", "NOT_TAKEN")]
    if len(code) < 2 or not ("JUMP" in code[0].opname and "TRUE" in code[0].opname):
        return False
    return code[1].opname == "LOAD_ASSERTION_ERROR" or code[1].argval is AssertionError
