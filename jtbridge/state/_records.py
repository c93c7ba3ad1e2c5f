"""The entries of a snapshot: contents and classes of objects, empty containers, and positions of iterators."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from jtbridge._compat import MODULE_TABLES

from ._kinds import ATTRIBUTES, DICT_OF, SET, TYPE, Kind, attributes_of, kind_of_dict

_OF_TORCH = {"_is_param", "_is_buffer"}  # attributes by which torch knows parameters and buffers of any class


class StatePath(NamedTuple):
    """Path to an object: the path of its holder, and the step from there ("root", "global", "attribute" or "item").

    A root is a variable of a closure or an argument. The path of a root has no parent.
    """

    parent: StatePath | None
    kind: str
    key: Any

    def __str__(self) -> str:
        if self.parent is None:
            return str(self.key)
        holder = self.parent
        if self.kind == "item" and holder.kind == "attribute" and holder.key in MODULE_TABLES and holder.parent:
            digits = str(self.key).isdigit()
            return f"{holder.parent}[{self.key}]" if digits else str(StatePath(holder.parent, "attribute", self.key))
        if self.kind == "attribute":
            return f"{holder}.{self.key}" if str(holder) else str(self.key)
        return f"{holder}[{json.dumps(self.key) if isinstance(self.key, str) else repr(self.key)}]"

    @property
    def is_global(self) -> bool:
        """Return whether the object is a global variable, or is reached from one."""
        return self.kind == "global" or (self.parent is not None and self.parent.is_global)


class Record(NamedTuple):
    """An object and its contents when the state was saved."""

    obj: Any
    kind: Kind
    contents: Any
    path: StatePath

    def differences(self) -> Iterator[tuple[str, Any, Any, Any]]:
        """Return the differences between the saved and the present contents, each as step, key, before, after."""
        if self.kind.is_unchanged(self.obj, self.contents):
            return iter(())
        return self.kind.compare(self.contents, self.kind.read(self.obj))

    def is_changed(self) -> bool:
        return any(True for _ in self.differences())


class ClassAndDict(NamedTuple):
    """An object, and its class and its `__dict__` when the state was saved.

    The contents of the dict are a separate `Record`. The empty dict of a tensor has no record.
    """

    obj: Any
    cls: type
    attributes: dict[str, Any] | None
    is_bare: bool  # a tensor without attributes
    path: StatePath

    def changed(self) -> Iterator[Record]:
        """Yield records of the class and the dict, if they were replaced since, or if an empty dict was filled."""
        if type(self.obj) is not self.cls:
            yield Record(self.obj, TYPE, {"__class__": self.cls}, self.path)
        if attributes_of(self.obj) is not self.attributes:
            yield Record(self.obj, DICT_OF, {"__dict__": self.attributes}, self.path)
        if self.is_bare and self.attributes and not self.attributes.keys() <= _OF_TORCH:
            of_torch = {name: value for name, value in self.attributes.items() if name in _OF_TORCH}
            yield Record(self.attributes, ATTRIBUTES, of_torch, self.path)


class EmptyContainers(NamedTuple):
    """The dicts and sets of a module that were empty when the state was saved, such as its tables of hooks."""

    names: Sequence[str]
    containers: Sequence[dict | set]
    path: StatePath  # of the module

    def filled(self) -> Iterator[Record]:
        """Yield records of the containers that are no longer empty."""
        for name, container in zip(self.names, self.containers, strict=True):
            if container:
                kind = SET if isinstance(container, set) else kind_of_dict(container)
                yield Record(container, kind, type(container)(), StatePath(self.path, "attribute", name))


class IteratorPosition(NamedTuple):
    """An iterator and its position when the state was saved."""

    iterator: Any
    position: Any
    copy: Any  # None where it cannot be copied
    path: StatePath
