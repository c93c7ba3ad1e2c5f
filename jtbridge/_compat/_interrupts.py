"""Exceptions raised in another thread, and work on a thread that Ctrl-C does not reach."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any, TypeVar

Result = TypeVar("Result")


def raise_in_thread(thread: int, exception: type[BaseException]) -> None:
    """Raise an exception at the next Python instruction of a thread.

    Python has no function for this. Its C API has `PyThreadState_SetAsyncExc` (tried on Python 3.11). A pending
    exception must not be cancelled with NULL: Python 3.11 then hangs when the thread is traced.
    """
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(exception))


def on_own_thread(function: Callable[[], Result]) -> Result:
    """Return the result of a function that a new thread runs, which Ctrl-C does not interrupt.

    `concurrent.futures` cannot start a thread after the main thread has ended, while other threads may still run. At
    the end of the process Python cannot start any thread: then the calling thread runs the function.
    """
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome[:] = [function(), None]
        except BaseException as error:  # noqa: BLE001  (raised again below)
            outcome[:] = [None, error]

    thread = threading.Thread(target=run, name="jtbridge")
    try:
        thread.start()
    except RuntimeError:
        return function()
    thread.join()
    result, error = outcome
    if error is not None:
        raise error
    return result
