"""Numbers that a function reads from a tensor only to hand them to a kernel, and what it asserts of tensors.

``n = mask.sum().item()`` has no value while a function is traced. If all that happens to `n` is that a kernel is
launched with it, none is needed: the kernel is given the tensor. ``assert labels.max() < n`` holds or raises in torch;
a JAX program cannot raise, and it is taken to hold.
"""

from __future__ import annotations

import dis
import os
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn, TypeVar

import torch
from torch.overrides import TorchFunctionMode

from jtbridge._compat import DataDependentOutputException
from jtbridge.errors import LaunchError

Result = TypeVar("Result")

_OURS = tuple(os.path.dirname(os.path.abspath(path)) + os.sep for path in (torch.__file__, os.path.dirname(__file__)))


class DeferredNumber:
    """The number in a tensor, for a kernel."""

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor
        self.taken = False  # by a kernel
        self.traced = True  # a number that was kept beyond that is no more than an object

    def _value(self, *_: Any) -> NoReturn:
        torch.ops.aten._local_scalar_dense(self.tensor)  # raises what `.item()` would have raised
        raise RuntimeError("the value of a tensor is needed while its function is traced")

    def __eq__(self, other: object) -> bool:
        return self._value() if self.traced else self is other

    def __hash__(self) -> int:
        return self._value() if self.traced else id(self)

    def __repr__(self) -> str:
        return self._value() if self.traced else "a number that was not known while its function was traced"

    __bool__ = __int__ = __float__ = __index__ = _value  # type: ignore[assignment]
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _value
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = __neg__ = __abs__ = __round__ = _value
    __lt__ = __le__ = __gt__ = __ge__ = _value  # type: ignore[assignment]


class _Deferring(TorchFunctionMode):
    """While it is active, ``.item()`` gives such numbers, and assertions of tensors hold."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers: list[DeferredNumber] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.item:
            self.numbers.append(DeferredNumber(args[0]))
            return self.numbers[-1]
        if func is torch.Tensor.__bool__ and _asserted(_calling_frame()):
            return True
        return func(*args, **(kwargs or {}))


def deferring_numbers(run: Callable[[], Result]) -> Result:
    """``run()``; if that needs the value of a tensor, once more with numbers deferred, if kernels take them all.

    Raises:
        Exception: what `run` raised the first time, if kernels are not all that the numbers are for.
    """
    try:
        return run()
    except Exception as error:
        if "triton.runtime.jit" not in sys.modules or not _needs_value(error):
            raise
        mode = _Deferring()
        try:
            with mode:
                result = run()
        except Exception:  # noqa: BLE001  (then the first error says it best)
            result = None
        finally:
            for number in mode.numbers:
                number.traced = False
        if result is None or not mode.numbers or not all(number.taken for number in mode.numbers):
            raise
        return result


def _needs_value(error: Exception) -> bool:
    # A number read from a tensor may also be a symbol, which fails where it is first used.
    symbolic = type(error).__name__ == "GuardOnDataDependentSymNode"
    return symbolic or isinstance(error, DataDependentOutputException | SymbolicNumberError)


class SymbolicNumberError(LaunchError):
    """A kernel is given a number that has no value yet."""


def _calling_frame() -> FrameType | None:
    """The innermost frame that is neither torch's nor ours."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    return frame


def _asserted(frame: FrameType | None) -> bool:
    """Whether a frame is asking for the truth of what it asserts."""
    if frame is None:
        return False
    code = [x for x in dis.get_instructions(frame.f_code) if x.offset >= frame.f_lasti]
    # From Python 3.12 on what asks for the truth comes before the jump: a comparison, or a step of its own.
    code = [x for x in code[:8] if x.opname not in ("COMPARE_OP", "TO_BOOL", "CACHE", "NOT_TAKEN")]
    if len(code) < 2 or not ("JUMP" in code[0].opname and "TRUE" in code[0].opname):
        return False
    return code[1].opname == "LOAD_ASSERTION_ERROR" or code[1].argval is AssertionError
