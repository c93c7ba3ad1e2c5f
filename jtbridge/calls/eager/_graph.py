"""The graph that torch's autograd records in an eager call, carried through JAX as an attribute of an array, the token.

The token is a ``uint8[batch..., 0]`` array. For JAX it is a residual like any other, freed with the pullback. A token
that went through `jit` or was indexed has lost the attribute; then the function runs again.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import torch

from jtbridge._compat import (
    custom_backwards,
    graph_nodes,
    has_error_node,
    node_names,
    reentrant_checkpoints,
    run_backward,
    with_autograd,
)
from jtbridge.core import random_numbers
from jtbridge.core.functions import TorchFunction
from jtbridge.core.loans import Loan, protected
from jtbridge.core.messages import text_of
from jtbridge.errors import DifferentiationError
from jtbridge.transforms import (
    Vjp,
    conjugate,
    dense_gradient,
    once_differentiable_error,
    refuse_lost_gradients,
    refuse_wrong_batches,
    refused_detached_backwards,
    unbatched,
)
from jtbridge.triton import intercepted_launches

from ._arrays import Placement
from ._function import EagerFunction


class Family:
    """Marker that the graph of a run shares with the graphs of its derivatives. Their leaves refer to it."""

    __slots__ = ("__weakref__",)


FAMILIES: weakref.WeakSet[Family] = weakref.WeakSet()  # the families that still have a graph


def new_leaf(tensor: torch.Tensor, family: Family) -> torch.Tensor:
    """Return a leaf of a new graph with the values of a tensor."""
    leaf = tensor.detach().requires_grad_()
    leaf._jtbridge_family = weakref.ref(family)  # type: ignore[attr-defined]
    return leaf


def refuse_other_graphs(name: str, results: Sequence[torch.Tensor], own: Family | None) -> None:
    """Raise if results depend on the arguments of another differentiated call.

    JAX does not see this dependence, so the derivative would lack a part.

    Args:
        name: the name of the function.
        results: its results.
        own: the family of its graph. It is None for a call that is not differentiated: such a call may depend on
            another call's arguments once that call's graphs are freed.

    Raises:
        DifferentiationError: a result depends on such arguments.
    """
    if own is None and not FAMILIES:
        return
    for node in graph_nodes(results):
        family = getattr(getattr(node, "variable", None), "_jtbridge_family", None)
        if family is None or family() is own:  # if `own` is None: the graphs are freed
            continue
        raise DifferentiationError(
            f"`{name}` reads a tensor that an earlier call computed from its own arguments, and JAX differentiates "
            "that call. JAX does not see such tensors, so the derivative would lack a part. Return the tensor from the "
            "earlier call, in a container that JAX knows, and pass it as an argument; or store `tensor.detach()`."
        )


class AutogradGraph:
    """The inputs and results of a run that autograd recorded.

    Attributes:
        inputs: a tensor for each input; a differentiated input is a leaf of the graph.
        outputs: a tensor for each result.
        order: how often the function has been differentiated in this graph: 0 for a run of the function.
        loan: the loan of the memory of arrays that the graph uses.
        family: the marker that this graph shares with the graphs of its derivatives.
        has_hooks: whether the run may have registered hooks for the backward.
        seed: the seed of the run, or an array with a seed for each row; None without a key.
    """

    __slots__ = ("__weakref__", "family", "has_hooks", "inputs", "loan", "order", "outputs", "seed")

    def __init__(
        self,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        order: int,
        loan: Loan,
        family: Family,
        *,
        has_hooks: bool,
        seed: torch.Tensor | None,
    ):
        self.family = family
        self.inputs = list(inputs)
        self.outputs = list(outputs)
        self.order = order
        self.loan = loan
        self.has_hooks = has_hooks
        self.seed = seed

    def __del__(self) -> None:
        # The tensors are dropped before the loan ends, which copies the memory if anything else still uses it.
        self.inputs.clear()
        self.outputs.clear()

    def derived(self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> AutogradGraph:
        """Return the graph of a derivative that this graph computed."""
        return AutogradGraph(
            inputs, outputs, self.order + 1, self.loan, self.family, has_hooks=self.has_hooks, seed=self.seed
        )

    def pull(
        self,
        cotangents: Sequence[torch.Tensor],
        of: Vjp,
        extra_axes: Sequence[int],
        *,
        create_graph: bool,
    ) -> tuple[torch.Tensor, ...]:
        """Return ``ct @ Df(x)`` for the inputs and outputs that `of` differentiates.

        Args:
            cotangents: one for each of the outputs ``of.outs``.
            of: the derivative, with its inputs `wrt` and outputs `outs`.
            extra_axes: the axes of a cotangent over which this graph is not batched.
            create_graph: whether the result will be differentiated.

        Raises:
            DifferentiationError: torch has no derivative of a gradient that this graph computes.
            DetachedBackwardError: a backward computes outside autograd, and the result will be differentiated.
            RandomnessError: a backward draws random numbers, and each row has its own seed.
        """
        inputs = [self.inputs[i] for i in of.wrt]
        pairs = [
            (self.outputs[o], ct.to(self.outputs[o].device, self.outputs[o].dtype))
            for o, ct in zip(of.outs, cotangents, strict=True)
            if self.outputs[o].requires_grad
        ]
        outputs = [y for y, _ in pairs]
        if self.order > 0:
            refuse_error_node(outputs, of)
        refuse_lost_gradients(of.base.name, outputs)

        def gradients(cts: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
            refuse_wrong_batches(outputs, again=create_graph)
            extra = reentrant_checkpoints(outputs, inputs)
            watched = refused_detached_backwards(of.base.name, outputs) if create_graph else contextlib.nullcontext()
            # A backward may draw, and launch Triton kernels.
            seeded = contextlib.nullcontext() if self.seed is None else random_numbers.seeded_again(self.seed)
            with with_autograd(), watched, self._protected(outputs), seeded, intercepted_launches():
                try:
                    found = run_backward(outputs, [conjugate(ct) for ct in cts], inputs, create_graph=create_graph)
                except RuntimeError as error:
                    _add_note_of_changes(error, of.base.name)
                    raise
                if create_graph:
                    refuse_lost_gradients(of.base.name, [grad for grad in found if grad is not None])
            return [_sum_of(of.base.name, grad, other) for grad, other in zip(found, extra, strict=True)]

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

    def _protected(self, outputs: Sequence[torch.Tensor]) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which Python code of the backward cannot write to an array."""
        runs_python = self.loan and (self.has_hooks or custom_backwards(outputs))
        return protected() if runs_python else contextlib.nullcontext()


