"""Python values in the attributes of a module that a call changed."""

from __future__ import annotations

import collections
import functools
import itertools
import types
from collections.abc import Iterator
from typing import Any

import torch

from ._layout import plain_attributes

_VALUES = (int, float, complex, str, bytes, bool)
_DEPTH = 6
_MISSING: Any = type("Missing", (), {"__repr__": lambda self: "<missing>"})()

Change = tuple[str, Any, Any]


def python_changes(original: torch.nn.Module, copy: torch.nn.Module) -> Iterator[Change]:
    """Yield the Python values that differ between a module and the copy that a call ran: name, before and after.

    Numbers, strings and flags count, in attributes and in the containers and objects there. Tensors do not count: they
    are part of the state that a call returns, except in sets and deques, where they have no names. An attribute that
    the call made does not count either, because the next call makes it anew, unless the class asks whether it is there.
    Hooks that the call registered count.
    """
    copies = dict(copy.named_modules())
    for path, part in original.named_modules():
        other = copies.get(path)
        if other is None:
            continue
        start = f"{path}." if path else ""
        before, after = plain_attributes(part), plain_attributes(other)
        for key, value in before.items():
            yield from _changes(f"{start}{key}", value, after.get(key, _MISSING), 0)
        for key in after.keys() - before.keys():
            if not isinstance(after[key], bool) and asks_for(type(other), key):
                yield from _changes(f"{start}{key}", _MISSING, after[key], 0)
        for key in _HOOKS:
            was, now = vars(part).get(key, {}), vars(other).get(key, {})
            added = [hook for number, hook in now.items() if number not in was and not _is_installed_anew(hook)]
            if added or was.keys() - now.keys():
                yield f"{start}{key}", list(was.values()), list(now.values())


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _is_installed_anew(hook: Any) -> bool:
    """Return whether a hook is one of transformers, which its models register again in each call that needs it."""
    return (getattr(hook, "__module__", None) or "").startswith("transformers.")


@functools.lru_cache(maxsize=4096)
def asks_for(kind: type, name: str) -> bool:
    """Return whether a method of a class asks for an attribute by a string, as `getattr(self, "name", 0)` does."""
    for base in kind.__mro__:
        for method in vars(base).values():
            code = getattr(method, "__code__", None)
            if isinstance(code, types.CodeType) and name in code.co_consts and _ASKING & set(code.co_names):
                return True
    return False


_ASKING = {"getattr", "hasattr", "__dict__", "vars"}


def _changes(name: str, before: Any, after: Any, depth: int) -> Iterator[Change]:
    if after is before or depth > _DEPTH or _is_tensor(before) or _is_tensor(after):
        return
    if type(before) in _VALUES or type(after) in _VALUES:
        if type(before) is not type(after) or before != after:
            yield name, before, after
    elif isinstance(after, set | frozenset | collections.deque):
        if not _has_same_items(before, after):
            yield name, before, after
    elif isinstance(before, dict) or isinstance(after, dict):
        old, new = (value if isinstance(value, dict) else {} for value in (before, after))
        for key in {**old, **new}:
            if isinstance(key, torch.nn.Module):
                continue  # the copy has another key
            yield from _changes(f"{name}.{key}", old.get(key, _MISSING), new.get(key, _MISSING), depth + 1)
    elif isinstance(before, list | tuple) or isinstance(after, list | tuple):
        old, new = (value if isinstance(value, list | tuple) else () for value in (before, after))
        for place, (one, other) in enumerate(itertools.zip_longest(old, new, fillvalue=_MISSING)):
            yield from _changes(f"{name}.{place}", one, other, depth + 1)
    elif type(before) is type(after) and not isinstance(before, torch.nn.Module) and hasattr(before, "__dict__"):
        yield from _changes(name, vars(before), vars(after), depth + 1)


def _has_same_items(before: Any, after: Any) -> bool:
    """Return whether a set or a deque has the same numbers, strings and tensors."""
    if type(before) is not type(after):
        return not after
    old, new = ([item for item in items if type(item) in _VALUES or _is_tensor(item)] for items in (before, after))
    if isinstance(after, set | frozenset):
        return set(map(_identity, old)) == set(map(_identity, new))
    return len(before) == len(after) and list(map(_identity, old)) == list(map(_identity, new))


def _identity(item: Any) -> Any:
    return id(item) if _is_tensor(item) else (type(item), item)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)
