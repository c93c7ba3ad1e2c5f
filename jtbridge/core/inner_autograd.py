"""Calls of torch's autograd inside a function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from jtbridge._compat import BACKWARD_HOOKS
from jtbridge.errors import DifferentiationError

# Functions and attributes through which hooks may be added to the graph of autograd. `grad_fn` returns a node of the
# graph, to which hooks can be added too.
HOOKING: frozenset[Any] = frozenset(
    {
        torch.Tensor.register_hook,
        torch.Tensor.register_post_accumulate_grad_hook,
        torch.Tensor.grad_fn.__get__,  # type: ignore[attr-defined]
        *BACKWARD_HOOKS,
    }
)
# The functions that run autograd, each with the position of its argument `create_graph`.
_CALLS: dict[Callable[..., Any], int] = {
    torch.autograd.grad: 4,
    torch.autograd.backward: 3,
    torch.Tensor.backward: 3,
}


def runs_autograd(fn: Callable[..., Any]) -> bool:
    """Return whether a torch function runs autograd on the graph that was recorded so far."""
    return fn in _CALLS


def runs_backward(fn: Callable[..., Any]) -> bool:
    """Return whether a torch function runs autograd and stores gradients in ``.grad``."""
    return fn in _CALLS and fn is not torch.autograd.grad


def creates_graph(fn: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> bool:
    """Return whether a call of a function that runs autograd has ``create_graph=True``."""
    position = _CALLS[fn]
    return bool(kwargs.get("create_graph", args[position] if len(args) > position else False))


def refuse_broken_graph(name: str, results: Sequence[torch.Tensor]) -> None:
    """Raise for a result that has no derivative, because torch computed it without ``create_graph=True``.

    Args:
        name: the name of a function that runs autograd without ``create_graph=True``.
        results: its results, of inputs that require a gradient.
    """
    for position, result in enumerate(results):
        if (result.is_floating_point() or result.is_complex()) and not result.requires_grad:
            raise DifferentiationError(
                f"Result {position} of `{name}` comes from torch.autograd.grad or backward without "
                "`create_graph=True`, so torch has no derivative of it. Pass `create_graph=True` there; or, if no "
                "gradient is wanted, apply `jax.lax.stop_gradient` to the arguments of the call."
            )
