"""Functions with a ``functools.cache`` or ``functools.lru_cache``, and the entries that a trace adds to the cache."""

from __future__ import annotations

import functools
import gc
import types
from typing import Any

import torch

from jtbridge._compat import FakeTensor, cache_entries, innermost

from ._comparison import VALUES
from ._escaped import PoisonTensor

CACHED_FUNCTION = type(functools.cache(lambda: None))
_MAX_OBJECTS = 20_000  # objects that are searched, from one result, for a tensor of a trace
_NOT_SEARCHED = (type, types.ModuleType, types.FunctionType, types.CodeType, types.FrameType, str, bytes, int, float)


class CachedFunction:
    """A function with a cache, as it was when the state was saved.

    A cache cannot be restored like other state, because its entries have no public interface. Entries that were added
    since can be dropped, so that the next call computes them again.
    """

    def __init__(self, function: Any):
        self.function = function
        self.name = getattr(function, "__name__", "a cached function")
        self._misses = function.cache_info().misses
        self._entries = dict(cache_entries(function)[0])

    def results(self) -> dict[Any, Any]:
        """Return the results that the cache holds, by key."""
        return cache_entries(self.function)[1]

    def has_new_containers(self) -> bool:
        """Return whether there is a new entry whose result later calls may write to."""
        return any(map(_may_hold_state, self._new().values()))

    def drop_new(self) -> None:
        """Drop the entries that were added since the state was saved."""
        if self._new() and not self._entries:
            self.function.cache_clear()  # a bounded cache has a list too, from which no single entry can be removed
            return
        entries, _ = cache_entries(self.function)
        for key in self._new():
            entries.pop(key, None)

    def _new(self) -> dict[Any, Any]:
        if self.function.cache_info().misses == self._misses:
            return {}
        return {key: result for key, result in self.results().items() if key not in self._entries}

    def drop_traced(self) -> bool:
        """Drop the entries added since that hold tensors of a trace or of a transform of `torch.func`.

        Such tensors cannot be used after the trace. Return whether a later call would have got one of the dropped
        results. No later call gets the result for an argument that is a tensor of the trace.
        """
        if self.function.cache_info().misses == self._misses:
            return False
        entries, results = cache_entries(self.function)
        is_found_again = False
        for key in [key for key in entries if key not in self._entries]:
            of_a_tensor = _refers_to_traced([key])
            if of_a_tensor or _refers_to_traced([results[key]]):
                entries.pop(key, None)
                is_found_again |= not of_a_tensor
        return is_found_again


def _may_hold_state(result: Any) -> bool:
    """Return whether a result of a cached function may hold state, such as a list or an object, but not a tensor."""
    if isinstance(result, tuple):
        return any(map(_may_hold_state, result))
    return not isinstance(result, (torch.Tensor, type, types.FunctionType, types.ModuleType, *VALUES))


def _refers_to_traced(values: list[Any]) -> bool:
    """Return whether objects refer to a tensor that belongs to a trace or to a transform of `torch.func`."""
    seen: set[int] = set()
    while values and len(seen) < _MAX_OBJECTS:
        value = values.pop()
        if id(value) in seen or isinstance(value, _NOT_SEARCHED):
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            if isinstance(value, FakeTensor | PoisonTensor) or innermost(value) is not value:
                return True
            continue
        values += gc.get_referents(value)
    return False
