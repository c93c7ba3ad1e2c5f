"""Gradients through ``torch.utils.checkpoint(..., use_reentrant=True)`` by ``torch.autograd.grad``.

Tried on torch 2.13. The backward of a reentrant checkpoint runs ``torch.autograd.backward``, refuses
``torch.autograd.grad`` with inputs, and has no second derivative. There is no public way to replace the backward of an
existing node: the class whose backward the node calls is a private attribute of the node.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.checkpoint import set_device_states

from ._draws import EarlierDraws, draw_source, drawing_from
from ._torch import graph_nodes

Gradients = list[torch.Tensor | None]


def reentrant_checkpoints(results: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> Gradients:
    """Make the reentrant checkpoints in the graph of some results differentiable by ``torch.autograd.grad``.

    Args:
        results: tensors whose autograd graph is changed. The tensors themselves are not.
        inputs: tensors with respect to which the results will be differentiated.

    Returns:
        A list that is filled while the graph is differentiated: for each input, its gradient from checkpointed
        functions that close over the input instead of taking it as an argument. The caller adds it to the gradient.
    """
    extra: Gradients = [None] * len(inputs)
    for node in _checkpoints(results):
        node._forward_cls = _ByGrad
        node.closed_over, node.extra = tuple(inputs), extra
    return extra


def _checkpoints(results: Sequence[torch.Tensor]) -> list[Any]:
    def name(node: Any) -> str:
        return getattr(getattr(type(node), "_forward_cls", None), "__name__", "")

    return [node for node in graph_nodes(results) if name(node) == "CheckpointFunction"]


class _ByGrad(torch.autograd.Function):
    """A backward for `torch.utils.checkpoint.CheckpointFunction` that can be differentiated again."""

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> tuple[Any, ...]:
        again = torch.is_grad_enabled()
        arguments = list(ctx.inputs)
        gate = _Gate()
        for position, tensor in zip(ctx.tensor_indices, ctx.saved_tensors, strict=True):
            if again and tensor.requires_grad:
                arguments[position] = _Gated.apply(tensor, gate)
            else:
                arguments[position] = tensor.detach().requires_grad_(tensor.requires_grad)
        results = _run_again(ctx, arguments)
        pairs = [
            (result, ct)
            for result, ct in zip(results, cotangents, strict=True)
            if isinstance(result, torch.Tensor) and result.requires_grad and ct is not None
        ]
        differentiated = [x for x in arguments if isinstance(x, torch.Tensor) and x.requires_grad]
        grads: list[Any] = [None] * (len(differentiated) + len(ctx.closed_over))
        if pairs:
            nested = reentrant_checkpoints([result for result, _ in pairs], ctx.closed_over)
            found = torch.autograd.grad(
                [result for result, _ in pairs],
                [*differentiated, *ctx.closed_over],
                [ct for _, ct in pairs],
                create_graph=again,
                allow_unused=True,
            )
            gate.is_open = True
            grads = [*found[: len(differentiated)], *map(_added, found[len(differentiated) :], nested)]
        ctx.extra[:] = map(_added, ctx.extra, grads[len(differentiated) :])
        of_differentiated = iter(grads)
        found_by_argument = (
            next(of_differentiated) if isinstance(x, torch.Tensor) and x.requires_grad else None for x in arguments
        )
        return None, None, *found_by_argument


class _Gate:
    """A switch that decides whether gradients pass from the arguments of a rerun function to the original tensors."""

    is_open = False


class _Gated(torch.autograd.Function):
    """The identity on an argument. Its backward passes no gradient until the gate is open.

    The gate opens when the gradient of the rerun function has been computed. Otherwise a tensor that is both an
    argument and closed over would get the gradient of the argument twice.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, gate: _Gate) -> torch.Tensor:
        ctx.gate = gate
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> tuple[torch.Tensor | None, None]:  # type: ignore[override]
        return (cotangent if ctx.gate.is_open else None), None


def _run_again(ctx: Any, arguments: Sequence[Any]) -> tuple[Any, ...]:
    """Run the checkpointed function under the random state and the autocast settings of its forward."""
    with contextlib.ExitStack() as stack:
        if ctx.preserve_rng_state:
            gpus, states = (ctx.fwd_devices, ctx.fwd_device_states) if ctx.had_device_in_fwd else ([], [])
            if draw_source() is None:  # the default generators, which other threads draw from, stay as they are
                on_gpus = {torch.device("cuda", gpu): state for gpu, state in zip(gpus, states, strict=True)}
                stack.enter_context(drawing_from(EarlierDraws(ctx.fwd_cpu_state, on_gpus)))
            else:
                stack.enter_context(torch.random.fork_rng(devices=gpus))
                torch.set_rng_state(ctx.fwd_cpu_state)
                set_device_states(gpus, states, device_type="cuda")
        if ctx.device_autocast_kwargs is not None:
            stack.enter_context(torch.amp.autocast(ctx.device_type, **ctx.device_autocast_kwargs))
        stack.enter_context(torch.amp.autocast("cpu", **ctx.cpu_autocast_kwargs))
        stack.enter_context(torch.enable_grad())
        results = ctx.run_function(*arguments)
    return (results,) if isinstance(results, torch.Tensor) else tuple(results)


def _added(a: torch.Tensor | None, b: torch.Tensor | None) -> torch.Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return a + b
