"""The mode in which a function runs while torch's autograd records it."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from jtbridge._compat import inside_functorch
from jtbridge.core.inner_autograd import HOOKING, creates_graph, runs_autograd, runs_backward
from jtbridge.core.leaf_arguments import LeafArguments
from jtbridge.transforms import PADDED, WITHOUT_DOUBLE_BACKWARD, with_differentiable_statistics


def _with_shared_gradient(
    x: torch.Tensor, found: torch.Tensor, chosen: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Return a reduction that selects one element, and divide its gradient among equal elements. NaN equals NaN.

    Args:
        x: the elements.
        found: the result, without a gradient.
        chosen: computes the result by `amax` or `amin`, which divide a gradient among equal numbers, not among NaNs.
    """
    if not x.is_floating_point():
        return found
    nan = x.isnan()
    of_nan = torch.where(nan, x, 0.0).sum() / nan.sum().clamp(min=1)
    return torch.where(found.isnan(), of_nan, chosen(torch.where(nan, 0.0, x)))


def _median_of_all(x: torch.Tensor, median: Callable[..., torch.Tensor]) -> torch.Tensor:
    if not x.numel():
        return median(x)
    found = median(x.detach().reshape(-1), 0)[0]
    equal = x == found

    def chosen(x: torch.Tensor) -> torch.Tensor:
        largest, smallest = torch.where(equal, x, -math.inf).amax(), torch.where(equal, x, math.inf).amin()
        return torch.where(found < 0, smallest, largest)

    return _with_shared_gradient(x, found, chosen)


def _forms(name: str) -> tuple[Callable[..., Any], ...]:
    """Return the callables of a torch operator: function, method, overload packet and default overload."""
    packet = getattr(torch.ops.aten, name)
    return getattr(torch, name), getattr(torch.Tensor, name), packet, packet.default


# Under torch.vmap these become reductions over one axis, whose gradient goes to one of several equal elements.
_OF_ALL: dict[Callable[..., Any], Callable[[torch.Tensor], torch.Tensor]] = {
    **dict.fromkeys(_forms("max"), lambda x: _with_shared_gradient(x, x.detach().amax(), torch.amax)),
    **dict.fromkeys(_forms("min"), lambda x: _with_shared_gradient(x, x.detach().amin(), torch.amin)),
    **dict.fromkeys(_forms("median"), lambda x: _median_of_all(x, torch.median)),
    **dict.fromkeys(_forms("nanmedian"), lambda x: _median_of_all(x, torch.nanmedian)),
}


class _RecordedRun(threading.local):
    """The run of this thread that autograd records."""

    run: InnerAutograd | None = None


_HERE = _RecordedRun()


def add_leaf_arguments(arguments: Sequence[torch.Tensor]) -> None:
    """Tell the run of this thread, if there is one, which arguments its function gets."""
    if _HERE.run is not None:
        _HERE.run.arguments.add(arguments)


class InnerAutograd(TorchFunctionMode):
    """A mode for a run that autograd records, which detects calls of torch.autograd.grad and backward.

    The mode also replaces functions. Under torch.vmap it replaces reductions of all elements, and embeddings with a row
    for padding, whose gradients differ there. It replaces batch_norm where torch refuses running statistics that
    require a gradient, and functions whose backward torch cannot differentiate.

    To the function, its arguments are leaves of torch's graph, as in a plain call. They are not, because the function
    may write to them, so the mode answers for them what torch answers for leaves.

    Attributes:
        arguments: the arguments of the function that require a gradient; of each row, where rows run one by one.
        breaks_graph: whether one of these calls had no ``create_graph=True``, so that torch has no derivative of its
            result.
        has_hooks: whether a hook of a tensor, or of a node of the graph, may have been registered.
        runs_backward: whether backward was called, which also stores gradients in the leaves of the run.
    """

    def __init__(self) -> None:
        super().__init__()
        self.arguments = LeafArguments()
        self.breaks_graph = False
        self.has_hooks = False
        self.runs_backward = False

    def __enter__(self) -> InnerAutograd:
        self._outer, _HERE.run = _HERE.run, self
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        _HERE.run = self._outer
        super().__exit__(*raised)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self.arguments.answer_to(func, args):
            return self.arguments.answer(func, args, kwargs)
        if func in _OF_ALL and inside_functorch() and len(operands := [*args, *kwargs.values()]) == 1:
            (x,) = operands  # by name too: `torch.max(input=x)`
            return _OF_ALL[func](x) if x.dim() else func(x)
        if func in PADDED and inside_functorch():
            return PADDED[func](*args, **kwargs)
        self.has_hooks |= func in HOOKING
        if runs_autograd(func):
            self.breaks_graph |= not creates_graph(func, args, kwargs)
            if runs_backward(func):
                self.runs_backward = True
                with self.arguments.storing_gradients():
                    return func(*args, **kwargs)
        return with_differentiable_statistics(WITHOUT_DOUBLE_BACKWARD.get(func, func), args, kwargs)
