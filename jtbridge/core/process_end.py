"""The end of the process while XLA runs a callback.

When the interpreter ends, it stops each other thread that comes back to Python. In a callback that is in the middle of
XLA's code, which then aborts the process. So the end of the process waits for callbacks that run.
"""

from __future__ import annotations

import atexit
import os
import time

_MAX_WAIT = 5.0  # seconds; a callback may wait for something that never comes
_PAUSE = 0.01  # seconds between two looks; in this time a callback that is done returns to XLA
CALLBACK_THREADS: set[int] = set()  # the threads that run a callback


@atexit.register
def _wait_for_callbacks() -> None:
    end = time.monotonic() + _MAX_WAIT
    while CALLBACK_THREADS and time.monotonic() < end:
        time.sleep(_PAUSE)
    time.sleep(_PAUSE)


if hasattr(os, "register_at_fork"):  # not on Windows, which does not fork
    os.register_at_fork(after_in_child=CALLBACK_THREADS.clear)  # a child has none of the other threads
