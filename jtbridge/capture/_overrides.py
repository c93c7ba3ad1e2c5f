"""Functions of torch that are traced as operators of ours, for torch's own graphs of them are long or impossible."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from jtbridge._compat import FakeTensor, in_forward_mode

from . import _ctc, _indexing, _one_hot, _packed, _recurrent, _truth

_REPLACEMENTS = {
    **_recurrent.REPLACEMENTS,
    **_packed.REPLACEMENTS,
    **_indexing.REPLACEMENTS,
    **_one_hot.REPLACEMENTS,
    **_ctc.REPLACEMENTS,
    **_truth.REPLACEMENTS,
}
_SIGNATURES = {ours: inspect.signature(ours) for ours in _REPLACEMENTS.values()}


def _takes(ours: Any, args: Any, kwargs: Any) -> bool:
    """Whether the arguments are among those that we have the function for; torch has overloads of most."""
    try:
        _SIGNATURES[ours].bind(*args, **kwargs)
    except TypeError:
        return False
    return True


class OverrideMode(TorchFunctionMode):
    """While it is active, those functions are ours where we have them."""

    def __init__(self) -> None:
        super().__init__()
        self._views = _indexing.CopiedViews()

    def __enter__(self) -> Any:
        self._views.__enter__()
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._views.__exit__(*exception)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        ours = _REPLACEMENTS.get(func)
        # Forward mode takes the tangents of our operators for 0.
        if ours is not None and _takes(ours, args, kwargs) and not in_forward_mode():
            found = ours(*args, **kwargs)
            if found is not NotImplemented:
                return found
        return func(*args, **kwargs)


class CopiedTensors(TorchFunctionMode):
    """While it is active, ``copy.deepcopy`` copies a tensor without values, instead of all that torch keeps of it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__deepcopy__ and isinstance(args[0], FakeTensor) and args[0].is_leaf:
            tensor, memo = args
            if id(tensor) not in memo:
                memo[id(tensor)] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
            return memo[id(tensor)]
        return func(*args, **(kwargs or {}))
