"""Pickling of wrapped functions: by name, like Python functions, if the name refers to them; otherwise by parts."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def reduce_value(wrapped: Any, rebuild: Callable[..., Any], *parts: Any) -> Any:
    """Return the value for ``__reduce__`` of a wrapped function.

    The name of a decorated function refers to the wrapped function, so the wrapped function is pickled by this name.
    No name refers to the plain function. Another process may have another ``__main__``, so if `cloudpickle` is
    imported, a wrapped function of ``__main__`` is pickled by its parts with `cloudpickle`.

    Args:
        wrapped: the wrapped function.
        rebuild: makes the wrapped function from its parts.
        parts: the parts of the wrapped function, the plain function first.
    """
    module, name = getattr(wrapped, "__module__", None), getattr(wrapped, "__qualname__", None)
    if module is None or name is None or _object_named(module, name) is not wrapped:
        return rebuild, parts
    cloudpickle = sys.modules.get("cloudpickle")
    if module == "__main__" and cloudpickle is not None:
        return _rebuild_from_pickle, (rebuild, cloudpickle.dumps(parts))
    return name


def _rebuild_from_pickle(rebuild: Callable[..., Any], data: bytes) -> Any:
    import pickle

    return rebuild(*pickle.loads(data))


def _object_named(module: str, qualname: str) -> Any:
    """Return the object with a qualified name in a module; None if there is no such object."""
    value: Any = sys.modules.get(module)
    for part in qualname.split("."):
        value = getattr(value, part, None)
    return value
