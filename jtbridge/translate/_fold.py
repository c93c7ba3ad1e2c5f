"""Constant folding: values that a graph computes from constants alone are computed once.

Most of them are masks and positions made of ``arange``. XLA would compute them in every call, and again in every fusion
that reads them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from jtbridge._compat import OpOverload, is_zero
from jtbridge.lowerings import find

# Largest size in bytes of a folded value, and of each value on which it depends. The program contains folded values.
_MAX_BYTES = 1 << 17


def folded(nodes: Sequence[fx.Node]) -> dict[fx.Node, torch.Tensor]:
    """Return the operators of a graph that need not be run, each with its value.

    These operators depend on constants alone, and the rest of the graph reads their results. A factory that has a
    lowering is left in the graph.
    """
    constant = set[fx.Node]()
    for node in nodes:
        if _is_small_constant(node) or (_can_be_known(node) and constant.issuperset(node.all_input_nodes)):
            constant.add(node)
    wanted = [n for n in nodes if n in constant and _is_computed(n) and not constant.issuperset(n.users)]
    values: dict[fx.Node, torch.Tensor] = {}
    for node in _with_dependencies(nodes, wanted):
        value = _computed_value(node, values)
        if isinstance(value, torch.Tensor):
            values[node] = value
    return {node: values[node] for node in wanted if node in values}


def needed_nodes(nodes: Sequence[fx.Node], known: Mapping[fx.Node, Any]) -> list[fx.Node]:
    """Return the nodes on which a graph's results depend, given the values of `known` nodes. Inputs are kept."""
    used = set[fx.Node]()
    for node in reversed(nodes):
        if node.op in ("placeholder", "output") or node in used:
            used.add(node)
            if node not in known:
                used.update(node.all_input_nodes)
    return [node for node in nodes if node in used]


def _with_dependencies(nodes: Sequence[fx.Node], wanted: Sequence[fx.Node]) -> list[fx.Node]:
    """Return the `wanted` nodes and all nodes on which they depend, in order."""
    used = set(wanted)
    for node in reversed(nodes):
        if node in used:
            used.update(node.all_input_nodes)
    return [node for node in nodes if node in used]


def _is_computed(node: fx.Node) -> bool:
    """Return whether a node is worth folding: not a constant, and not a factory with a lowering, such as ``zeros``."""
    return bool(node.all_input_nodes) or (node.op == "call_function" and find(node.target) is None)  # type: ignore[arg-type]


def _is_small_constant(node: fx.Node) -> bool:
    value = getattr(node.graph.owning_module, str(node.target), None) if node.op == "get_attr" else None
    return isinstance(value, torch.Tensor) and not is_zero(value) and _is_small_tensor(value)


def _can_be_known(node: fx.Node) -> bool:
    return (
        node.op == "call_function"
        and isinstance(node.target, OpOverload)
        and node.target.namespace == "aten"
        and torch.Tag.nondeterministic_seeded not in node.target.tags
        and "empty" not in str(node.target)
        and _is_small_tensor(node.meta.get("val"))
    )


def _is_small_tensor(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.layout is torch.strided
        and all(isinstance(size, int) for size in value.shape)
        and value.numel() * value.itemsize <= _MAX_BYTES
    )


def _computed_value(node: fx.Node, values: Mapping[fx.Node, torch.Tensor]) -> Any:
    """Return the value of a node, computed by torch; None if torch has no kernel for it."""
    if node.op == "get_attr":
        return getattr(node.graph.owning_module, str(node.target)).detach().cpu()
    if any(used not in values for used in node.all_input_nodes):
        return None
    args, kwargs = map_arg((node.args, dict(node.kwargs)), values.__getitem__)  # type: ignore[arg-type]
    try:
        with torch.no_grad():
            return node.target(*args, **kwargs)  # type: ignore[operator]
    except RuntimeError:
        return None
