"""Imports of libraries that import torchvision but do not use it in the tests.

torchvision is not installed: transformers uses it wherever it finds it. It finds timm too, which it cannot import
without torchvision, so timm is in a folder of its own.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import pathlib
import sys
import types
from collections.abc import Iterator
from typing import Any

_MISSING = "torchvision"


@contextlib.contextmanager
def torchvision_placeholders() -> Iterator[None]:
    """Import every module of torchvision as an empty one, whose attributes are empty classes, and forget them after."""
    finder, folder = _Finder(), str(pathlib.Path(sys.prefix, "timm"))
    sys.path.append(folder)
    sys.meta_path.append(finder)  # an installed torchvision comes first
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        sys.path.remove(folder)
        for name in placeholders():
            del sys.modules[name]


def placeholders() -> list[str]:
    """Return the names of the imported modules that are placeholders."""
    return [name for name, module in sys.modules.items() if isinstance(getattr(module, "__loader__", None), _Finder)]


class _Placeholder(type):
    """The class of placeholder classes: each public attribute is a new placeholder, so members of an enum differ."""

    def __getattr__(cls, name: str) -> Any:
        return _placeholder(name)


def _placeholder(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Placeholder(name, (), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds and makes the placeholder modules."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] != _MISSING:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__getattr__ = _placeholder  # type: ignore[method-assign]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass
