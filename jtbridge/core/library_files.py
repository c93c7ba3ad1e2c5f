"""Tests whether a source file belongs to a library or to the user."""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib

import jax
import torch

_PACKAGES = (pathlib.Path(torch.__file__).parent, pathlib.Path(jax.__file__).parent, pathlib.Path(__file__).parents[1])
_FOLDERS = tuple(f"{package}{os.sep}" for package in _PACKAGES)


@functools.lru_cache(maxsize=4096)  # each operator asks for every frame of the stack
def is_library(file: str) -> bool:
    """Return whether a source file belongs to torch, JAX or jtbridge."""
    return file.startswith(_FOLDERS)


def is_users(file: str) -> bool:
    """Return whether a source file belongs to the user, and not to these libraries or to code made at run time."""
    return not is_library(file) and not file.startswith("<") and file != contextlib.__file__
