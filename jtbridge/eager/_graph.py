"""The graph that torch's autograd records in an eager call, carried through JAX as the attribute of an array.

The token is a ``uint8[batch..., 0]`` array: a residual like any other for JAX, and freed with the pullback. A token
that went through `jit` or was indexed has lost the attribute; then the function is run again.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import torch

from jtbridge._compat import has_error_node, node_names, reentrant_checkpoints, run_backward
from jtbridge._functions import TorchFunction
from jtbridge._transforms import Vjp, Vmap, conjugate
from jtbridge.errors import DifferentiationError
from jtbridge.triton import intercepted_launches

from ._arrays import Placement
from ._function import EagerFunction


class AutogradGraph:
    """The inputs and results of a run whose graph was recorded.

    Attributes:
        inputs: a tensor for each input, leaves of the graph where it is differentiated.
        outputs: a tensor for each result.
        order: how often the function has been differentiated in this graph: 0 for a run of the function.
    """

    __slots__ = ("__weakref__", "inputs", "order", "outputs")

    def __init__(self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], order: int):
        self.inputs = list(inputs)
        self.outputs = list(outputs)
        self.order = order

    def pull(
        self,
        cotangents: Sequence[torch.Tensor],
        of: Vjp,
        extra_axes: Sequence[int],
        *,
        create_graph: bool,
    ) -> tuple[torch.Tensor, ...]:
        """``ct @ Df(x)`` for the inputs and outputs that `of` differentiates.

        Args:
            cotangents: one for each of those outputs.
            of: says by which inputs and of which outputs.
            extra_axes: the axes of a cotangent that this graph does not have: a batch of cotangents.
            create_graph: whether the result will be differentiated.

        Raises:
            DifferentiationError: torch has no derivative of a gradient that this graph computes.
        """
        inputs = [self.inputs[i] for i in of.wrt]
        pairs = [
            (self.outputs[o], ct.to(self.outputs[o].dtype))
            for o, ct in zip(of.outs, cotangents, strict=True)
            if self.outputs[o].requires_grad
        ]
        outputs = [y for y, _ in pairs]
        if self.order > 0:
            refuse_once_differentiable(outputs, of)

        def gradients(cts: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
            extra = reentrant_checkpoints(outputs, inputs)
            with intercepted_launches():  # a backward may launch Triton kernels
                found = run_backward(outputs, [conjugate(ct) for ct in cts], inputs, create_graph=create_graph)
            return [_sum_of(grad, other) for grad, other in zip(found, extra, strict=True)]

        cts = [ct for _, ct in pairs]
        if not pairs:
            grads: list[torch.Tensor | None] = [None] * len(inputs)
        elif extra_axes:
            grads = over_extra_axes(gradients, cts, extra_axes)
        else:
            grads = gradients(cts)
        sizes = [cotangents[0].shape[axis] for axis in extra_axes]
        return tuple(
            x.new_zeros(with_axes(x.shape, extra_axes, sizes)) if grad is None else conjugate(grad)
            for grad, x in zip(grads, inputs, strict=True)
        )


def _sum_of(*gradients: torch.Tensor | None) -> torch.Tensor | None:
    """The sum of those gradients that there are, dense as JAX has it: embeddings may have sparse ones."""
    found = [grad if grad.layout is torch.strided else grad.to_dense() for grad in gradients if grad is not None]
    return sum(found[1:], found[0]) if found else None


def refuse_once_differentiable(gradients: Sequence[torch.Tensor], of: TorchFunction) -> None:
    """Raise where torch would give zeros for the derivative of a gradient that it has once only."""
    if has_error_node(gradients):
        raise DifferentiationError(
            f"`{eager_function(of).name}` uses an autograd.Function whose backward is once_differentiable, so torch "
            "has its gradient alone: no second derivative, and no forward mode, which takes two reverse modes here. "
            "Write the backward with differentiable operators."
        )


def over_extra_axes(
    function: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor | None]],
    tensors: Sequence[torch.Tensor],
    axes: Sequence[int],
) -> list[torch.Tensor | None]:
    """A linear function over some axes of its arguments, which its results get at the same places.

    In one call by torch.vmap; row by row where torch has no batching rule.
    """
    sizes = [tensors[0].shape[axis] for axis in axes]
    count = math.prod(sizes)
    rows = [t.movedim(tuple(axes), tuple(range(len(axes)))) for t in tensors]
    rows = [t.reshape(count, *t.shape[len(axes) :]) for t in rows]
    used: list[bool] = []

    def some(*row: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = function(row)
        used[:] = [result is not None for result in found]
        return tuple(result for result in found if result is not None)

    try:
        columns = torch.func.vmap(some, randomness="same")(*rows) if count else ()
    except RuntimeError:
        columns = tuple(
            torch.stack(column) for column in zip(*(some(*(t[i] for t in rows)) for i in range(count)), strict=True)
        )
    if not count:
        return [None] * len(function([t.new_zeros(t.shape[1:]) for t in rows]))
    found = iter(columns)
    results: list[torch.Tensor | None] = []
    for is_used in used:
        if not is_used:
            results.append(None)
            continue
        column = next(found)
        column = column.reshape(*sizes, *column.shape[1:])
        results.append(column.movedim(tuple(range(len(axes))), tuple(axes)))
    return results


def with_axes(shape: Sequence[int], axes: Sequence[int], sizes: Sequence[int]) -> tuple[int, ...]:
    """A shape with further axes at some places of the result, in increasing order."""
    found = list(shape)
    for axis, size in zip(axes, sizes, strict=True):
        found.insert(axis, size)
    return tuple(found)


def token_for(graph: AutogradGraph, batch: tuple[int, ...]) -> jax.Array:
    """A new token that holds a graph."""
    token = Placement([]).empty((*batch, 0))
    token._jtbridge_graph = graph  # type: ignore[attr-defined]
    return token


def graph_in(token: Any) -> AutogradGraph | None:
    """The graph that a token holds; None if it has lost it, or if torch would give a wrong derivative by it.

    Torch takes the statistics that a normalisation has kept for constants in the third derivative.
    """
    graph = getattr(token, "_jtbridge_graph", None)
    if graph is not None and graph.order > 1 and _NORMS & {name[:-1] for name in node_names(graph.outputs)}:
        return None
    return graph


_NORMS = {
    f"{norm}Backward{twice}"
    for norm in ("NativeLayerNorm", "NativeBatchNorm", "NativeGroupNorm", "CudnnBatchNorm", "MiopenBatchNorm")
    for twice in ("", "Backward")
}


def innermost_vjp(fn: TorchFunction) -> Vjp:
    """The pullback that a batched pullback is made from."""
    while isinstance(fn, Vmap):
        fn = fn.fn
    assert isinstance(fn, Vjp)
    return fn


@contextlib.contextmanager
def recording() -> Iterator[None]:
    """Record the graph of autograd, whatever the caller has set for torch."""
    inference = torch.inference_mode(False) if torch.is_inference_mode_enabled() else contextlib.nullcontext()
    with inference, torch.enable_grad():
        yield


def eager_function(fn: TorchFunction) -> EagerFunction:
    """The user's function that an eager transformation is made from."""
    flat = fn.base
    assert isinstance(flat, EagerFunction)
    return flat
