"""Pickling of wrapped functions, as of Python functions: by name where there is one, else by their parts."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def reduced(wrapped: Any, rebuild: Callable[..., Any], *parts: Any) -> Any:
    """What ``__reduce__`` of a wrapped function returns.

    A function that was decorated in a module is found there by its name, under which the plain function cannot be
    found any more. Another process need not have the same ``__main__``: from there `cloudpickle`, where it is used,
    takes the plain function along.

    Args:
        wrapped: the wrapped function.
        rebuild: makes it of its parts.
        parts: what it is made of: the plain function first.
    """
    module, name = getattr(wrapped, "__module__", None), getattr(wrapped, "__qualname__", None)
    if module is None or name is None or _found(module, name) is not wrapped:
        return rebuild, parts
    cloudpickle = sys.modules.get("cloudpickle")
    if module == "__main__" and cloudpickle is not None:
        return _load, (rebuild, cloudpickle.dumps(parts))
    return name


def _load(rebuild: Callable[..., Any], data: bytes) -> Any:
    import pickle

    return rebuild(*pickle.loads(data))


def _found(module: str, qualname: str) -> Any:
    """What a module has under a name."""
    value: Any = sys.modules.get(module)
    for part in qualname.split("."):
        value = getattr(value, part, None)
    return value
