"""Modes that replace functions of torch while tracing, because torch's own graphs of them are long or impossible."""

from __future__ import annotations

import collections
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from jtbridge._compat import FakeTensor, innermost, storage_id, thread_in_forward_mode
from jtbridge.capture.rewrites import REPLACEMENTS
from jtbridge.capture.rewrites.indexing import CopiedViews

_SIGNATURES = {ours: inspect.signature(ours) for ours in REPLACEMENTS.values()}


def _accepts_arguments(ours: Any, args: Any, kwargs: Any) -> bool:
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
        # Torch's forward mode treats the tangents of jtbridge's operators as 0.
        if ours is not None and _accepts_arguments(ours, args, kwargs) and not thread_in_forward_mode():
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


class AsOnRealTensors(TorchFunctionMode):
    """Replaces calls that have another result than in torch when they are captured or run on fake tensors.

    - The results of ``torch.unsafe_split`` and similar functions share memory with the argument, but in torch's graph
      they do not.
    - ``torch._foreach_mul_(xs, ys)`` and similar functions write to one tensor after another. Torch's graph reads all
      tensors first, which differs if they share memory.

    Raises:
        RuntimeError: ``Tensor.apply_``, ``map_`` and ``map2_`` call Python for each element. On a tensor without values
            they would end the process.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _BY_PYTHON and isinstance(args[0], FakeTensor):
            raise RuntimeError(f"`Tensor.{func.__name__}` calls Python for each element")
        if func in _UNSAFE:
            return _UNSAFE[func](*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name.startswith("_foreach_") and name.endswith("_") and _share_memory(args):
            count = len(args[0])
            for i in range(count):
                func(*([x[i]] if isinstance(x, list | tuple) and len(x) == count else x for x in args), **kwargs)
            return args[0]
        return func(*args, **kwargs)


def _share_memory(lists: Sequence[Any]) -> bool:
    """Return whether two of the tensors in some lists share memory."""
    tensors = [x for part in lists if isinstance(part, list | tuple) for x in part if isinstance(x, torch.Tensor)]
    dense = [x for x in tensors if x.layout is torch.strided]
    return len({storage_id(innermost(x)) for x in dense}) < len(dense)


_BY_PYTHON = (torch.Tensor.apply_, torch.Tensor.map_, torch.Tensor.map2_)
_UNSAFE = {
    torch.unsafe_split: torch.split,
    torch.Tensor.unsafe_split: torch.Tensor.split,
    torch.unsafe_chunk: torch.chunk,
    torch.Tensor.unsafe_chunk: torch.Tensor.chunk,
    torch.unsafe_split_with_sizes: torch.split,
    torch.Tensor.unsafe_split_with_sizes: torch.Tensor.split,
}


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
