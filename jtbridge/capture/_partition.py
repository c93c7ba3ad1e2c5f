"""Partition of a joint graph into a forward, which also returns residuals, and a backward."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import fx
from torch.fx.node import map_arg

from jtbridge._compat import OpOverload
from jtbridge.core.functions import TorchFunction
from jtbridge.core.imports import import_whole
from jtbridge.core.writes import returns_view

from ._data_dependent import is_data_dependent
from ._graph_function import GraphFunction, ready_to_run
from ._packing import CannotSplit, packing


@dataclasses.dataclass(frozen=True)
class Split:
    """Forward ``x -> (y, residuals)`` and backward ``(x, y, residuals, ct) -> grads``.

    The backward takes only some of x, y and the residuals: `sources` are positions in their concatenation.
    """

    forward: TorchFunction
    backward: TorchFunction
    sources: tuple[int, ...]


def partition(fn: TorchFunction, joint: fx.GraphModule, wrt: tuple[int, ...], outs: tuple[int, ...]) -> Split:
    """Split a joint graph by torch's partitioner."""
    import_whole("functorch.compile")
    from functorch.compile import default_partition

    count, results = len(fn.in_types), len(fn.out_types)
    clean(joint)
    for i, node in enumerate(joint.graph.find_nodes(op="placeholder")):
        # Torch's partitioner tells arguments from cotangents by these names.
        node.target = f"primals_{i + 1}" if i < count else f"tangents_{i - count + 1}"
        node.name = node.target
    _compute_again(joint, _tag_forward(joint, results))
    joint.recompile()
    forward, backward = default_partition(joint, [], num_fwd_outputs=results)
    forward.graph.eliminate_dead_code()
    backward.graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))
    for node in backward.graph.nodes:
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            raise CannotSplit(f"its backward draws random numbers ({node.target})")
    residuals = _replay_views(forward, backward, results)
    return _as_split(fn, wrt, outs, forward, backward, residuals)


def clean(joint: fx.GraphModule) -> None:
    """Drop unused nodes, and make the graph independent of strides, which residuals do not keep.

    Raises:
        CannotSplit: the graph uses `as_strided`.
    """
    for node in joint.graph.nodes:
        if node.op != "call_function":
            continue
        if node.target is torch.ops.aten.view.default:
            node.target = torch.ops.aten.reshape.default
        elif "as_strided" in str(node.target):
            raise CannotSplit("it uses as_strided, which depends on memory layout")
    joint.graph.eliminate_dead_code()


def _tag_forward(joint: fx.GraphModule, results: int) -> set[fx.Node]:
    """Tag the nodes that the results depend on as forward, and return them.

    The partitioner leaves the other nodes to the backward.
    """
    pending = [node for node in outputs_of(joint)[:results] if isinstance(node, fx.Node)]
    forward: set[fx.Node] = set()
    while pending:
        node = pending.pop()
        if node not in forward:
            forward.add(node)
            pending += node.all_input_nodes
    for node in list(forward):  # tag all results of an operator, so that the backward does not run it again
        while node.next.target is operator.getitem and node.next.args[0] in forward:
            node = node.next
            forward.add(node)
    for node in joint.graph.nodes:
        node.meta["partitioner_tag"] = "is_forward" if node in forward else "is_backward"
    return forward


def _compute_again(joint: fx.GraphModule, forward: set[fx.Node]) -> None:
    """Copy the data-dependent nodes that the backward needs into it, so that all residuals have fixed shapes.

    Args:
        joint: the joint graph.
        forward: the nodes tagged as forward. The partitioner treats all nodes up to the last one of them as forward.
    """
    nodes = list(joint.graph.nodes)
    first = 1 + max(i for i, node in enumerate(nodes) if node in forward or node.op == "placeholder")
    before = set(nodes[:first])
    copies: dict[fx.Node, fx.Node] = {}

    def copied(node: fx.Node) -> fx.Node:
        if node in before and is_data_dependent(node) and node not in copies:
            copies[node] = joint.graph.create_node(
                node.op,
                node.target,
                map_arg(node.args, copied),  # type: ignore[arg-type]
                map_arg(node.kwargs, copied),  # type: ignore[arg-type]
            )
            copies[node].meta = {**node.meta, "partitioner_tag": "is_backward"}
        return copies.get(node, node)

    with joint.graph.inserting_before(nodes[first]):
        for node in nodes[first:]:
            node.args, node.kwargs = map_arg(node.args, copied), map_arg(node.kwargs, copied)  # type: ignore[assignment]


