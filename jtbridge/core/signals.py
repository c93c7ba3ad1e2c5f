"""Exceptions that a signal handler raises, such as one for a time limit: they say nothing of the code that they end."""

from __future__ import annotations

import contextlib
import functools
import signal
import types
from collections.abc import Iterator
from typing import Any


def raise_if_from_signal(error: BaseException) -> None:
    """Raise an exception again if a signal handler raised it.

    A function that fails in one way is traced or run in another way. An exception that comes from outside of the
    function must end the call instead, and nothing may be remembered of it.
    """
    place = error.__traceback__
    codes = {_code_of(signal.getsignal(number)) for number in signal.valid_signals()} - {None}
    while codes and place is not None:
        if place.tb_frame.f_code in codes:
            raise error
        place = place.tb_next


@contextlib.contextmanager
def failures_ignored() -> Iterator[None]:
    """Ignore an exception of the block, unless a signal handler raised it."""
    try:
        yield
    except Exception as error:  # noqa: BLE001
        raise_if_from_signal(error)


def _code_of(handler: Any) -> types.CodeType | None:
    """Return the code that a signal handler runs; None if it is not written in Python."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    if not isinstance(handler, types.FunctionType | types.MethodType):
        handler = getattr(type(handler), "__call__", None)  # noqa: B004  (of a callable object)
    return getattr(handler, "__code__", None)
