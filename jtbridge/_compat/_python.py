"""Private details of CPython."""

from __future__ import annotations

import gc
import types
from collections.abc import Callable
from typing import Any


def cache_entries(function: Callable[..., Any]) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """Return the dict in which a function with a ``functools.cache`` keeps its entries, and the results by key.

    Single entries have no public access, and `cache_clear` drops all of them. CPython's garbage collector lists, for a
    bounded cache, the key and the result of each entry, then the dict, then the attributes of the function. Tried on
    CPython 3.11, 3.12 and 3.13.
    """
    parts = gc.get_referents(function)
    dicts = [i for i, part in enumerate(parts) if type(part) is dict and part is not vars(function)]
    if not dicts:
        return {}, {}
    entries: dict[Any, Any] = parts[dicts[-1]]
    link = next(map(type, entries.values()), None)
    if getattr(link, "__name__", "") != "_lru_list_elem":
        return entries, entries
    listed = [part for part in parts[: dicts[-1]] if part is not link and part is not type(function)]
    results = dict(zip(listed[::2], listed[1::2], strict=False))  # deleted entries are listed too, before later ones
    return entries, {key: results.get(key) for key in entries}


def dispatch_cache(function: Callable[..., Any]) -> Any | None:
    """Return the cache of types of a ``functools.singledispatch`` function; None for another function.

    The cache has no public access. Tried on CPython 3.11, 3.12 and 3.13.
    """
    clear = getattr(function, "_clear_cache", None)
    return clear.__self__ if isinstance(clear, types.MethodType) else None
