"""The items of containers, read without the methods of the user's subclasses, which may do anything."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator
from typing import Any

import torch

CONTAINERS = (list, tuple, set, frozenset, collections.deque)


def items_of(container: Any) -> list[Any]:
    """Return the items of a list, tuple, set or deque, or of an object of a subclass."""
    kind: Any = next(kind for kind in CONTAINERS if isinstance(container, kind))
    return list(kind.__iter__(container))


def entries_of(mapping: dict[Any, Any]) -> list[tuple[Any, Any]]:
    """Return the keys and values of a dict, or of an object of a subclass, in its order."""
    kind: Any = collections.OrderedDict if isinstance(mapping, collections.OrderedDict) else dict
    return list(kind.items(mapping))  # `dict.items` does not know the order of an OrderedDict


def tensors_in(*groups: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors among values, and in lists and tuples among them."""
    for group in groups:
        for value in group:
            if isinstance(value, torch.Tensor):
                yield value
            elif isinstance(value, list | tuple):
                yield from tensors_in(value)
