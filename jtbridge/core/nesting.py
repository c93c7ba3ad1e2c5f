"""Test for calls from inside a running wrapped function, where a wrapped function is a plain torch function."""

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
