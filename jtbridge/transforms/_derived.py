"""The base of derived functions, and helpers that several kinds of them use."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

import torch

from jtbridge._compat import (
    FakeTensor,
    detached_backwards,
    has_lost_gradient,
    innermost,
    wrong_batching_reason,
)
from jtbridge.core.functions import TorchFunction, TracedFunction
from jtbridge.core.torch_state import TorchState
from jtbridge.errors import DifferentiationError

from ._composite import COMPOSITE, WITHOUT_FORWARD_MODE, ReplacementMode


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
    """Return a context that replaces fused functions which torch does not differentiate as often as `fn` needs."""
    if fn.base.traits.autograd.fused_norm is None:
        return contextlib.nullcontext()
    return ReplacementMode(COMPOSITE if fn.order > 1 else WITHOUT_FORWARD_MODE)


def refuse_once_differentiable(traced: TracedFunction, order: int) -> None:
    """Raise if a second derivative is needed that torch does not have: torch would return zeros for it."""
    name = traced.cache.once_differentiable
    if name is not None and order > 1:
        raise once_differentiable_error(traced.name, name)


def once_differentiable_error(name: str, function: str | None = None) -> DifferentiationError:
    """Return the error for a derivative that torch lacks, because a backward is marked `once_differentiable`.

    Args:
        name: the name of the user's function.
        function: the name of the `autograd.Function` with this backward, if it is known.
    """
    used = "an autograd.Function" if function is None else f"the autograd.Function `{function}`,"
    other_way = "" if function is None else ", or give the Function a `jvp`"
    return DifferentiationError(
        f"`{name}` uses {used} whose backward is once_differentiable, so torch has only its gradient: no second "
        "derivative, and no forward mode, which takes two reverse modes here. Write the backward with differentiable "
        f"operators{other_way}."
    )


class DetachedBackwardError(DifferentiationError):
    """A gradient cannot be differentiated, because a backward computes it outside autograd."""


class UntraceableBackwardError(RuntimeError):
    """A backward may compute outside autograd. Only real values show whether it does, and a trace has none."""


@contextlib.contextmanager
def refused_detached_backwards(name: str, results: Sequence[torch.Tensor]) -> Iterator[None]:
    """Raise after the block if it computed gradients whose derivative torch would silently treat as zero.

    Args:
        name: the name of the function, for the message.
        results: tensors that are differentiated inside the block.

    Raises:
        DetachedBackwardError: a backward of an autograd.Function, or of a sparse tensor, computed outside autograd.
        UntraceableBackwardError: a backward returned a detached fake gradient, which might be zero on real values.
    """
    with detached_backwards(results) as found:
        yield
    if not found:
        return
    node, is_function = found[0]
    if is_function:
        text = (
            f"`{name}` uses the autograd.Function `{node}`, whose backward computes gradients outside autograd, as "
            "with NumPy or `detach`: torch has only its gradient, no second derivative. Write the backward with "
            "differentiable operators of the cotangents."
        )
    else:
        text = (
            f"`{name}` uses a sparse tensor whose gradient torch cannot differentiate (`{node}`): it has no second "
            "derivative, and torch would return zeros. Compute with dense tensors, for example by `index_add`."
        )
    in_trace = any(isinstance(innermost(result), FakeTensor) for result in results)
    raise (UntraceableBackwardError if in_trace else DetachedBackwardError)(text)


def refuse_lost_gradients(name: str, tensors: Sequence[torch.Tensor]) -> None:
    """Raise if torch would silently treat the derivative of an operator as zero.

    Args:
        name: the name of the function, for the message.
        tensors: its results or gradients, with the autograd graph that is differentiated.

    Raises:
        DetachedBackwardError: an operator in the graph has no kernel for autograd.
        UntraceableBackwardError: an operator has no such kernel for fake tensors. On real values, autograd may see
            inside the operator.
    """
    if not has_lost_gradient(tensors):
        return
    in_trace = any(isinstance(innermost(tensor), FakeTensor) for tensor in tensors)
    raise (UntraceableBackwardError if in_trace else DetachedBackwardError)(
        f"`{name}`, or a backward in it, uses an operator without a derivative, which torch would treat as zero: "
        "no kernel of the operator is registered for autograd. The warning of `torch.autograd.grad`, called in torch, "
        "names the operator. Give it a derivative by `torch.library.register_autograd`. If no gradient is wanted, call "
        "the operator under `torch.no_grad()`."
    )


def refuse_wrong_batches(tensors: Sequence[torch.Tensor], *, again: bool = False) -> None:
    """Raise if torch.vmap is running, and would differentiate the graph of some tensors wrongly.

    Args:
        tensors: the results whose graph is differentiated.
        again: whether the gradients will be differentiated too.

    Raises:
        NotImplementedError: the caller must differentiate the rows one after another.
    """
    reason = wrong_batching_reason(tensors, again=again)
    if reason is not None:
        raise NotImplementedError(reason)


def conjugate(tensor: torch.Tensor) -> torch.Tensor:
    """Convert a gradient between torch's and JAX's convention for complex numbers; real tensors stay as they are."""
    return tensor.conj() if tensor.is_complex() else tensor