def _replay_views(forward: fx.GraphModule, backward: fx.GraphModule, results: int) -> list[fx.Node]:
    """Make the backward graph compute views again from their bases; return the nodes of the forward graph to save.

    The nodes are in the order of the backward graph's placeholders. Neither views nor constants are saved; both graphs
    share the constants. Otherwise the transpose of every weight would be copied into a residual.
    """
    graph = backward.graph
    kept: list[fx.Node] = list(outputs_of(forward)[results:])
    placeholders = graph.find_nodes(op="placeholder")
    saved = dict(zip(kept, placeholders, strict=False))
    first_cotangent = placeholders[len(kept)]
    body = next(node for node in graph.nodes if node.op != "placeholder")
    held: dict[fx.Node, fx.Node] = {}

    def hold(node: fx.Node) -> fx.Node:
        if node not in held:
            held[node] = take(node)
            held[node].meta = dict(node.meta)
        return held[node]

    def take(node: fx.Node) -> fx.Node:
        if node.op == "get_attr":
            name = str(node.target)
            setattr(backward, name, getattr(forward, name))
            with graph.inserting_before(body):
                return graph.create_node("get_attr", name)
        if _is_view_of_base(node):
            base = hold(cast(fx.Node, node.args[0]))
            with graph.inserting_before(body):
                return graph.call_function(cast(Callable, node.target), (base, *node.args[1:]), dict(node.kwargs))
        if node in saved:
            return saved[node]
        with graph.inserting_before(first_cotangent):
            return graph.placeholder(node.name)

    for node, placeholder in saved.items():
        value = hold(node)
        if value is not placeholder:
            placeholder.replace_all_uses_with(value)
            graph.erase_node(placeholder)
    sources = {use: node for node, use in held.items()}
    return [sources[use] for use in graph.find_nodes(op="placeholder") if use in sources]


def outputs_of(graph_module: fx.GraphModule) -> list[Any]:
    (output,) = graph_module.graph.find_nodes(op="output")
    return list(cast(Sequence[Any], output.args[0]))


def _is_view_of_base(node: fx.Node) -> bool:
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return False
    is_view = returns_view(node.target) or node.target is torch.ops.aten.reshape.default
    is_view = is_view and not any(map(is_data_dependent, node.all_input_nodes))
    others = [arg for arg in (*node.args[1:], *node.kwargs.values()) if isinstance(arg, fx.Node)]
    return is_view and not others and isinstance(node.args[0], fx.Node)


def _as_split(
    fn: TorchFunction,
    wrt: tuple[int, ...],
    outs: tuple[int, ...],
    forward: fx.GraphModule,
    backward: fx.GraphModule,
    residuals: Sequence[fx.Node],
) -> Split:
    """Return the split. Each saved value is an argument, a result or a separate residual."""
    count, results = len(fn.in_types), len(fn.out_types)
    (forward_output,) = forward.graph.find_nodes(op="output")
    arguments = forward.graph.find_nodes(op="placeholder")
    result_nodes = outputs_of(forward)[:results]
    known = {node: count + i for i, node in reversed(list(enumerate(result_nodes)))}
    known |= {node: i for i, node in enumerate(arguments)}
    extra: list[fx.Node] = []
    sources = []
    for node in residuals:
        if node not in known:
            known[node] = count + results + len(extra)
            extra.append(node)
        sources.append(known[node])
    packed = [packing(node) for node in extra]
    with forward.graph.inserting_before(forward_output):
        carried = [pack.pack(forward.graph, node) for pack, node in zip(packed, extra, strict=True)]
    forward_output.args = ((*result_nodes, *carried),)
    saved = backward.graph.find_nodes(op="placeholder")[: len(residuals)]
    for placeholder, source in zip(saved, sources, strict=True):
        if source >= count + results:
            packed[source - count - results].unpack(backward.graph, placeholder)
    (backward_output,) = backward.graph.find_nodes(op="output")
    backward_output.args = (tuple(outputs_of(backward)),)
    all_types = [*fn.in_types, *fn.out_types, *(pack.type for pack in packed)]
    return Split(
        forward=GraphFunction(
            fn.base, ready_to_run(forward), fn.in_types, tuple(all_types[count:]), fn.base.seed_position
        ),
        backward=GraphFunction(
            fn.base,
            ready_to_run(backward),
            (*(all_types[s] for s in sources), *(fn.out_types[o] for o in outs)),
            tuple(fn.in_types[i] for i in wrt),
        ),
        sources=tuple(sources),
    )
