"""Copies of a module's Python objects with other tensors in them.

A copy shares no mutable object with the original that the copied code could write to through `self`: modules, their
dicts of parameters, buffers, children and hooks, and the containers and NumPy arrays in their attributes are new.
Objects of other classes are shared, unless they hold a module or a tensor of the original. A function whose closure
holds one, such as a hook, is rebuilt around the copy.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import dis
import functools
import operator
import types
import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from jtbridge.core.closures import closure_contents, read_cell
from jtbridge.core.containers import CONTAINERS, entries_of, items_of, tensors_in
from jtbridge.core.definitions import module_of, slot_names
from jtbridge.errors import ModelError

from ._layout import OF_TORCH

_ATOMS = frozenset({int, float, bool, str, bytes, complex, type(None), type, torch.dtype, torch.device, torch.Size})
_DEPTH = 4  # levels of references in which an object's modules and tensors are looked for


@dataclasses.dataclass(frozen=True)
class Stale:
    """Tensors of a module that have no entry in its state.

    Attributes:
        copied: tensors that an earlier call computed from the module's own parameters, such as caches, and that the
            copy holds too.
        dropped: the names of attributes with such a tensor that are None in the copy, and the keys of dicts that the
            copy does not have.
        in_objects: tensors in copied objects of other classes than containers and modules. The copy has the same ones.
        objects: the copies of these objects, by the ids of the originals.
    """

    copied: list[torch.Tensor] = dataclasses.field(default_factory=list)
    dropped: list[str] = dataclasses.field(default_factory=list)
    in_objects: list[torch.Tensor] = dataclasses.field(default_factory=list)
    objects: dict[int, Any] = dataclasses.field(default_factory=dict)


def copied(module: torch.nn.Module, replaced: Mapping[int, torch.Tensor], stale: Stale) -> Any:
    """Return a copy of a module with other tensors.

    Args:
        module: the module.
        replaced: the tensors of the copy, by the ids of the module's tensors that they replace.
        stale: is filled with the tensors that earlier calls left in the module.
    """
    return _Copier(module, replaced, stale).value(module)


class _Copier:
    """Copies the objects of one module, each of them once."""

    def __init__(self, root: torch.nn.Module, replaced: Mapping[int, torch.Tensor], stale: Stale):
        self._replaced = replaced
        self._stale = stale
        self._modules = {id(module) for module in root.modules()}
        self._copies: dict[int, Any] = {}
        self._alive: list[Any] = []  # the originals of `_copies`: while they exist, their ids stay unique
        self._holding: dict[int, bool] = {}

    def value(self, value: Any) -> Any:
        kind = type(value)
        if kind in _ATOMS:
            return value
        if isinstance(value, torch.Tensor):
            if self._is_stale(value):
                self._stale.copied.append(value)
            return self._replaced.get(id(value), value)
        known = self._copies.get(id(value))
        if known is not None:
            return known
        if isinstance(value, torch.nn.Module):
            return self._module(value)
        if isinstance(value, dict):
            return self._mapping(value)
        if isinstance(value, list | set | collections.deque):
            return self._items(value)
        if kind in (tuple, frozenset):
            items = [self.value(item) for item in value]
            return value if all(map(operator.is_, items, value)) else kind(items)
        if kind in (np.ndarray, bytearray):
            return self._remember(value, value.copy())
        return self._rebuilt(value) if self._holds(value) else value

    def _remember(self, value: Any, found: Any) -> Any:
        self._copies[id(value)] = found
        self._alive.append(value)
        return found

    def _module(self, module: torch.nn.Module) -> Any:
        found = self._remember(module, object.__new__(type(module)))
        attributes = vars(found)
        for key, value in vars(module).items():
            if isinstance(getattr(type(module), key, None), functools.cached_property):
                continue  # computed again, from the tensors of the copy
            if self._is_stale(value):
                self._stale.dropped.append(key)
                attributes[key] = None
            elif key in OF_TORCH and isinstance(value, dict) and not value:  # such as most tables of hooks
                attributes[key] = type(value)()
            else:
                attributes[key] = self.value(value)
        for key in slot_names(type(module).__mro__):
            if hasattr(module, key):
                object.__setattr__(found, key, self.value(getattr(module, key)))
        return found

    def _mapping(self, mapping: dict[Any, Any]) -> Any:
        kind = type(mapping)
        is_plain = kind is dict or kind is collections.OrderedDict
        found = self._remember(mapping, kind() if is_plain else copy.copy(mapping))
        for key, value in entries_of(mapping):
            if self._is_stale(value):
                self._stale.dropped.append(str(key))
                found.pop(key, None)
            else:
                found[self.value(key)] = self.value(value)
        return found

    def _items(self, container: Any) -> Any:
        base: Any = next(base for base in (list, set, collections.deque) if isinstance(container, base))
        found = self._remember(container, copy.copy(container))
        items = [self.value(item) for item in items_of(container)]
        base.clear(found)  # not `found.clear()`, which a subclass may override
        (base.update if base is set else base.extend)(found, items)
        return found

    def _is_stale(self, value: Any) -> bool:
        """Return whether a value is a tensor that an earlier call computed from its own parameters, such as a cache."""
        return isinstance(value, torch.Tensor) and value.grad_fn is not None and id(value) not in self._replaced

    def _rebuilt(self, value: Any) -> Any:
        """Return the copy of a callable, a weak reference or another object that holds a module or a tensor."""
        if isinstance(value, types.MethodType):
            return types.MethodType(value.__func__, self.value(value.__self__))
        if isinstance(value, functools.partial):
            arguments = [self.value(argument) for argument in value.args]
            keywords = {key: self.value(argument) for key, argument in value.keywords.items()}
            return type(value)(self.value(value.func), *arguments, **keywords)
        if isinstance(value, weakref.ref):
            return weakref.ref(self.value(value()))
        if isinstance(value, types.FunctionType):
            return self._function(value)
        try:
            found = copy.copy(value)
        except TypeError:  # such as a `threading.local`: it is shared, and a use of its tensors is refused
            return value
        if isinstance(value, tuple):  # of a subclass, such as a named tuple
            items = [self.value(item) for item in items_of(value)]
            return value._make(items) if hasattr(value, "_make") else type(value)(items)  # type: ignore[attr-defined]
        self._stale.objects[id(value)] = self._remember(value, found)
        copies_itself = hasattr(type(value), "__copy__")  # `__copy__` may leave out caches
        for key, attribute in attributes_and_slots(found if copies_itself else value).items():
            object.__setattr__(found, key, self.value(attribute))
            tensors = tensors_in(attribute.values() if isinstance(attribute, dict) else [attribute])
            self._stale.in_objects.extend(tensor for tensor in tensors if id(tensor) not in self._replaced)
        return found

    def _function(self, function: types.FunctionType) -> Any:
        cells = tuple(self._cell(cell) for cell in function.__closure__ or ())
        defaults = tuple(map(self.value, function.__defaults__ or ())) or None
        found = types.FunctionType(function.__code__, function.__globals__, function.__name__, defaults, cells or None)
        if function.__kwdefaults__:
            found.__kwdefaults__ = {key: self.value(value) for key, value in function.__kwdefaults__.items()}
        functools.update_wrapper(found, function)
        return self._remember(function, found)

    def _cell(self, cell: types.CellType) -> types.CellType:
        contents = read_cell(cell)
        return types.CellType(self.value(contents)) if self._holds(contents) else cell

    def _holds(self, value: Any) -> bool:
        """Return whether an object holds a module, or a tensor that is replaced."""
        if type(value) in _ATOMS:
            return False
        if id(value) not in self._holding:
            self._holding[id(value)] = self._search(value)
            self._alive.append(value)
        return self._holding[id(value)]

    def _search(self, value: Any) -> bool:
        seen, level = {id(value)}, [value]
        for _ in range(_DEPTH):
            found = []
            for one in level:
                if isinstance(one, torch.nn.Module) or id(one) in self._replaced:
                    return True
                if self._is_stale(one):
                    self._stale.copied.append(one)
                parts = [part for part in self._parts(one) if type(part) not in _ATOMS and id(part) not in seen]
                seen.update(map(id, parts))
                found += parts
            level = found
        return False

    def _parts(self, value: Any) -> list[Any]:
        """Return the objects that an object holds."""
        if isinstance(value, CONTAINERS):
            return items_of(value)
        if isinstance(value, dict):
            return list(dict.values(value))
        if isinstance(value, types.MethodType):
            return [value.__self__]
        if isinstance(value, functools.partial):
            return [value.func, *value.args, *value.keywords.values()]
        if isinstance(value, weakref.ref):
            return [value()]
        if isinstance(value, types.FunctionType):
            self._check_globals(value)
            return closure_and_defaults(value)
        if isinstance(value, type | types.ModuleType) or module_of(type(value)).partition(".")[0] in ("torch", "numpy"):
            return []
        return list(attributes_and_slots(value).values())

    def _check_globals(self, function: types.FunctionType) -> None:
        """Refuse a function that reads a module of the original from a global variable, and so not the copy."""
        for name in function.__code__.co_names:
            value = function.__globals__.get(name)
            if isinstance(value, torch.nn.Module) and id(value) in self._modules and _reads(function, name):
                raise ModelError(
                    f"`{function.__qualname__}`, a hook or an attribute of the module, reads the module from the "
                    f"global variable `{name}`, so a call would use its own weights and not `params`. Use the module "
                    f"that torch passes to a hook, or make `{name}` a local variable of a function around it."
                )


def _reads(function: types.FunctionType, name: str) -> bool:
    """Return whether a function reads a global variable of a name. (`co_names` has the names of attributes too.)"""
    return any(i.opname == "LOAD_GLOBAL" and i.argval == name for i in dis.get_instructions(function))


def attributes_and_slots(value: Any) -> dict[str, Any]:
    """Return the attributes of an object, in its dict and in its slots."""
    slots = {key: getattr(value, key) for key in slot_names(type(value).__mro__) if hasattr(value, key)}
    return {**slots, **getattr(value, "__dict__", {})}


def closure_and_defaults(function: types.FunctionType) -> list[Any]:
    """Return the objects in the closure and in the defaults of a function."""
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    return [*closure_contents(function), *defaults]
