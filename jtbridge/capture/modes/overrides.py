"""Modes that replace functions of torch while tracing, because torch's own graphs of them are long or impossible."""

from __future__ import annotations

import collections
import inspect
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from jtbridge._compat import FakeTensor, thread_in_forward_mode
from jtbridge.capture.rewrites import REPLACEMENTS
from jtbridge.capture.rewrites.indexing import CopiedViews

_SIGNATURES = {ours: inspect.signature(ours) for ours in REPLACEMENTS.values()}


def _takes(ours: Any, args: Any, kwargs: Any) -> bool:
    """Return whether a replacement accepts the arguments: torch has several overloads of most functions."""
    try:
        _SIGNATURES[ours].bind(*args, **kwargs)
    except TypeError:
        return False
    return True


class OverrideMode(TorchFunctionMode):
    """Replaces the functions of torch in `rewrites.REPLACEMENTS`, for the overloads that a replacement accepts."""

    def __init__(self) -> None:
        super().__init__()
        self._views = CopiedViews()

    def __enter__(self) -> Any:
        self._views.__enter__()
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._views.__exit__(*exception)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        ours = REPLACEMENTS.get(func)
        # Forward mode takes the tangents of jtbridge's operators for 0.
        if ours is not None and _takes(ours, args, kwargs) and not thread_in_forward_mode():
            found = ours(*args, **kwargs)
            if found is not NotImplemented:
                return found
        return func(*args, **kwargs)


class CopiedTensors(TorchFunctionMode):
    """Makes ``copy.deepcopy`` clone a fake leaf tensor, instead of copying everything that torch stores with it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__deepcopy__ and isinstance(args[0], FakeTensor) and args[0].is_leaf:
            tensor, memo = args
            if id(tensor) not in memo:
                memo[id(tensor)] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
            return memo[id(tensor)]
        return func(*args, **(kwargs or {}))


class HooksWithoutGradient(TorchFunctionMode):
    """Ignores the hooks of a tensor without a gradient, and `retain_grad`, which torch refuses for such a tensor.

    A function that JAX differentiates is first traced for its types and its value, where no tensor has a gradient.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _OF_GRADIENTS and not args[0].requires_grad:
            return None if func is torch.Tensor.retain_grad else RemovableHandle(collections.OrderedDict())
        return func(*args, **(kwargs or {}))


_OF_GRADIENTS = (
    torch.Tensor.register_hook,
    torch.Tensor.register_post_accumulate_grad_hook,
    torch.Tensor.retain_grad,
)
