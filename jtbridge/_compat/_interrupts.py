"""An exception raised in another thread."""

from __future__ import annotations

import ctypes


def raise_in_thread(thread: int, exception: type[BaseException]) -> None:
    """Raise an exception at the next Python instruction of a thread.

    Python has no function for it. Its C API has `PyThreadState_SetAsyncExc` (tried on Python 3.11). An exception that
    is still to come must not be taken back with NULL: Python 3.11 then hangs when the thread is traced.
    """
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(exception))
