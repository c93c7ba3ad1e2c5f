"""Gradients of the gradients of custom operators, by torch's autograd."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def as_variable(x: torch.Tensor) -> torch.Tensor:
    """Return a new tensor equal to `x` that requires a gradient: a view if `x` requires one, else a new leaf."""
    return x.view_as(x) if x.requires_grad else x.detach().requires_grad_()


def differentiable_gradients(
    results: Sequence[torch.Tensor], by: Sequence[torch.Tensor], cotangents: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """Return gradients of `results` that can be differentiated; zeros for a tensor on which they do not depend.

    Args:
        results: the differentiated tensors.
        by: the tensors with respect to which they are differentiated.
        cotangents: one for each result.
    """
    return torch.autograd.grad(results, by, cotangents, create_graph=True, allow_unused=True, materialize_grads=True)


def second_gradients(
    results: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor], seconds: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """Differentiate the gradients of `results` with respect to their arguments once more, with respect to all leaves.

    Args:
        results: functions of the arguments.
        leaves: the cotangent of each result, then the arguments.
        seconds: the cotangents of the gradients of the arguments.
    """
    arguments = leaves[len(results) :]
    gradients = differentiable_gradients(results, arguments, leaves[: len(results)])
    return differentiable_gradients(gradients, leaves, seconds)