def _add_note_of_changes(error: RuntimeError, name: str) -> None:
    """Add a note to torch's error about a tensor that was written to since the run: what to do."""
    if "modified by an inplace operation" in text_of(error):
        error.add_note(
            f"A tensor that `{name}` used, such as a weight of a module, was written to after the call and before its "
            "derivative. Take the derivative first; or pass the tensor as an argument, for example by "
            "`jtbridge.module`."
        )


def _sum_of(name: str, *gradients: torch.Tensor | None) -> torch.Tensor | None:
    """Return the sum of the gradients of the function `name` that are not None, as a dense tensor."""
    found = [dense_gradient(name, grad) for grad in gradients if grad is not None]
    return sum(found[1:], found[0]) if found else None


def refuse_error_node(gradients: Sequence[torch.Tensor], of: TorchFunction) -> None:
    """Raise if torch would return zeros for the derivative of a `once_differentiable` gradient."""
    if has_error_node(gradients):
        raise once_differentiable_error(eager_function(of).name)


def over_extra_axes(
    function: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor | None]],
    tensors: Sequence[torch.Tensor],
    axes: Sequence[int],
) -> list[torch.Tensor | None]:
    """Map a linear function over some axes of its arguments. The results have these axes at the same positions.

    The map is one call of torch.vmap, or a loop over the rows where torch has no batching rule.
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
    """Return a shape with added axes, whose positions in the result are given in increasing order."""
    found = list(shape)
    for axis, size in zip(axes, sizes, strict=True):
        found.insert(axis, size)
    return tuple(found)


def token_for(graph: AutogradGraph, batch: tuple[int, ...]) -> jax.Array:
    """Return a new token that holds a graph."""
    token = Placement([]).empty((*batch, 0))
    token._jtbridge_graph = graph  # type: ignore[attr-defined]
    return token


def graph_in(token: Any) -> AutogradGraph | None:
    """Return the graph that a token holds; None if the token lost it, or if torch would differentiate it wrongly.

    In the third derivative of a normalisation, torch treats the saved statistics as constants.
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
    """Return the `Vjp` inside all `Vmap` layers of `fn`."""
    pullback = unbatched(fn)
    assert isinstance(pullback, Vjp)
    return pullback


@contextlib.contextmanager
def recording() -> Iterator[None]:
    """Record autograd's graph inside the block, whatever grad mode or inference mode the caller has set."""
    inference = torch.inference_mode(False) if torch.is_inference_mode_enabled() else contextlib.nullcontext()
    with inference, with_autograd(), torch.enable_grad():
        yield


def eager_function(fn: TorchFunction) -> EagerFunction:
    """Return the user's function from which an eager transformation is derived."""
    base = fn.base
    assert isinstance(base, EagerFunction)
    return base
