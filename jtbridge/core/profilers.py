"""A profiler of this thread for a while, beside one that the user runs."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

Event = Callable[[Any, str, Any], object]


@contextlib.contextmanager
def profiled(see: Event) -> Iterator[bool]:
    """Call ``see(frame, event, arg)`` for each event of this thread inside the block.

    A profiler of the user written in Python sees these events too. One written in C, such as `cProfile`, cannot be
    called: it does not see them, and it goes on after the block.

    Yields:
        Whether the events are seen. They are not if the user's profiler could not go on, as that of `torch.profiler`
        with ``with_stack=True``.
    """
    outer: Any = sys.getprofile()
    if outer is not None and not callable(outer) and not hasattr(outer, "enable"):
        yield False
        return
    try:
        sys.setprofile(_chained(outer, see) if callable(outer) else see)
        yield True
    finally:
        if outer is None or callable(outer):
            sys.setprofile(outer)
        else:
            sys.setprofile(None)
            outer.enable()


def _chained(outer: Event, see: Event) -> Event:
    def profile(frame: Any, event: str, arg: Any) -> None:
        outer(frame, event, arg)
        see(frame, event, arg)

    return profile
