"""Analysis of a graph's operators: whether each has a lowering, a decomposition by torch, or no translation."""

from __future__ import annotations

import collections
import operator
import types
from collections.abc import Iterator

from torch import fx

from jtbridge._compat import OpOverload
from jtbridge.capture import from_bytes, materialized_tensor, origin, to_bytes
from jtbridge.core.backend_names import ON_DEVICE, ON_HOST
from jtbridge.core.signals import raise_if_from_signal
from jtbridge.lowerings import find

from ._decompose import decomposable, decomposition
from ._fold import folded, needed_nodes
from ._islands import ineligible_reason
from ._regions import reason_for_region, region_of, regions_of

# Python functions that a graph may contain in addition to operators: functions of symbolic sizes and of residuals.
_OF_SIZES = (operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod, operator.neg, operator.pow)
_CALL = f'backend="{ON_DEVICE}" or "{ON_HOST}"'
_PLAIN = frozenset({operator.getitem, *_OF_SIZES, to_bytes, from_bytes, materialized_tensor})


def missing_lowering_reason(module: fx.GraphModule, *, islands: bool = False) -> str | None:
    """Return why the first node without a lowering and a decomposition cannot be translated; None if all nodes can.

    With `islands`, torch may run nodes inside the program.
    """
    regions = [] if islands else regions_of(module)
    if regions:
        return f"{reason_for_region(regions[0])}. Compute with fixed shapes, or call torch instead: {_CALL}"
    found = [node for node in module.graph.nodes if _is_operator(node) and not is_known(node)]
    if islands:
        found = [node for node in found if ineligible_reason(node) is not None]
    if not found:
        return None
    run = set(_nodes_to_run(module))  # without operators on constants, which torch computes
    return next((without_lowering(node) for node in found if node in run), None)


def share_without_lowering(module: fx.GraphModule) -> float:
    """Return the share of a graph's operators that have neither a lowering nor a translatable decomposition."""
    nodes = list(filter(_is_operator, _nodes_to_run(module)))
    return sum(not has_lowering(node) and _lacks_lowering(node) for node in nodes) / max(len(nodes), 1)


def _lacks_lowering(node: fx.Node) -> bool:
    if not decomposable(node):
        return True
    try:
        return missing_lowering_reason(decomposition(node)) is not None
    except Exception as error:  # noqa: BLE001  (torch's code for it does not take such arguments)
        raise_if_from_signal(error)
        return True


class OperatorCounts:
    """The operators of a graph, and how they are translated.

    Attributes:
        all: how often each operator is run.
        decomposed: the operators that run as torch's decomposition into others.
        missing: the operators that prevent a translation, also inside decompositions.
    """

    def __init__(self, module: fx.GraphModule):
        nodes = list(filter(_is_operator, _nodes_to_run(module)))
        inside = [node for region in regions_of(module) for node in region_of(region).graph.nodes if _is_operator(node)]
        self.all = dict(collections.Counter(_operator_name(node) for node in (*nodes, *inside)).most_common())
        self.decomposed = tuple(sorted({_operator_name(n) for n in nodes if not has_lowering(n) and decomposable(n)}))
        self.missing = tuple(sorted(set(_missing(module))))


def has_lowering(node: fx.Node) -> bool:
    """Return whether a node's operator has a lowering."""
    return isinstance(node.target, OpOverload) and find(node.target) is not None


def describe_node(node: fx.Node) -> str:
    """Return the name of a node's operator, and the place in the user's code that called it."""
    notes = origin(node)
    places = [text for text in (notes.get("module"), notes.get("line")) if text]
    return f"operator `{_operator_name(node)}`" + (f" ({', '.join(places)})" if places else "")


def _nodes_to_run(module: fx.GraphModule) -> list[fx.Node]:
    """Return the nodes that the results depend on, without folded constants, in order."""
    nodes = list(module.graph.nodes)
    known = folded(nodes)
    return [node for node in needed_nodes(nodes, known) if node not in known]


def _missing(module: fx.GraphModule) -> Iterator[str]:
    for node in filter(_is_operator, _nodes_to_run(module)):
        if not is_known(node):
            yield _operator_name(node)
        elif not has_lowering(node):
            try:
                parts = decomposition(node)
            except Exception as error:  # noqa: BLE001  (torch's code for it does not take such arguments)
                raise_if_from_signal(error)
                yield _operator_name(node)
            else:
                yield from _missing(parts)


def _is_operator(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target not in _PLAIN


def is_known(node: fx.Node) -> bool:
    """Return whether a node's operator has a lowering or a decomposition."""
    return has_lowering(node) or decomposable(node)


def without_lowering(node: fx.Node) -> str:
    """Return why a node without a lowering cannot be translated, and the remedy."""
    call = f"call torch instead: {_CALL}"
    if _written(node) is not None:
        return (
            f"{describe_node(node)} writes to its arguments, which no lowering can. Use one that returns a copy, or "
            f"{call}"
        )
    if isinstance(node.target, types.FunctionType | types.BuiltinFunctionType):
        return (
            f"`{node.target.__name__}` of a symbolic size has no translation, which has integers as sizes. Give the "
            "size as a number, or compute it without floats"
        )
    if not isinstance(node.target, OpOverload):
        return f"{describe_node(node)} takes functions, and has no lowering. Write the function without it, or {call}"
    return (
        f"{describe_node(node)} has no lowering. Register one with "
        f"`jtbridge.register_lowering(torch.ops.{node.target})`, or {call}"
    )


def _written(node: fx.Node) -> OpOverload | None:
    """Return the mutating operator that a node calls on copies of its arguments; None if it calls none."""
    if isinstance(node.target, OpOverload) or not node.args or not isinstance(node.args[0], OpOverload):
        return None
    return node.args[0]


def _operator_name(node: fx.Node) -> str:
    return str(_written(node) or node.target)
