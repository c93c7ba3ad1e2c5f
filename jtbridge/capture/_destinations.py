"""Graphs that write their results into given destinations, instead of into new memory from which they are copied.

The operator that computes a result is replaced by its ``out=`` overload on a view of the destination. Only operators
with a kernel of their own for ``out=`` are replaced: the others would compute into new memory and copy all the same.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import fx

from jtbridge._compat import OpOverload, has_cpu_kernel, schema_of

_aten = torch.ops.aten
_VIEWS = (_aten.reshape.default, _aten.unsqueeze.default, _aten.squeeze.dim)

# A method of torch.Tensor and its arguments.
_Step = tuple[str, tuple[Any, ...]]


def with_destinations(graph_module: fx.GraphModule) -> tuple[fx.GraphModule, tuple[int, ...]]:
    """Return a copy of a graph with destinations after its inputs, and the positions of the results written there.

    Each destination is a row-major tensor with the shape and dtype of its result.
    """
    graph_module = copy.copy(graph_module)
    graph = graph_module.graph = copy.deepcopy(graph_module.graph)
    (output,) = graph.find_nodes(op="output")
    body = next(node for node in graph.nodes if node.op != "placeholder")
    positions: list[int] = []
    taken: set[fx.Node] = set()
    for position in range(len(cast(Sequence[Any], output.args[0]))):
        result = cast(Sequence[Any], output.args[0])[position]  # read again for each result: the loop replaces nodes
        found = _source(result) if isinstance(result, fx.Node) else None
        if found is None or found[0] in taken:
            continue
        source, write, steps = found
        with graph.inserting_before(body):
            destination = graph.placeholder(f"destination_{position}")
        with graph.inserting_before(source):
            view = graph.call_function(_take_back, (destination, steps))
            written = graph.call_function(write, source.args, {**source.kwargs, "out": view})
        written.meta = source.meta
        source.replace_all_uses_with(written)
        if source is body:
            body = view
        graph.erase_node(source)
        taken.add(written)
        positions.append(position)
    graph.lint()
    graph_module.recompile()
    return graph_module, tuple(positions)


def _source(result: fx.Node) -> tuple[fx.Node, Callable[..., Any], tuple[_Step, ...]] | None:
    """Find the operator that computes a result, through views.

    Returns:
        The node of the operator, the function that writes to ``out``, and the steps from the result's shape to the
        operator's. None if the result cannot be written to a destination.
    """
    node, steps = result, []
    while node.op == "call_function":
        step = _inverse(node)
        if step is None:
            break
        steps.append(step)
        node = cast(fx.Node, node.args[0])
    write = _writer(node.target) if isinstance(node.target, OpOverload) else None
    wanted, computed = result.meta.get("val"), node.meta.get("val")
    if write is None or not isinstance(wanted, torch.Tensor) or not isinstance(computed, torch.Tensor):
        return None
    try:
        view = _take_back(torch.empty(wanted.shape, device="meta"), tuple(steps))
    except RuntimeError:  # the views cannot be undone without a copy
        return None
    if view.shape != computed.shape or wanted.dtype != computed.dtype:
        return None
    return node, write, tuple(steps)


def _inverse(node: fx.Node) -> _Step | None:
    """Return the step that undoes a view; None for any other operator."""
    if node.target is _aten.t.default:
        return "t", ()
    if node.target is _aten.transpose.int:
        return "transpose", tuple(node.args[1:3])
    if node.target in _VIEWS:
        return "view", (tuple(cast(fx.Node, node.args[0]).meta["val"].shape),)
    return None


def _take_back(destination: torch.Tensor, steps: Sequence[_Step]) -> torch.Tensor:
    """Return the view of a destination that has the shape of the operator's result."""
    for method, args in steps:
        destination = getattr(destination, method)(*args)
    return destination


def _embedding_gradient(
    grad: torch.Tensor, indices: torch.Tensor, rows: int, padding: int, by_frequency: bool, *, out: torch.Tensor
) -> torch.Tensor:
    """Compute ``aten.embedding_dense_backward`` into `out`, adding in the same order.

    The gradient of an embedding is as large as the embedding, and mostly zeros: a copy of the gradient would cost more
    than its computation.
    """
    if by_frequency:
        return out.copy_(_aten.embedding_dense_backward.default(grad, indices, rows, padding, by_frequency))
    out.zero_().index_add_(0, indices.reshape(-1), grad.reshape(-1, out.shape[1]))
    if 0 <= padding < rows:
        out[padding].zero_()
    return out


_WRITERS: dict[OpOverload, Callable[..., torch.Tensor]] = {_aten.embedding_dense_backward.default: _embedding_gradient}


def _writer(target: OpOverload) -> Callable[..., torch.Tensor] | None:
    """Return the function that writes the single result of an operator to ``out``.

    That is an entry of `_WRITERS`, or the operator's ``out=`` overload if it has a CPU kernel; None without either.
    """
    if target in _WRITERS:
        return _WRITERS[target]
    arguments = [(argument.name, str(argument.type)) for argument in schema_of(target).arguments]
    # Losses resize `out` to compute their terms there, and then compute the sum or mean of the terms.
    if len(schema_of(target).returns) != 1 or any(name == "reduction" for name, _ in arguments):
        return None
    packet = target.overloadpacket
    for name in packet.overloads():
        schema = schema_of(getattr(packet, name))
        if not schema.arguments or schema.arguments[-1].name != "out":
            continue
        others = schema.arguments[:-1]
        if [(argument.name, str(argument.type)) for argument in others] == arguments and has_cpu_kernel(schema):
            return getattr(packet, name)
    return None
