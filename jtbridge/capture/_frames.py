"""Source lines of the user: a test that tells files of the user from files of libraries, and searches of stacks."""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import sys
import traceback

import jax
import torch

_PACKAGES = (pathlib.Path(torch.__file__).parent, pathlib.Path(jax.__file__).parent, pathlib.Path(__file__).parents[1])
_FOLDERS = tuple(f"{package}{os.sep}" for package in _PACKAGES)


@functools.lru_cache(maxsize=4096)  # each operator asks for every frame of the stack
def is_library(file: str) -> bool:
    """Return whether a source file belongs to torch, JAX or jtbridge."""
    return file.startswith(_FOLDERS)


def line_of(error: BaseException) -> str:
    """Return file and line of the user's code that an exception came from; an empty text if no user code ran."""
    lines = [f"{frame.f_code.co_filename}:{line}" for frame, line in traceback.walk_tb(error.__traceback__)]
    return next((line for line in reversed(lines) if _is_users(line)), "")


def user_line() -> str:
    """Return file and line of the innermost frame of the user's code; an empty text without such a frame."""
    frame = sys._getframe(2)
    while frame is not None:
        if _is_users(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def _is_users(file: str) -> bool:
    return not is_library(file) and not file.startswith("<") and file != contextlib.__file__
