"""Python values in the attributes of a module that a call changed."""

from __future__ import annotations

import collections
import enum
import functools
import itertools
import types
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from jtbridge._compat import HOOK_TABLES
from jtbridge.core.containers import entries_of, items_of
from jtbridge.state import VALUES, same

from ._copying import attributes_and_slots, closure_and_defaults
from ._layout import plain_attributes

_DEPTH = 6
_MISSING: Any = type("Missing", (), {"__repr__": lambda self: "<missing>"})()
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial)
_SETS = (set, frozenset, collections.deque)
_NAMING = (list, tuple, dict)  # containers in which tensors have names

Change = tuple[str, Any, Any]


def python_changes(
    original: torch.nn.Module,
    copy: torch.nn.Module,
    replaced: Mapping[int, torch.Tensor],
    objects: Mapping[int, Any],
) -> Iterator[Change]:
    """Yield the Python values that differ between a module and the copy that a call ran: name, before and after.

    Values of every kind count, such as numbers, strings, dtypes, functions and NumPy arrays, in attributes and in the
    containers and objects there; so do the order of a dict and the class of a container. Tensors do not count: they are
    part of the state that a call returns, except in sets, deques, functions and objects of other classes, where they
    have no names. An attribute that the call created does not count either, because the next call creates it again,
    unless the class tests whether it exists. Nor does an object that replaced None. A submodule that was removed or
    replaced by one of another class counts, and so does a hook that the call registered.

    Args:
        original, copy: the module and its copy.
        replaced: the tensors of the copy by the ids of the module's tensors.
        objects: copies of objects by the ids of the originals. An object that the call made in place of one is not
            compared by its tensors: the next call makes it again.
    """
    yield from _ModuleComparison(replaced, objects).modules("", original, copy)


def _is_installed_anew(hook: Any) -> bool:
    """Return whether transformers installed a hook.

    Its models install their hooks again in each call that needs them.
    """
    return (getattr(hook, "__module__", None) or "").startswith("transformers.")


@functools.lru_cache(maxsize=4096)
def asks_for(kind: type, name: str) -> bool:
    """Return whether a method of a class uses an attribute's name as a string, as `getattr(self, "name", 0)` does."""
    for base in kind.__mro__:
        for method in vars(base).values():
            code = getattr(method, "__code__", None)
            if isinstance(code, types.CodeType) and name in code.co_consts and _ASKING & set(code.co_names):
                return True
    return False


_ASKING = {"getattr", "hasattr", "__dict__", "vars"}


class _ModuleComparison:
    """Comparison of a module with its copy; each object is compared once."""

    def __init__(self, replaced: Mapping[int, torch.Tensor], objects: Mapping[int, Any]) -> None:
        self._replaced = replaced
        self._objects = objects
        self._seen: dict[int, Any] = {}  # the objects of the original, by their ids

    def modules(self, name: str, original: torch.nn.Module, copy: torch.nn.Module) -> Iterator[Change]:
        start = f"{name}." if name else ""
        copies = dict(copy.named_modules())
        parts = [(path, part) for path, part in original.named_modules() if self._is_new(part)]
        for path, part in parts:
            other = copies.get(path)
            if type(other) is not type(part):
                yield f"{start}{path}", part, _MISSING if other is None else other
            if other is None:
                continue
            place = f"{start}{path}." if path else start
            before, after = plain_attributes(part), plain_attributes(other)
            for key, value in before.items():
                yield from self._values(f"{place}{key}", value, after.get(key, _MISSING), 0)
            for key in after.keys() - before.keys():
                if not isinstance(after[key], bool) and asks_for(type(other), key):
                    yield from self._values(f"{place}{key}", _MISSING, after[key], 0)
            for key in HOOK_TABLES:
                was, now = vars(part).get(key, {}), vars(other).get(key, {})
                added = [hook for number, hook in now.items() if number not in was and not _is_installed_anew(hook)]
                if added or was.keys() - now.keys():
                    yield f"{place}{key}", list(was.values()), list(now.values())

    def _is_new(self, value: Any) -> bool:
        """Return whether an object of the original was not compared yet."""
        if id(value) in self._seen:
            return False
        self._seen[id(value)] = value
        return True

    def _values(self, name: str, before: Any, after: Any, depth: int, named: bool = True) -> Iterator[Change]:
        """Yield the changes in a value. `named` says whether tensors in it have names in the state."""
        if after is before or depth > _DEPTH:
            return
        if _is_tensor(before) or _is_tensor(after):
            if not named and after is not self._replaced.get(id(before)) and not _is_of_earlier_call(before):
                yield name, _tensor_text(before), _tensor_text(after)
        elif isinstance(before, weakref.ref) and isinstance(after, weakref.ref):
            yield from self._values(name, before(), after(), depth + 1, named)
        elif isinstance(before, _SETS) or isinstance(after, _SETS):
            if not _has_same_items(before, after):
                yield name, before, after
        elif _is_other_container(before, after):
            yield name, type(before), type(after)
        elif isinstance(before, dict) or isinstance(after, dict):
            old, new = (_without_modules(value) if isinstance(value, dict) else {} for value in (before, after))
            for key in {**old, **new}:
                yield from self._values(
                    f"{name}.{key}", old.get(key, _MISSING), new.get(key, _MISSING), depth + 1, named
                )
            if _has_other_order(old, new):
                yield name, list(old), list(new)
        elif isinstance(before, list | tuple) or isinstance(after, list | tuple):
            old, new = (items_of(value) if isinstance(value, list | tuple) else () for value in (before, after))
            for place, (one, other) in enumerate(itertools.zip_longest(old, new, fillvalue=_MISSING)):
                yield from self._values(f"{name}.{place}", one, other, depth + 1, named)
        elif isinstance(before, torch.nn.Module) and isinstance(after, torch.nn.Module):
            if id(before) not in self._seen:
                yield from self.modules(name, before, after)
        elif isinstance(before, _FUNCTIONS) and type(before) is type(after):
            (code, parts), (other_code, others) = _code_and_parts(before), _code_and_parts(after)
            if code is not other_code:
                yield name, before, after
            else:
                yield from self._values(name, parts, others, depth + 1, named=False)
        elif _is_value(before) or _is_value(after):
            if not _equal(before, after):
                yield name, before, after
        elif type(before) is type(after):
            if self._is_new(before):
                old, new = attributes_and_slots(before), attributes_and_slots(after)
                is_new = self._objects.get(id(before)) is not after
                for key in {**old, **new}:
                    yield from self._values(
                        f"{name}.{key}", old.get(key, _MISSING), new.get(key, _MISSING), depth + 1, named=is_new
                    )
        elif before is not None and before is not _MISSING:
            yield name, before, after


