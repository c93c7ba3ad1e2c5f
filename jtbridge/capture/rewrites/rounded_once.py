"""Arrays that are compared with their own elements, such as the largest one, and that XLA must compute once.

XLA may compute an array again in each operation that reads it, and round it differently. Then no element equals the
largest one, and the gradient of a maximum is lost.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

_aten = torch.ops.aten

_COMPARISONS = frozenset(getattr(_aten, name).Tensor for name in ("eq", "ne", "ge", "gt", "le", "lt"))

# Operators whose results are elements of some arguments, and the positions of these arguments.
_FIRST = (0,)
_TAKING: dict[Any, tuple[int, ...]] = {
    **dict.fromkeys(
        (
            *(_aten.view.default, _aten.reshape.default, _aten._unsafe_view.default, _aten.unsqueeze.default),
            *(_aten.squeeze.default, _aten.squeeze.dim, _aten.squeeze.dims, _aten.expand.default),
            *(_aten.permute.default, _aten.transpose.int, _aten.t.default, _aten.alias.default, _aten.detach.default),
            *(_aten.clone.default, _aten.slice.Tensor, _aten.select.int, _aten.flip.default, _aten.roll.default),
            *(_aten.index.Tensor, _aten.gather.default, _aten.index_select.default, _aten.take.default),
            *(_aten.split.Tensor, _aten.split_with_sizes.default, _aten.unbind.int, _aten.unfold.default),
            *(_aten.abs.default, _aten.neg.default, _aten.relu.default, _aten.clamp.default),
            *(_aten.clamp_min.default, _aten.clamp_max.default),
            *(_aten.amax.default, _aten.amin.default, _aten.max.default, _aten.min.default, _aten.aminmax.default),
            *(_aten.max.dim, _aten.min.dim, _aten.median.default, _aten.median.dim, _aten.nanmedian.default),
            *(_aten.nanmedian.dim, _aten.kthvalue.default, _aten.mode.default, _aten.topk.default),
            *(_aten.sort.default, _aten.sort.stable, _aten.msort.default, _aten.cummax.default, _aten.cummin.default),
            *(_aten.max_pool2d_with_indices.default, _aten.max_pool3d_with_indices.default),
            *(_aten.linalg_vector_norm.default, _aten.segment_reduce.default),
        ),
        _FIRST,
    ),
    **dict.fromkeys((_aten.maximum.default, _aten.minimum.default, _aten.fmax.default, _aten.fmin.default), (0, 1)),
    _aten.where.self: (1, 2),
    _aten.cat.default: _FIRST,
    _aten.stack.default: _FIRST,
    _aten.scatter_reduce.two: (0, 3),
    _aten.index_reduce.default: (0, 3),
}

# Backward operators that compare values, with the positions of their exponent and of the arrays that the values come
# from. An operator with an exponent compares values only if the exponent is infinite.
_COMPARING_BACKWARDS: dict[Any, tuple[int | None, tuple[int, ...]]] = {
    _aten._cdist_backward.default: (3, (1, 2)),
    _aten._pdist_backward.default: (2, (1,)),
    _aten._segment_reduce_backward.default: (None, (2,)),
}


def materialized_tensor(x: torch.Tensor) -> torch.Tensor:
    """Return an array. In a translated graph, XLA computes it once for all operations that read it."""
    return x


def round_once(graph: fx.Graph) -> None:
    """Mark the arrays that are compared with their own elements, so that XLA computes each of them once."""
    compared = _self_compared(graph)
    for node in list(graph.nodes):
        if node in compared:
            _materialize(graph, node)


def _self_compared(graph: fx.Graph) -> set[fx.Node]:
    """Return the inexact nodes that a comparison reads twice, as a whole and as a selection, such as `x == x.max()`."""
    sources: dict[fx.Node, frozenset[fx.Node]] = {}
    found: set[fx.Node] = set()
    for node in graph.nodes:
        arguments = _taken_from(node)
        sources[node] = frozenset().union(*(sources[x] for x in arguments)) if arguments else frozenset({node})
        if node.target in _COMPARISONS and len(node.all_input_nodes) == 2:
            first, second = node.all_input_nodes
            found |= sources[first] & sources[second]
        if node.target in _COMPARING_BACKWARDS:
            exponent, positions = _COMPARING_BACKWARDS[node.target]
            if exponent is None or math.isinf(node.args[exponent]):  # type: ignore[arg-type]
                found |= {source for i in positions for source in sources[node.args[i]]}  # type: ignore[index]
    return {node for node in found if node.op != "get_attr" and _has_inexact_value(node)}


def _taken_from(node: fx.Node) -> list[fx.Node]:
    """Return the arguments from which a node only selects elements, such as the argument of `max`."""
    if node.target is operator.getitem:
        (source, _) = node.args
        return [source] if isinstance(source, fx.Node) and source.target in _TAKING else []
    found: list[fx.Node] = []
    for i in _TAKING.get(node.target, ()):
        map_arg(node.args[i], found.append)
    return found


def _has_inexact_value(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def _materialize(graph: fx.Graph, node: fx.Node) -> None:
    after = graph.find_nodes(op="placeholder")[-1] if node.op == "placeholder" else node
    with graph.inserting_after(after):
        once = graph.call_function(materialized_tensor, (node,))
    once.meta = dict(node.meta)
    node.replace_all_uses_with(once, delete_user_cb=lambda user: user is not once)
