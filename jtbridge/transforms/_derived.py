"""The base of derived functions, and helpers that several kinds of them use."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence

import torch

from jtbridge.core.array_types import Tensors
from jtbridge.core.functions import TorchFunction, TracedFunction
from jtbridge.core.torch_state import TorchState
from jtbridge.errors import DifferentiationError

from ._composite import CompositeNorms


@dataclasses.dataclass(frozen=True)
class Derived(TorchFunction):
    fn: TorchFunction

    @property
    def base(self) -> TracedFunction:
        return self.fn.base

    @property
    def state(self) -> TorchState:
        return self.base.trace_state.differentiable()

    @property
    def order(self) -> int:
        return self.fn.order + 1


def differentiable_norms(fn: TorchFunction) -> contextlib.AbstractContextManager:
    """Write normalisations out inside the block, if `fn` is a derivative beyond the first."""
    needed = fn.order > 1 and fn.base.traits.autograd.fused_norm is not None
    return CompositeNorms() if needed else contextlib.nullcontext()


def refuse_once_differentiable(traced: TracedFunction, order: int) -> None:
    """Raise if torch has no second derivative, for which it would give zeros."""
    name = traced.cache.once_differentiable
    if name is not None and order > 1:
        raise DifferentiationError(
            f"`{traced.name}` uses the autograd.Function `{name}`, whose backward is once_differentiable, so torch "
            "has its gradient alone: no second derivative, and no forward mode, which takes two reverse modes here. "
            "Write the backward with differentiable operators, or give the Function a `jvp`."
        )


def of_differentiated(
    fn: TorchFunction, wrt: Sequence[int], outs: Sequence[int], primals: Tensors
) -> Callable[..., Tensors]:
    """Return the function from the inputs `wrt` to the outputs `outs`, with the other inputs fixed."""

    def of_wrt(*differentiated: torch.Tensor) -> Tensors:
        inputs = list(primals)
        for i, x in zip(wrt, differentiated, strict=True):
            inputs[i] = x
        results = fn(*inputs)
        return tuple(results[o] for o in outs)

    return of_wrt


def conjugate(tensor: torch.Tensor) -> torch.Tensor:
    """Convert a gradient between torch's and JAX's convention for complex numbers; real tensors stay as they are."""
    return tensor.conj() if tensor.is_complex() else tensor
