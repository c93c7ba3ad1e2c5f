"""Tests for calls from inside a running wrapped function, and from inside a callback of XLA.

Inside a running wrapped function, a wrapped function is a plain torch function. Inside a callback of XLA, JAX must not
be called: the call may wait for the very thread that it runs on.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

_RUNNING = threading.local()


def marked(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return `call`, the user's torch function, with :func:`is_inside` true on its thread while it runs."""

    @functools.wraps(call, assigned=(), updated=())
    def run(*args: Any, **kwargs: Any) -> Any:
        before = getattr(_RUNNING, "inside", False)
        _RUNNING.inside = True
        try:
            return call(*args, **kwargs)
        finally:
            _RUNNING.inside = before

    return run


def is_inside() -> bool:
    """Return whether a wrapped function is running, or being traced, on this thread."""
    return getattr(_RUNNING, "inside", False)


def of_xla(callback: Callable[..., Any]) -> Callable[..., Any]:
    """Return a callback that XLA calls, with :func:`is_in_callback` true on its thread while it runs."""

    def run(*args: Any) -> Any:
        before = getattr(_RUNNING, "callback", False)
        _RUNNING.callback = True
        try:
            return callback(*args)
        finally:
            _RUNNING.callback = before

    return run


def is_in_callback() -> bool:
    """Return whether XLA called the code that runs on this thread."""
    return getattr(_RUNNING, "callback", False)
