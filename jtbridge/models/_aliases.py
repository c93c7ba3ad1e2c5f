"""Errors for calls that make tensors of a module share memory, which the arrays of a state cannot do."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch

from jtbridge._compat import innermost, registered_modules, storage_id
from jtbridge.core.containers import entries_of, items_of
from jtbridge.core.overlap import shares_elements
from jtbridge.errors import ModelError

from ._layout import TensorEntry, plain_attributes


def refuse_new_ties(name: str, module: torch.nn.Module, before: Mapping[str, str], after: Mapping[str, str]) -> None:
    """Raise an error if a call replaced a tensor of its module by another tensor of the module.

    Args:
        name: the name of the module, for the message.
        module: the torch module.
        before, after: each further name of a tied tensor, with its first name, before and after the call.
    """
    new = {other: first for other, first in after.items() if before.get(other, other) != before.get(first, first)}
    shared = _shared_containers(module) if new else {}
    for other, first in new.items():
        if _first_name(other, shared) != _first_name(first, shared):
            raise _error(name, other, first, "the same tensor as")


def refuse_new_overlaps(name: str, found: Mapping[str, TensorEntry], given: Mapping[str, torch.Tensor]) -> None:
    """Raise an error if a call made a tensor of its module a view of another one.

    Args:
        name: the name of the module, for the message.
        found: the tensors of the module after the call.
        given: the tensors that the call got, which may share memory that no call writes to.
    """
    by_storage: dict[int, list[TensorEntry]] = {}
    for entry in found.values():
        if entry.tensor.layout is torch.strided:
            by_storage.setdefault(storage_id(innermost(entry.tensor)), []).append(entry)
    for group in by_storage.values():
        for first, second in itertools.combinations(group, 2):
            one, other = sorted((first, second), key=lambda entry: entry.tensor is given.get(entry.name))
            is_new = one.tensor is not given.get(one.name)
            if is_new and shares_elements(innermost(one.tensor), innermost(other.tensor)):
                raise _error(name, one.name, other.name, "a view of")


def _error(module: str, name: str, other: str, relation: str) -> ModelError:
    return ModelError(
        f"A call of `{module}` made `{name}` {relation} `{other}`. In torch they share memory from then on, so a write "
        f"to one changes the other as well, which the arrays of a state cannot do. Store a copy in `{name}`, with "
        "`.clone()`."
    )


def _shared_containers(module: torch.nn.Module) -> dict[str, str]:
    """Return each further name of a container or module that has several names in a module, with its first name."""
    names: dict[int, str] = {}
    shared: dict[str, str] = {}

    def visit(name: str, value: Any) -> None:
        if isinstance(value, dict):
            parts = entries_of(value)
        elif isinstance(value, list | tuple):
            parts = enumerate(items_of(value))
        elif isinstance(value, torch.nn.Module):
            parts = [*plain_attributes(value).items(), *registered_modules(value).items()]
        else:
            return
        first = names.setdefault(id(value), name)
        if first != name:
            shared[name] = first
            return
        for key, part in parts:
            visit(f"{name}.{key}" if name else str(key), part)

    visit("", module)
    return shared


def _first_name(name: str, shared: Mapping[str, str]) -> str:
    """Return the name of a tensor, with each shared container in it under its first name."""
    for end in (place for place in range(len(name) - 1, 0, -1) if name[place] == "."):
        if name[:end] in shared:
            return _first_name(shared[name[:end]] + name[end:], shared)
    return name
