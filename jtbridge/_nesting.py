"""Whether the caller is a wrapped function that is running, in which torch calls torch."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

_RUNNING = threading.local()


def marked(call: Callable[..., Any]) -> Callable[..., Any]:
    """`call`, the user's torch function, with :func:`is_inside` true on its thread while it runs."""

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
    """Whether a wrapped function is running, or being traced, on this thread."""
    return getattr(_RUNNING, "inside", False)
