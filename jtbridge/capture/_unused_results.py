"""A backward graph that takes no cotangents of the results that nothing uses.

A cotangent of zeros is not the same as no cotangent: zero times an infinite derivative is NaN. Torch does not
differentiate a result that no loss uses. So the nodes that depend on its cotangent alone are taken out of the graph.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import fx

from jtbridge._compat import OpOverload, forgetting_graph_sources, schema_of
from jtbridge.core.functions import TorchFunction
from jtbridge.core.writes import returns_view
from jtbridge.transforms import Vmap

from ._graph_function import GraphFunction, copied_graph, ready_to_run
from ._partition import outputs_of

_aten = torch.ops.aten
# Operators that are zero if one of these arguments is zero, by position. `_stays_zero` knows others.
_LINEAR: dict[Any, tuple[int, ...]] = {
    **dict.fromkeys((_aten.mul, _aten.mm, _aten.bmm, _aten.matmul, _aten.mv, _aten.dot), (0, 1)),
    **dict.fromkeys((_aten.neg, _aten.div, _aten.sum, _aten.mean, _aten.cumsum, _aten.tril, _aten.triu), (0,)),
    **dict.fromkeys((_aten.clone, _aten._to_copy, _aten.conj_physical, _aten.repeat), (0,)),
    **dict.fromkeys((_aten.reshape, _aten._unsafe_view, _aten.flip, _aten.roll, _aten.diag_embed), (0,)),
    **dict.fromkeys((_aten.index, _aten.gather, _aten.index_select), (0,)),
}
_JOINING = (_aten.cat, _aten.stack)


class _CannotCut(Exception):
    """The graph mixes used and unused cotangents in a way that is not known here."""


def without_cotangents(backward: TorchFunction, used: Sequence[int], count: int) -> TorchFunction | None:
    """Return a backward, batched or not, that takes the cotangents of some results only.

    It is None if the graph mixes these cotangents with the others in a way that is not known here.

    Args:
        backward: the function ``(saved..., ct...) -> grads``.
        used: the positions of these results among the `count` results that it takes cotangents of.
    """
    first = len(backward.in_types) - count
    kept = (*range(first), *(first + i for i in used))
    if isinstance(backward, Vmap):
        row = without_cotangents(backward.fn, used, count)
        return row and Vmap(row, tuple(backward.dims[i] for i in kept), backward.size, backward.summed)
    assert isinstance(backward, GraphFunction)
    cuts, key = backward.base.cache.cut_backwards, (backward, kept)
    if key not in cuts:
        try:
            with forgetting_graph_sources():
                cuts[key] = _cut(backward, first, kept)
        except _CannotCut:
            cuts[key] = None
    return cuts[key]


def _cut(backward: GraphFunction, first: int, kept: Sequence[int]) -> GraphFunction:
    """Return the backward with only the inputs `kept`. Its cotangents begin at the position `first`."""
    module = copied_graph(backward.module)
    graph = module.graph
    inputs = graph.find_nodes(op="placeholder")
    unused = [node for i, node in enumerate(inputs) if i not in kept]
    zeros, dependent = set(unused), set(inputs[first:])
    for node in list(graph.nodes):
        given = dependent.intersection(node.all_input_nodes)
        if not given or node.op == "output":
            continue
        dependent.add(node)
        if given <= zeros:
            if not _stays_zero(node, zeros):
                raise _CannotCut
            zeros.add(node)
        elif given & zeros:
            _leave_out(node, zeros)
    (output,) = graph.find_nodes(op="output")
    with graph.inserting_before(output):
        results = [_new_zeros(inputs[kept[-1]], node) if node in zeros else node for node in outputs_of(module)]
    output.args = (tuple(results),)
    graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))
    for node in unused:
        graph.erase_node(node)
    types = tuple(backward.in_types[i] for i in kept)
    return GraphFunction(backward.base, ready_to_run(module), types, backward.out_types, backward.seed)


def _stays_zero(node: fx.Node, zeros: set[fx.Node]) -> bool:
    """Return whether a node is known to be zero if some of its arguments, all the cotangents in it, are zero."""
    if node.target is operator.getitem:
        return True
    if not isinstance(node.target, OpOverload):
        return False
    schema = schema_of(node.target)
    if schema.is_mutable:
        return False
    at = [i for i, arg in enumerate(node.args) if isinstance(arg, fx.Node) and arg in zeros]
    others = zeros.intersection(node.all_input_nodes).difference(node.args[i] for i in at)
    if others:  # in a list, or given by name
        return node.target.overloadpacket in _JOINING
    names = [schema.arguments[i].name for i in at]
    if at == [0] and returns_view(node.target):
        return True
    if schema.name.startswith("aten::") and "_backward" in schema.name and all(x.startswith("grad") for x in names):
        return True
    packet = node.target.overloadpacket
    if packet in (_aten.add, _aten.sub):
        return at == [0, 1]
    if packet is _aten.where:
        return at == [1, 2] or (at in ([1], [2]) and _makes_zeros(node.args[3 - at[0]]))
    if packet in (_aten.masked_fill, _aten.constant_pad_nd):
        return at == [0] and _makes_zeros(node.args[2] if len(node.args) > 2 else 0)
    return set(at) <= set(_LINEAR.get(packet, ()))


def _makes_zeros(value: Any) -> bool:
    """Return whether an argument of an operator is the number 0, or a node that makes zeros."""
    if not isinstance(value, fx.Node):
        return type(value) in (int, float, bool) and value == 0
    if value.op == "get_attr":
        constant = getattr(value.graph.owning_module, str(value.target))
        return isinstance(constant, torch.Tensor) and constant.numel() == 1 and not constant.any()
    packet = getattr(value.target, "overloadpacket", None)
    if packet in (_aten.full, _aten.full_like, _aten.new_full, _aten.scalar_tensor):
        return _makes_zeros(value.args[packet is not _aten.scalar_tensor])
    return packet in (_aten.zeros, _aten.zeros_like, _aten.new_zeros)


def _leave_out(node: fx.Node, zeros: set[fx.Node]) -> None:
    """Make a node, which also depends on other cotangents, independent of the zeros among its arguments."""
    packet = getattr(node.target, "overloadpacket", None)
    if packet is _aten.add and node.kwargs.get("alpha", 1) == 1:
        (other,) = (x for x in node.args[:2] if x not in zeros)
        if isinstance(other, fx.Node) and _shape_and_dtype(other) == _shape_and_dtype(node):
            node.replace_all_uses_with(other)
            return
    if packet in _JOINING:
        parts = cast(Sequence[fx.Node], node.args[0])
        like = next(x for x in parts if x not in zeros)
        with node.graph.inserting_before(node):
            filled = [_new_zeros(like, x) if x in zeros else x for x in parts]
        node.args = (filled, *node.args[1:])
        return
    raise _CannotCut


def _new_zeros(like: fx.Node, node: fx.Node) -> fx.Node:
    """Return a node that makes zeros of the type of `node`, with the device and the batch axis of `like`."""
    shape, dtype = _shape_and_dtype(node)
    made = node.graph.call_function(_aten.new_zeros.default, (like, shape), {"dtype": dtype})
    made.meta["val"] = node.meta["val"]
    return made


def _shape_and_dtype(node: fx.Node) -> tuple[list[int], torch.dtype]:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not all(type(size) is int for size in value.shape):
        raise _CannotCut
    return list(value.shape), value.dtype
