"""Source lines of user code, found in stacks and tracebacks."""

from __future__ import annotations

import sys
import traceback

from jtbridge.core.library_files import is_users


def line_of(error: BaseException) -> str:
    """Return file and line of the user's code that an exception came from; an empty text if no user code ran."""
    lines = [f"{frame.f_code.co_filename}:{line}" for frame, line in traceback.walk_tb(error.__traceback__)]
    return next((line for line in reversed(lines) if is_users(line)), "")


def user_line() -> str:
    """Return file and line of the innermost frame of the user's code; an empty text without such a frame."""
    frame = sys._getframe(2)
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
