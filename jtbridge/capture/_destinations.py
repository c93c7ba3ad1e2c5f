"""Graphs that write their results into given destinations, instead of into new memory from which they are copied.

The operator that computes a result is replaced by its overload that has an argument for the result, such as ``out=``.
That argument is a view of the destination. Only operators with a separate kernel for the overload are replaced: the
others would compute into new memory and copy the result anyway.
"""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import fx

from jtbridge._compat import OpOverload, has_cpu_kernel, schema_of

_aten = torch.ops.aten
_VIEWS = (_aten.view.default, _aten.reshape.default, _aten.unsqueeze.default, _aten.squeeze.dim)

# The name of a method of torch.Tensor, and the arguments of a call of it.
_Step = tuple[str, tuple[Any, ...]]


class _Writer(NamedTuple):
    """A function that writes the results of an operator to its keyword arguments `names`."""

    function: Callable[..., Any]
    names: tuple[str, ...]


class _Source(NamedTuple):
    """Where a result is computed.

    Attributes:
        node: the operator's node.
        number: the index of the tensor among the operator's results.
        steps: turn a tensor of the result's shape into a view of the shape of the operator's tensor.
    """

    node: fx.Node
    number: int
    steps: tuple[_Step, ...]


def with_destinations(graph_module: fx.GraphModule) -> tuple[fx.GraphModule, tuple[int, ...]]:
    """Return a copy of a graph with destinations after its inputs, and the positions of the results written there.

    Each destination is a row-major tensor with the shape and dtype of its result.
    """
    graph_module = copy.copy(graph_module)
    graph = graph_module.graph = copy.deepcopy(graph_module.graph)
    (output,) = graph.find_nodes(op="output")
    body = next(node for node in graph.nodes if node.op != "placeholder")
    positions: list[int] = []
    for source, results in _written_results(cast(Sequence[Any], output.args[0])).items():
        writer = _writer_of(cast(OpOverload, source.target))
        assert writer is not None  # `_find_source` finds only operators with a writer
        views: dict[int, fx.Node] = {}
        for position, index, steps in results:
            with graph.inserting_before(body):
                destination = graph.placeholder(f"destination_{position}")
            with graph.inserting_before(source):
                views[index] = graph.call_function(_view_of_destination, (destination, steps))
            positions.append(position)
        with graph.inserting_before(source):
            outs = {
                name: views[i] if i in views else _empty(graph, value)
                for i, (name, value) in enumerate(zip(writer.names, _values(source), strict=True))
            }
            written = graph.call_function(writer.function, source.args, {**source.kwargs, **outs})
        written.meta = source.meta
        source.replace_all_uses_with(written)
        if source is body:
            body = next(iter(views.values()))
        graph.erase_node(source)
    graph.lint()
    graph_module.recompile()
    return graph_module, tuple(positions)


def _written_results(results: Sequence[Any]) -> dict[fx.Node, list[tuple[int, int, tuple[_Step, ...]]]]:
    """Return the operators that can write to destinations, with ``(result position, number, steps)`` of each result."""
    found: dict[fx.Node, list[tuple[int, int, tuple[_Step, ...]]]] = {}
    for position, result in enumerate(results):
        source = _find_source(result) if isinstance(result, fx.Node) else None
        if source is None:
            continue
        written = found.setdefault(source.node, [])
        if all(index != source.number for _, index, _ in written):  # a tensor has one destination
            written.append((position, source.number, source.steps))
    return found


def _find_source(result: fx.Node) -> _Source | None:
    """Find the operator that computes a result, through views; None if it cannot write to a destination."""
    node, steps = result, []
    while node.op == "call_function":
        step = _inverse_of_view(node)
        if step is None:
            break
        steps.append(step)
        node = cast(fx.Node, node.args[0])
    index = 0
    if node.target is operator.getitem:
        node, index = cast(tuple[fx.Node, int], node.args)
    writer, values = _writer_of(node.target) if isinstance(node.target, OpOverload) else None, _values(node)
    if writer is None or len(values) != len(writer.names):
        return None
    wanted, computed = result.meta.get("val"), values[index]
    if not isinstance(wanted, torch.Tensor) or not all(isinstance(value, torch.Tensor) for value in values):
        return None
    try:
        view = _view_of_destination(torch.empty(wanted.shape, device="meta"), tuple(steps))
    except RuntimeError:  # the views cannot be undone without a copy
        return None
    if view.shape != computed.shape or wanted.dtype != computed.dtype:
        return None
    return _Source(node, index, tuple(steps))


