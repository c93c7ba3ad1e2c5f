"""What Triton's interpreter gets wrong, put right while a kernel is interpreted.

Triton's own insides are used. Tried on triton 3.6 to 3.9.
"""

from __future__ import annotations

import contextlib
import operator
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np

from jtbridge._triton_bfloat16 import bfloat16_of_numpy

# The language is changed for all threads while a kernel is interpreted: no other is interpreted, compiled or analysed.
LANGUAGE = threading.RLock()


@contextlib.contextmanager
def right_interpreter() -> Iterator[None]:
    """Triton's interpreter without mistakes of its own.

    It holds bfloat16 as the integers that the bits are, and adds, multiplies and compares those; it counts in Python
    numbers where a compiled kernel counts in tensors; what a comparison gives is of the dtype of what is compared
    as soon as it meets a block. That of 3.6 makes indices of arrays of one element, which NumPy 2.4 refuses, and no
    constants of bfloat16. And it warns of what kernels compute and then mask.
    """
    with LANGUAGE, contextlib.ExitStack() as stack, np.errstate(all="ignore"):
        for place, name, value in _changes():
            if name in vars(place):
                stack.callback(setattr, place, name, vars(place)[name])
            else:
                stack.callback(delattr, place, name)
            setattr(place, name, value)
        yield


def _changes() -> list[tuple[Any, str, Any]]:
    """What to put into the interpreter: where, under which name, and what."""
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    patch, patch_core = interpreter._patch_lang_tensor, interpreter._patch_lang_core

    def truth(compare: Any) -> Any:
        return lambda self, a, b: interpreter.TensorHandle(compare(self, a, b).data, tl.int1)

    def with_index(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        tensor.__index__ = lambda self: int(self.handle.data.item())

    def with_range(language: Any, scope: Any) -> None:
        patch_core(language, scope)
        scope.set_attr(language, "range", scalar_range)

    changes = bfloat16_of_numpy()
    changes += [
        (builder, name, truth(value))
        for name, value in vars(builder).items()
        if name.startswith(("create_icmp", "create_fcmp"))
    ]
    return [*changes, (interpreter, "_patch_lang_tensor", with_index), (interpreter, "_patch_lang_core", with_range)]


def scalar_range(arg1: Any, arg2: Any = None, step: Any = None, **options: Any) -> Iterator[Any]:
    """What a loop of an interpreted kernel counts in, as of a compiled one: tensors of one integer.

    The parameters are those of ``tl.range``; its others tell the compiler how.
    """
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    del options
    bounds = (0 if arg2 is None else arg1, arg1 if arg2 is None else arg2, 1 if step is None else step)
    numbers = [operator.index(bound) for bound in bounds]
    wide = any(getattr(bound, "dtype", None) == tl.int64 for bound in bounds)
    wide |= any(not -(1 << 31) <= number < 1 << 31 for number in numbers)
    dtype, of_numpy = (tl.int64, np.int64) if wide else (tl.int32, np.int32)
    for i in range(*numbers):
        yield tl.tensor(TensorHandle(np.array([i], of_numpy), dtype), dtype)
