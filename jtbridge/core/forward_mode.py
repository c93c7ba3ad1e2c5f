"""A lock that lets one thread at a time use torch's forward mode, because torch has one level per process.

A thread that leaves forward mode ends the level. Another thread that uses the level then silently gets zero tangents.
"""

from __future__ import annotations

import sys
import threading
import time
import types
from collections.abc import Callable
from typing import Any

import torch

from jtbridge._compat import (
    dual,
    enter_shared_level,
    exit_shared_level,
    has_tangent,
    in_forward_mode,
    level_is_shared,
    outside_modes,
)
from jtbridge.errors import DifferentiationError

from .closures import closure_contents
from .nested_calls import is_in_callback

_LONGEST = 300  # seconds to wait for a trace, which may itself wait for the results of the waiting function
_PATIENCE = 1.0  # seconds to wait for a thread that uses torch's forward mode without this lock
_BUSY = "Another thread uses torch's forward mode, which one thread at a time can use"
_REMEDY = "Call `jax.block_until_ready` on the results of the function before torch's forward mode is used elsewhere."


class ForwardMode:
    """A context in which no other thread runs a function of jtbridge that uses torch's forward mode. It may be nested.

    In a callback of XLA the context also keeps a level of forward mode open, so that code on another thread that uses
    torch without this lock, such as an eager call, shares this level. If such code opened a level before, the context
    shares that level, and raises an error if the level ends too early.

    Args:
        keeps_level: whether a level is kept open. Torch refuses `torch.autograd.forward_ad.dual_level` inside another
            level, so none is kept for a function that uses it. Torch raises if another thread would disturb it.

    Raises:
        DifferentiationError: a trace stays in forward mode for minutes, or another thread ended the level.
    """

    _lock = threading.RLock()
    _of_callback = False  # whether the thread that holds the lock runs a callback of XLA

    def __init__(self, *, keeps_level: bool) -> None:
        self._keeps_level = keeps_level
        self._depth = 0
        self._kept = False  # whether this object opened the level
        self._foreign: Any = None  # a tensor with a tangent at the level of another thread

    def __enter__(self) -> None:
        seconds = 0
        while not self._lock.acquire(timeout=1.0):
            seconds += not ForwardMode._of_callback
            if seconds >= _LONGEST:
                raise DifferentiationError(f"{_BUSY}. {_REMEDY}")
        ForwardMode._of_callback = is_in_callback()
        self._depth += 1
        if self._depth == 1 and is_in_callback():
            try:
                self._keep_level()
            except BaseException:  # such as KeyboardInterrupt
                self.__exit__(*sys.exc_info())
                raise

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if self._depth == 1:
                self._leave_level(failed=kind is not None)
        finally:
            self._depth -= 1
            self._lock.release()

    def _keep_level(self) -> None:
        if self._kept:  # another thread was still using it when its last owner left
            return
        _wait_while(in_forward_mode)
        if not self._keeps_level:
            return
        try:
            enter_shared_level()
        except RuntimeError:  # another thread is in forward mode
            with outside_modes():
                self._foreign = dual()
        else:
            self._kept = True

    def _leave_level(self, *, failed: bool) -> None:
        if self._kept:
            _wait_while(level_is_shared)
            if not level_is_shared():
                exit_shared_level()
                self._kept = False
        foreign, self._foreign = self._foreign, None
        if foreign is not None and not failed:
            with outside_modes():
                lasted = has_tangent(foreign)
            if not lasted:
                raise DifferentiationError(f"{_BUSY}, and left it while this function was inside. {_REMEDY}")


def _wait_while(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + _PATIENCE
    while condition() and time.monotonic() < end:
        time.sleep(0.0005)


FORWARD_MODE = ForwardMode(keeps_level=True)
_WITHOUT_LEVEL = ForwardMode(keeps_level=False)


def forward_mode_for(use: str | None) -> tuple[ForwardMode, ...]:
    """Return the contexts for a function whose `AutogradTraits.forward_mode` is `use`: one context, or none."""
    return () if use is None else (FORWARD_MODE if use == "torch.func" else _WITHOUT_LEVEL,)


_DERIVATIVES = frozenset({"jvp", "jacfwd", "hessian", "linearize"})
_LEVELS = frozenset({"forward_ad", "dual_level", "make_dual"})
_OTHERS = frozenset({"torch", "jax", "numpy", "jtbridge"})  # packages whose functions are not searched


def named_forward_mode(fn: Callable[..., Any]) -> str | None:
    """Return which forward mode a function uses, as far as its code and the functions that it names show.

    The result is a value of `AutogradTraits.forward_mode`.
    """
    found = None
    seen: set[int] = set()
    todo: list[Any] = [fn]
    while todo:
        value = todo.pop()
        if isinstance(value, torch.nn.Module):
            todo += [type(module).forward for module in value.modules()]
            continue
        code = value if isinstance(value, types.CodeType) else getattr(value, "__code__", None)
        if not isinstance(code, types.CodeType) or id(code) in seen:
            continue
        seen.add(id(code))
        if not _LEVELS.isdisjoint(code.co_names):
            return "forward_ad"
        if not _DERIVATIVES.isdisjoint(code.co_names):
            found = "torch.func"
        todo += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
        todo += closure_contents(value)
        scope = getattr(value, "__globals__", {})
        named = [scope.get(name) for name in code.co_names]
        todo += [each for each in named if str(getattr(each, "__module__", "torch")).split(".")[0] not in _OTHERS]
    return found
