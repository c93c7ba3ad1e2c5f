"""NVIDIA's mathematical library for the interpreter, in torch; Triton's interpreter has none of it."""

from __future__ import annotations

import types
from typing import Any

import torch

# Functions of libdevice that torch has under another name.
_NAMES = {"fabs": "abs", "rint": "round", "fast_expf": "exp", "fast_logf": "log", "fast_tanhf": "tanh"}


def interpreted_library(value: Any) -> Any:
    """`value`; a function of libdevice, or the whole module, as what computes the same in the interpreter."""
    if isinstance(value, types.ModuleType) and value.__name__.endswith("libdevice"):
        return _Library(value)
    if getattr(value, "__module__", "").endswith("libdevice") and callable(value):
        return _function(value.__name__)
    return value


class _Library:
    def __init__(self, module: types.ModuleType):
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return interpreted_library(getattr(self._module, name))


def _function(name: str) -> Any:
    theirs = getattr(torch, _NAMES.get(name, name), None)

    def call(*args: Any) -> Any:
        import triton.language as tl
        from triton.runtime.interpreter import TensorHandle

        if theirs is None:
            raise NotImplementedError(f"libdevice.{name} cannot be interpreted on a CPU")
        values = [torch.from_numpy(x.handle.data) if isinstance(x, tl.tensor) else torch.tensor(x) for x in args]
        found = theirs(*values).numpy()
        first: Any = next(x for x in args if isinstance(x, tl.tensor))
        return tl.tensor(TensorHandle(found, first.dtype.scalar), first.type)

    return call