def _empty(graph: fx.Graph, value: torch.Tensor) -> fx.Node:
    """Return a node that makes a tensor for a result that has no destination."""
    return graph.call_function(torch.empty, (tuple(value.shape),), {"dtype": value.dtype})


def _values(node: fx.Node) -> Sequence[Any]:
    """Return the fake tensors that a node computed in the trace."""
    value = node.meta.get("val")
    return value if isinstance(value, list | tuple) else [value]


def _inverse_of_view(node: fx.Node) -> _Step | None:
    """Return the step that undoes a view; None for any other operator."""
    if node.target is _aten.t.default:
        return "t", ()
    if node.target is _aten.transpose.int:
        return "transpose", tuple(node.args[1:3])
    if node.target in _VIEWS:
        return "view", (tuple(cast(fx.Node, node.args[0]).meta["val"].shape),)
    return None


def _view_of_destination(destination: torch.Tensor, steps: Sequence[_Step]) -> torch.Tensor:
    """Return the view of a destination that has the shape of the operator's result."""
    for method, args in steps:
        destination = getattr(destination, method)(*args)
    return destination


def _embedding_gradient(
    grad: torch.Tensor, indices: torch.Tensor, rows: int, padding: int, by_frequency: bool, *, out: torch.Tensor
) -> torch.Tensor:
    """Compute ``aten.embedding_dense_backward`` into `out`, with the additions in torch's order.

    The gradient of an embedding is as large as the embedding, and mostly zeros: a copy of the gradient would cost more
    than its computation.
    """
    if by_frequency:
        return out.copy_(_aten.embedding_dense_backward.default(grad, indices, rows, padding, by_frequency))
    out.zero_().index_add_(0, indices.reshape(-1), grad.reshape(-1, out.shape[1]))
    if 0 <= padding < rows:
        out[padding].zero_()
    return out


def _copy_into(x: torch.Tensor, *, out: torch.Tensor, **_: Any) -> torch.Tensor:
    """Compute ``aten._to_copy`` or ``aten.clone`` into `out`."""
    return out.copy_(x)


_WRITERS: dict[OpOverload, Callable[..., torch.Tensor]] = {
    _aten.embedding_dense_backward.default: _embedding_gradient,
    _aten._to_copy.default: _copy_into,
    _aten.clone.default: _copy_into,
}
# Operators with two results that compute directly into their `out` arguments. Other operators with two results resize
# these arguments, or compute elsewhere and copy.
_OF_TWO_RESULTS = (
    *(_aten.topk.default, _aten.sort.stable, _aten.kthvalue.default, _aten.cummax.default, _aten.cummin.default),
    *(_aten.max.dim, _aten.min.dim, _aten.median.dim, _aten.nanmedian.dim, _aten.mode.default, _aten.aminmax.default),
    *(_aten.max_pool2d_with_indices.default, _aten.max_pool3d_with_indices.default),
    *(_aten.adaptive_max_pool2d.default, _aten.adaptive_max_pool3d.default),
)


@functools.cache
def _writer_of(target: OpOverload) -> _Writer | None:
    """Return the function that writes the results of an operator to destinations; None if there is none.

    It is an entry of `_WRITERS`, or the operator's overload with arguments for the results.
    """
    if target in _WRITERS:
        return _Writer(_WRITERS[target], ("out",))
    arguments = [(argument.name, str(argument.type)) for argument in schema_of(target).arguments]
    # Losses resize `out` to compute their terms there, and then compute the sum or mean of the terms.
    if any(name == "reduction" for name, _ in arguments):
        return None
    several = target in _OF_TWO_RESULTS
    if len(schema_of(target).returns) != 1 and not several:
        return None
    packet = target.overloadpacket
    for name in packet.overloads():
        schema = schema_of(getattr(packet, name))
        written = tuple(argument.name for argument in schema.arguments if argument.is_out)
        others = [(argument.name, str(argument.type)) for argument in schema.arguments if not argument.is_out]
        fits = others == arguments and len(written) == len(schema_of(target).returns)
        if fits and (several or has_cpu_kernel(schema)):
            return _Writer(getattr(packet, name), written)
    return None