def _is_of_earlier_call(value: Any) -> bool:
    """Return whether an earlier call computed a tensor from the module's own parameters. No call may read it."""
    return _is_tensor(value) and value.grad_fn is not None


def _tensor_text(value: Any) -> Any:
    """Return a text for a tensor, whose values may not be known; other values as they are."""
    return f"a tensor of shape {tuple(value.shape)}" if _is_tensor(value) else value


def _without_modules(mapping: dict[Any, Any]) -> dict[Any, Any]:
    """Return a dict without keys that are modules: in the copy, such a key is the copied module."""
    return {key: value for key, value in entries_of(mapping) if not isinstance(key, torch.nn.Module)}


def _has_other_order(old: dict[Any, Any], new: dict[Any, Any]) -> bool:
    """Return whether the keys that two dicts share are in another order in `new`, or not its first ones."""
    both = [key for key in old if key in new]
    return list(new)[: len(both)] != both


def _is_other_container(before: Any, after: Any) -> bool:
    """Return whether two containers are of different classes, such as a list and a tuple."""
    return isinstance(before, _NAMING) and isinstance(after, _NAMING) and type(before) is not type(after)


def _is_value(value: Any) -> bool:
    """Return whether an object is compared by ``==``, as numbers and strings are. Others are compared by attributes."""
    if value is None or value is _MISSING:
        return False
    if isinstance(value, (*VALUES, *_FUNCTIONS, type, enum.Enum, np.ndarray, bytearray)):
        return True
    return type(value).__eq__ is not object.__eq__ and not attributes_and_slots(value)


def _equal(value: Any, other: Any) -> bool:
    """Return whether two values are equal and of one type."""
    if same(value, other):
        return True
    if type(value) is not type(other) or isinstance(value, np.ndarray):
        return False
    try:
        return type(value).__eq__ is not object.__eq__ and bool(value == other)
    except (TypeError, ValueError, RuntimeError):  # arrays, for example, compare by element
        return False


def _code_and_parts(function: Any) -> tuple[Any, Any]:
    """Return the code of a function, or the class of a wrapper, and the objects that it refers to."""
    if isinstance(function, functools.partial):
        return functools.partial, [function.func, function.args, function.keywords]
    if isinstance(function, types.MethodType):
        return types.MethodType, [function.__func__, function.__self__]
    if isinstance(function, types.FunctionType):
        return function.__code__, closure_and_defaults(function)
    return function, []


def _has_same_items(before: Any, after: Any) -> bool:
    """Return whether a set or a deque has the same values and tensors."""
    if type(before) is not type(after):
        return not after
    old, new = ([item for item in items if _is_value(item) or _is_tensor(item)] for items in (before, after))
    if isinstance(after, set | frozenset):
        return set(map(_identity_or_value, old)) == set(map(_identity_or_value, new))
    return len(before) == len(after) and list(map(_identity_or_value, old)) == list(map(_identity_or_value, new))


def _identity_or_value(item: Any) -> Any:
    return id(item) if _is_tensor(item) or isinstance(item, np.ndarray | bytearray) else (type(item), item)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)
