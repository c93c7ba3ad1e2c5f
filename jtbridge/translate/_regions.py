"""Regions: the parts of a graph inside which sizes or numbers depend on data, such as ``x[mask].sum()``.

XLA has no arrays of such sizes. So torch runs each of these parts inside the translated program, as one island. A
region has the nodes with such values and the nodes that use them, so that all values that cross between XLA and torch
have fixed sizes. It also has the nodes between two of its nodes, so that no value leaves a region and comes back.

A region becomes one node that calls a module, whose graph is the region's.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from jtbridge._compat import OpOverload
from jtbridge.capture import draws, from_bytes, is_data_dependent, materialized_tensor, origin, to_bytes
from jtbridge.core.array_types import SYMBOLIC_NUMBERS, array_type
from jtbridge.core.functions import TracedFunction
from jtbridge.core.overlap import may_overlap
from jtbridge.core.writes import written_arguments
from jtbridge.errors import TranslationError

from ._costs import tensor_of
from ._islands import Island, bind, graph_inputs, is_array

_BY_STRIDES = ("as_strided", "_reshape_alias", "resize")
_VIEWS = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)
_PLAIN = (operator.getitem, to_bytes, from_bytes, materialized_tensor)


def with_regions(module: fx.GraphModule) -> fx.GraphModule:
    """Return a graph in which each region is one node, or the graph itself if it has no regions.

    Raises:
        TranslationError: torch cannot run a region inside a translated program.
    """
    nodes = list(module.graph.nodes)
    if not any(map(is_data_dependent, nodes)):
        return module
    graph = fx.Graph()
    submodules: dict[str, fx.GraphModule] = {}
    copies: dict[fx.Node, fx.Node] = {}
    for part in _runnable_parts(nodes):
        inputs, results = _border(part)
        if not any(map(is_data_dependent, (*inputs, *part))):
            for node in part:
                copies[node] = graph.node_copy(node, copies.__getitem__)
            continue
        reason = _ineligible_region_reason(part, inputs, results)
        if reason is not None:
            cause = _dependence_reason(_first_dependent(part))
            raise TranslationError(f"{cause}, and torch cannot run this part alone: {reason}")
        name = f"region_{len(submodules)}"
        submodules[name] = _graph_of_region(part, inputs, results)
        call = graph.call_module(name, tuple(copies[x] for x in inputs))
        call.meta = {"val": tuple(x.meta["val"] for x in results), "custom": origin(_first_dependent(part))}
        for i, node in enumerate(results):
            copies[node] = graph.call_function(operator.getitem, (call, i))
            copies[node].meta = {"val": node.meta["val"]}
    attributes = {str(node.target): getattr(module, str(node.target)) for node in graph.find_nodes(op="get_attr")}
    found = fx.GraphModule({**attributes, **submodules}, graph)
    found.meta.update(module.meta)
    return found


def region_of(node: fx.Node) -> fx.GraphModule:
    """Return the graph of a node that is a region."""
    return getattr(node.graph.owning_module, str(node.target))


def bind_region(node: fx.Node, owner: TracedFunction, values: Mapping[fx.Node, Any]) -> list[Any]:
    """Return the results of a node that is a region, which torch runs in one call.

    Args:
        node: the node.
        owner: the function whose graph has the node.
        values: the values of the node's arguments.
    """
    module = region_of(node)
    inputs = module.graph.find_nodes(op="placeholder")
    first = _first_dependent(list(module.graph.nodes))
    others = [x.target for x in module.graph.nodes if isinstance(x.target, OpOverload) and x is not first]
    island = Island(
        owner=owner,
        module=module,
        in_types=tuple(array_type(x.meta["val"]) for x in inputs),
        out_types=tuple(map(array_type, node.meta["val"])),
        operators=(first.target, *others),  # type: ignore[arg-type]
        reason=_dependence_reason(first),
    )
    return bind(island, [values[x] for x in node.args], None)  # type: ignore[index]


def regions_of(module: fx.GraphModule) -> list[fx.Node]:
    """Return the nodes of a graph that are regions."""
    return [node for node in module.graph.nodes if node.op == "call_module"]


def reason_for_region(node: fx.Node) -> str:
    """Return why torch has to run a node that is a region."""
    return _dependence_reason(_first_dependent(list(region_of(node).graph.nodes)))


def _dependence_reason(first: fx.Node) -> str:
    line = origin(first).get("line")
    place = f"operator `{first.target}`" + (f" ({line})" if line else "")
    if isinstance(first.meta["val"], SYMBOLIC_NUMBERS):
        return f"{place} reads a number from a tensor, on which the rest of the program may depend"
    return f"the shape of a result of {place} depends on data, and XLA has fixed shapes alone"


def _first_dependent(nodes: Sequence[fx.Node]) -> fx.Node:
    """Return the first node whose value has a size that depends on data, or is a number that depends on data."""
    return next(node for node in nodes if is_data_dependent(node))


# --- which nodes are one region -------------------------------------------------------------------------------------


def _runnable_parts(nodes: Sequence[fx.Node]) -> list[list[fx.Node]]:
    """Return the nodes of a graph in parts that can run one after another.

    A value that depends on data, its operator and its users are in one part; so are an operator and its results. Parts
    that need each other's values become one part, with all nodes in between.
    """
    import networkx  # torch requires it, and has imported it for its partitioner

    graph: Any = networkx.DiGraph()
    graph.add_nodes_from(nodes)
    for node in nodes:
        for used in node.all_input_nodes:
            graph.add_edge(used, node)
            if is_data_dependent(used) or node.target is operator.getitem:
                graph.add_edge(node, used)
    position = {node: i for i, node in enumerate(nodes)}
    components: Any = networkx.condensation(graph)  # each is a strongly connected component
    parts = {number: sorted(members, key=position.__getitem__) for number, members in components.nodes.data("members")}
    order = networkx.lexicographical_topological_sort(components, key=lambda number: position[parts[number][0]])
    return [parts[number] for number in order]


# --- the graph of a region ------------------------------------------------------------------------------------------


def _border(part: Sequence[fx.Node]) -> tuple[list[fx.Node], list[fx.Node]]:
    """Return the input nodes of a region, and the nodes of the region whose values other nodes use."""
    inside = set(part)
    inputs = dict.fromkeys(x for node in part for x in node.all_input_nodes if x not in inside)
    return list(inputs), [node for node in part if not inside.issuperset(node.users)]


def _ineligible_region_reason(
    part: Sequence[fx.Node], inputs: Sequence[fx.Node], results: Sequence[fx.Node]
) -> str | None:
    """Return why torch cannot run the nodes of a region inside a translated program; None if it can."""
    for node in part:
        if node.op == "output":
            return "a result of the function has such a shape"
        target = node.target
        if target in _PLAIN or isinstance(node.meta.get("val"), SYMBOLIC_NUMBERS):
            continue
        name = f"operator `{target}`"
        if not isinstance(target, OpOverload) or target.namespace == "jtbridge":
            return f"{name} takes functions"
        if written_arguments(target):
            return f"{name} writes to its arguments"
        if draws(target, node.args, node.kwargs):
            return f"{name} draws random numbers"
        if any(part in target.name() for part in _BY_STRIDES):
            return f"the results of {name} depend on the memory of its arguments"
    if not all(is_array(tensor_of(x)) for x in (*inputs, *results)):
        return "an argument or a result is not an array of fixed shape"
    if _has_custom_operators(part) and any(may_overlap(tensor_of(x), ignoring_expanded=True) for x in inputs):
        return "an argument overlaps itself in memory"
    return None


def _has_custom_operators(part: Sequence[fx.Node]) -> bool:
    return any(isinstance(x.target, OpOverload) and x.target.namespace not in ("aten", "prims") for x in part)


def _graph_of_region(part: Sequence[fx.Node], inputs: Sequence[fx.Node], results: Sequence[fx.Node]) -> fx.GraphModule:
    graph = fx.Graph()
    copies = graph_inputs(graph, inputs, with_strides=_has_custom_operators(part))
    for node in part:
        copies[node] = graph.node_copy(node, copies.__getitem__)
        if node.target in _VIEWS:
            copies[node].target = torch.ops.aten.reshape.default  # the argument may have other strides
    graph.output(tuple(copies[node] for node in results))
    return fx.GraphModule({}, graph)
