"""Gradients of the gradients of custom operators, by torch's autograd."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def as_variable(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor equal to `x` to differentiate by, in the graph of `x` if `x` requires a gradient."""
    return x.view_as(x) if x.requires_grad else x.detach().requires_grad_()


def gradients(
    results: Sequence[torch.Tensor], by: Sequence[torch.Tensor], cotangents: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """Return the gradients of `results` by other tensors, which can be differentiated; zeros if they do not depend."""
    return torch.autograd.grad(results, by, cotangents, create_graph=True, allow_unused=True, materialize_grads=True)


def second_gradients(
    results: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor], seconds: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """Return the gradients, by all leaves, of the gradients of `results` by their arguments.

    Args:
        results: functions of the arguments.
        leaves: the cotangent of each result, then the arguments.
        seconds: the cotangents of the gradients of the arguments.
    """
    arguments = leaves[len(results) :]
    return gradients(gradients(results, arguments, leaves[: len(results)]), leaves, seconds)
