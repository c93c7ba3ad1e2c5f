"""Torch's operators `cond` and `while_loop`. Tried on torch 2.13 and 2.15.

The public functions `torch.cond` and `while_loop` compile a call of the operator by one function of torch, which is
replaced once, when a function is first traced. The replacement acts as the original on every other thread, and when
nothing is traced. Torch 2.11 has no such function: there `torch.cond` is refused in a trace.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any

import torch._higher_order_ops.utils as _utils
from torch._higher_order_ops.cond import cond_op as COND
from torch._higher_order_ops.while_loop import while_loop_op as WHILE_LOOP

__all__ = ["COND", "WHILE_LOOP", "control_flow_uncompiled"]


class _Thread(threading.local):
    is_uncompiled = False  # whether this thread calls the operators without compiling them


_HERE = _Thread()


@contextlib.contextmanager
def control_flow_uncompiled() -> Iterator[None]:
    """Make `torch.cond` and `while_loop` on this thread call their operators without compiling them."""
    _replace_once()
    before, _HERE.is_uncompiled = _HERE.is_uncompiled, True
    try:
        yield
    finally:
        _HERE.is_uncompiled = before


@functools.cache
def _replace_once() -> None:
    original = getattr(_utils, "_hop_compile_and_call", None)
    if original is None:  # torch 2.11
        return

    @functools.wraps(original)
    def compile_and_call(fn: Any, args: Any, kwargs: Any = None) -> Any:
        if _HERE.is_uncompiled:
            return fn(*args, **(kwargs or {}))
        return original(fn, args, kwargs)

    _utils._hop_compile_and_call = compile_and_call
