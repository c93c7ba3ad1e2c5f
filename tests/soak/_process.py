"""Facts of the operating system about this process, and a watchdog that ends the process if it hangs."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import resource
from collections.abc import Iterator
from pathlib import Path

PATIENCE = 60  # seconds, for collecting garbage


def memory() -> int:
    """Return the bytes that the process holds, after returning freed memory to the system."""
    with contextlib.suppress(OSError, AttributeError):  # other C libraries have no such function
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    resident = int(Path("/proc/self/statm").read_text().split()[1])
    return resident * resource.getpagesize()


def threads() -> int:
    """Return how many threads the process has, of all libraries."""
    return len(os.listdir("/proc/self/task"))


@contextlib.contextmanager
def ended_if_stuck(seconds: float) -> Iterator[Iterator[None]]:
    """Yield an iterator; the process prints all stacks and ends if `next` is not called on it for a while.

    A thread that hangs while it holds the interpreter's lock also stops a watching thread.

    Args:
        seconds: the allowed time, in addition to `PATIENCE`.
    """

    def alive() -> Iterator[None]:
        while True:
            faulthandler.dump_traceback_later(seconds + PATIENCE, exit=True)
            yield

    iterator = alive()
    next(iterator)
    try:
        yield iterator
    finally:
        faulthandler.cancel_dump_traceback_later()
