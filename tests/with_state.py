"""Functions with state, in a file that other tests import."""

from __future__ import annotations

from typing import Any

count = 0
seen: list[int] = []


def outer(x: Any) -> Any:
    return inner(x) * len(seen)


def inner(x: Any) -> Any:
    seen.append(len(seen))
    return x
