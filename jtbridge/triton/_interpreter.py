"""Fixes of Triton's interpreter, active while a kernel is interpreted. Tried on triton 3.6 to 3.9."""

from __future__ import annotations

import contextlib
import operator
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np

from ._bfloat16 import bfloat16_patches

# Interpreting a kernel replaces functions of `triton.language` for all threads. Meanwhile no other thread may
# interpret, compile or analyse a kernel.
LANGUAGE_LOCK = threading.RLock()


@contextlib.contextmanager
def fixed_interpreter() -> Iterator[None]:
    """Patch Triton's interpreter inside the block.

    Without the patches the interpreter adds, multiplies and compares the bits of bfloat16 numbers as integers; its loop
    counters are Python numbers, where a compiled kernel has tensors; and a comparison has the dtype of its operands
    instead of booleans. The interpreter of Triton 3.6 also uses arrays of one element as indices, which NumPy 2.4
    refuses, and cannot make constants of bfloat16. NumPy's warnings about values that kernels compute and then mask are
    silenced.
    """
    with LANGUAGE_LOCK, contextlib.ExitStack() as stack, np.errstate(all="ignore"):
        for place, name, value in _patches():
            if name in vars(place):
                stack.callback(setattr, place, name, vars(place)[name])
            else:
                stack.callback(delattr, place, name)
            setattr(place, name, value)
        yield


def _patches() -> list[tuple[Any, str, Any]]:
    """Return the patches: the object to change, the attribute's name and its new value."""
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    patch_tensor, patch_core = interpreter._patch_lang_tensor, interpreter._patch_lang_core

    def as_truth_value(compare: Any) -> Any:
        return lambda self, a, b: interpreter.TensorHandle(compare(self, a, b).data, tl.int1)

    def with_index(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        tensor.__index__ = lambda self: int(self.handle.data.item())

    def with_range(language: Any, scope: Any) -> None:
        patch_core(language, scope)
        scope.set_attr(language, "range", scalar_range)

    patches = bfloat16_patches()
    patches += [
        (builder, name, as_truth_value(value))
        for name, value in vars(builder).items()
        if name.startswith(("create_icmp", "create_fcmp"))
    ]
    return [*patches, (interpreter, "_patch_lang_tensor", with_index), (interpreter, "_patch_lang_core", with_range)]


def scalar_range(arg1: Any, arg2: Any = None, step: Any = None, **options: Any) -> Iterator[Any]:
    """Yield the counters of a loop as tensors of one integer, as a compiled kernel has them.

    The parameters are those of ``tl.range``. Its other options concern only the compiler.
    """
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    del options
    bounds = (0 if arg2 is None else arg1, arg1 if arg2 is None else arg2, 1 if step is None else step)
    numbers = [operator.index(bound) for bound in bounds]
    wide = any(getattr(bound, "dtype", None) == tl.int64 for bound in bounds)
    wide |= any(not -(1 << 31) <= number < 1 << 31 for number in numbers)
    dtype, numpy_type = (tl.int64, np.int64) if wide else (tl.int32, np.int32)
    for i in range(*numbers):
        yield tl.tensor(TensorHandle(np.array([i], numpy_type), dtype), dtype)
