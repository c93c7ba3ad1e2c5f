"""Context variables that have a value for a block of code."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def assigned(*values: tuple[contextvars.ContextVar[Any], Any]) -> Iterator[None]:
    """Set context variables inside the block. Each argument is a variable and its value."""
    tokens = [(variable, variable.set(value)) for variable, value in values]
    try:
        yield
    finally:
        for variable, token in tokens:
            variable.reset(token)
