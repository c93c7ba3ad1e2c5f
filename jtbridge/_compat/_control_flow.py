"""Torch's operators `cond` and `while_loop`. Tried on torch 2.13 and 2.15.

The public functions, such as `torch.cond`, `while_loop` and `scan`, compile their operator by one private function of
torch. It is replaced once, when one of the contexts below is first entered. The replacement acts like the original on
other threads, and outside these contexts. Torch 2.11 has no such function: `torch.cond` is refused there in a
trace, and under a dispatch mode.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch._higher_order_ops.utils as _utils
from torch._higher_order_ops.cond import cond_op as COND
from torch._higher_order_ops.while_loop import while_loop_op as WHILE_LOOP

from ._torch_modes import outside_function_modes, outside_modes

__all__ = ["COND", "WHILE_LOOP", "control_flow_outside_modes", "control_flow_uncompiled"]


class _ControlFlowSettings(threading.local):
    is_uncompiled = False  # whether this thread calls the operators without compiling them
    before: tuple[Callable[[], None], ...] | None = None  # called before an operator that runs outside all modes


_HERE = _ControlFlowSettings()


@contextlib.contextmanager
def control_flow_uncompiled() -> Iterator[None]:
    """Make `torch.cond` and `while_loop` on this thread call their operators without compiling them."""
    _replace_compile_and_call()
    before, _HERE.is_uncompiled = _HERE.is_uncompiled, True
    try:
        yield
    finally:
        _HERE.is_uncompiled = before


@contextlib.contextmanager
def control_flow_outside_modes(*before: Callable[[], None]) -> Iterator[None]:
    """Make `torch.cond`, `while_loop` and similar functions on this thread run outside all modes.

    They support few dispatch modes, and torch.compile would trace the Python code of torch function modes.

    Args:
        before: functions to call before each such call. Those of enclosing contexts are called first.
    """
    _replace_compile_and_call()
    outer = _HERE.before
    _HERE.before = (*(outer or ()), *before)
    try:
        yield
    finally:
        _HERE.before = outer


@functools.cache
def _replace_compile_and_call() -> None:
    original = getattr(_utils, "_hop_compile_and_call", None)
    if original is None:  # torch 2.11
        return

    @functools.wraps(original)
    def compile_and_call(fn: Any, args: Any, kwargs: Any = None) -> Any:
        if _HERE.is_uncompiled:
            return fn(*args, **(kwargs or {}))
        if _HERE.before is None:
            return original(fn, args, kwargs)
        for function in _HERE.before:
            function()
        with outside_modes(), outside_function_modes():
            return original(fn, args, kwargs)

    _utils._hop_compile_and_call = compile_and_call
