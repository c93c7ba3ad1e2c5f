"""Messages to the user: names of types in errors, and warnings at the line of the user's code."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import jax
import jax.core

from .library_files import is_users


def in_utf8(text: str) -> str:
    """Return a text in a form that XLA can pass on: XLA aborts at a lone surrogate, and cuts the text at a NUL."""
    return text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00")


def kind_of(value: Any) -> str:
    """Return the type of a value with its article, such as "an int" or "a jax.Array"."""
    if isinstance(value, jax.core.Tracer):
        return "a JAX tracer"
    if isinstance(value, jax.Array):
        return "a jax.Array"
    name = type(value).__name__
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


def text_of(error: BaseException) -> str:
    """Return the message of an exception, also of a class whose ``__str__`` fails."""
    try:
        return str(error)
    except (Exception, SystemExit) as failure:  # noqa: BLE001  (the user's class may raise anything)
        return f"<its text cannot be read: {type(failure).__name__}>"


def first_line(error: BaseException) -> str:
    """Return the first line of the message of an exception without its full stop; an empty string if it has none."""
    line = next(iter(text_of(error).strip().splitlines()), "")
    return line if line.endswith("...") else line.removesuffix(".")


def summary_of(error: BaseException) -> str:
    """Return the type of an exception and the first line of its message."""
    return f"{type(error).__name__}: {first_line(error)}"


def warn_user(message: str, category: type[Warning]) -> None:
    """Warn at the innermost line of the user's code on the stack; at the caller's line if there is none."""
    caller = frame = sys._getframe(1)
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    frame = frame or caller
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    warnings.warn_explicit(message, category, frame.f_code.co_filename, frame.f_lineno, registry=registry)
