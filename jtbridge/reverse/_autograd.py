"""The derivatives of a call of a JAX function, which are calls of derived JAX functions.

The backward calls the same operator with the function that `jax.vjp` derives, and the forward derivative with that of
`jax.jvp`. So a derivative can be differentiated again, to any order. While nothing can differentiate the backward, it
uses residuals of the forward, which then runs once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from jtbridge._compat import (
    SingleLevelFunction,
    functorch_depth,
    in_forward_mode,
    is_transforming,
    outside_dynamo,
    recording_outer_levels,
)
from jtbridge.core.positions import replaced

from ._jax_function import JaxFunction, Types, inexact_positions, is_inexact
from ._residuals import Layout, NoPullbackError, with_residuals
from ._tensors import runs_program

_FIRST = 4  # the position of the first tensor among the arguments of `Differentiated.apply`


class Differentiated(SingleLevelFunction):
    """A call of a JAX function, as a node of torch's autograd graph."""

    @staticmethod
    @outside_dynamo
    def forward(
        ctx: Any,
        function: JaxFunction,
        below: Callable[[JaxFunction], list[torch.Tensor]],
        call: Callable[..., list[torch.Tensor]],
        types: Types,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """Run the function. Save the residuals of its gradient if nothing can differentiate this gradient."""
        ctx.set_materialize_grads(False)
        ctx.function, ctx.call, ctx.types = function, call, types
        wrt = tuple(i for i, x in enumerate(tensors) if ctx.needs_input_grad[_FIRST + i] and is_inexact(x))
        ctx.wrt, ctx.layout, saved = wrt, None, []
        with recording_outer_levels():
            if wrt and _runs_now(tensors):
                results, ctx.layout = _run_with_residuals(function, wrt, types, below)
            else:
                # Here something may differentiate the gradient.
                twice = wrt and function.has_own_gradient and functorch_depth() > 1
                results = below(function.under_gradient(wrt) if twice else function)
        if ctx.layout is not None:
            count = len(ctx.layout.result_types)
            results, residuals = results[:count], results[count:]
            saved = _tensors_to_save(ctx.layout, results, residuals)
        ctx.save_for_backward(*tensors, *saved)
        ctx.save_for_forward(*tensors)
        ctx.mark_non_differentiable(*[x for x in results if not is_inexact(x)])
        return tuple(results)

    @staticmethod
    @outside_dynamo
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> tuple[Any, ...]:
        """Return the gradients, from residuals or by a function that can be differentiated again."""
        found: list[Any] = [None] * (_FIRST + len(ctx.types))
        outs = tuple(i for i, x in enumerate(cotangents) if x is not None)
        if not outs or not ctx.wrt:
            return tuple(found)
        saved = ctx.saved_tensors  # torch raises here if an argument was written to, or the graph was freed
        tensors, kept = list(saved[: len(ctx.types)]), iter(saved[len(ctx.types) :])
        given = [cotangents[i] for i in outs]
        layout = ctx.layout
        if layout is None or layout.tree is None or torch.is_grad_enabled():
            function = ctx.function if layout is None else layout.function
            gradients = ctx.call(function.vjp(ctx.wrt, outs), [*tensors, *given])
        else:
            residuals = [tensors[i] if kind == "argument" else next(kept) for kind, i in layout.kept]
            gradients = ctx.call(layout.pullback(outs), [*residuals, *given])
        for i, gradient in zip(ctx.wrt, gradients, strict=True):
            found[_FIRST + i] = gradient
        return tuple(found)

    @staticmethod
    @outside_dynamo
    def jvp(ctx: Any, *given: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Return the tangents of the results."""
        tangents = given[_FIRST:]
        wrt = tuple(i for i, x in enumerate(tangents) if x is not None)
        types = ctx.function.result_types(ctx.types)
        outs = inexact_positions(types)
        found: list[torch.Tensor | None] = [None] * len(types)
        if wrt and outs:
            derivative = ctx.function.jvp(wrt, outs)
            results = ctx.call(derivative, [*ctx.saved_tensors, *[tangents[i] for i in wrt]])
            found = replaced(found, outs, results)
        return tuple(found)


def _run_with_residuals(
    function: JaxFunction, wrt: tuple[int, ...], types: Types, below: Callable[[JaxFunction], list[torch.Tensor]]
) -> tuple[list[torch.Tensor], Layout]:
    """Return results and residuals, and their layout.

    If JAX cannot differentiate with respect to `wrt`, there are no residuals.
    """
    forward = with_residuals(function, wrt)
    if types not in forward.refused:
        try:
            return below(forward), forward.last_layout()
        except NoPullbackError:
            forward.refused.add(types)
    plain = with_residuals(function, ())  # the backward raises JAX's error, if there is a backward
    return below(plain), plain.last_layout()


def _runs_now(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether the function runs on values, and nothing can differentiate its first gradient.

    A graph that is traced must not depend on the residuals of one trace of JAX. Without jit there are no residuals.
    """
    return not is_transforming() and not in_forward_mode() and runs_program(tensors)


def _tensors_to_save(
    layout: Layout, results: Sequence[torch.Tensor], residuals: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Return the tensors to save in addition to the arguments, in the order of the residuals."""
    return [(results if kind == "result" else residuals)[i] for kind, i in layout.kept if kind != "argument"]
