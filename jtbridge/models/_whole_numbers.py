"""Whole numbers of any kind as arguments."""

from __future__ import annotations

import operator
from typing import Any


def as_whole_number(value: Any) -> Any:
    """Return a whole number of any kind, such as one of NumPy, as an int; any other value as it is."""
    if isinstance(value, bool):
        return value
    try:
        return operator.index(value)
    except TypeError:
        return value
