"""The modules and tensors that a function closes over."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch

from jtbridge.core.closures import closure_contents
from jtbridge.core.partials import PartialCall
from jtbridge.state import PoisonTensor


def closed_over_modules(fn: Callable) -> list[torch.nn.Module]:
    """Return the modules among a function, the object of a method, its closure and the globals it names."""
    return [value for value in closed_over_values(fn) if isinstance(value, torch.nn.Module)]


def device_closed_over(fn: Callable) -> str:
    """Return "cuda" if a function closes over a tensor on a GPU, directly or in a module; otherwise "cpu"."""
    tensors: list[torch.Tensor] = []
    for value in closed_over_values(fn):
        tensors += [value] if isinstance(value, torch.Tensor) else [*value.parameters(), *value.buffers()]
    return "cuda" if any(tensor.is_cuda for tensor in tensors if not isinstance(tensor, PoisonTensor)) else "cpu"


def closed_over_values(fn: Callable) -> list[torch.nn.Module | torch.Tensor]:
    """Return the modules and tensors among a function, the object of a method, its closure and the globals it names.

    For a ``functools.partial``, return those of its function and those among its fixed arguments.
    """
    if isinstance(fn, PartialCall):
        function, args, keywords = fn.parts()
        return [*closed_over_values(function), *filter(_is_closed_over, (*args, *keywords.values()))]
    code = getattr(fn, "__code__", None)
    scope = getattr(fn, "__globals__", {})
    found = [fn, getattr(fn, "__self__", None)]
    found += [scope.get(name) for name in (code.co_names if isinstance(code, types.CodeType) else ())]
    return [*filter(_is_closed_over, [*found, *closure_contents(fn)])]


def _is_closed_over(value: Any) -> bool:
    return isinstance(value, torch.nn.Module | torch.Tensor)
