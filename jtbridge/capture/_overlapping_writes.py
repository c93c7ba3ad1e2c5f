"""Refusal of writes through views for which torch's functional graph has other values than torch itself."""

from __future__ import annotations

from operator import getitem
from typing import Any, cast

import torch
from torch import fx
from torch.fx.node import map_arg

from jtbridge._compat import OpOverload, schema_of
from jtbridge.core.node_arguments import plain_arguments
from jtbridge.core.overlap import may_overlap, overlapping_write_reason
from jtbridge.core.writes import written_arguments
from jtbridge.errors import TranslationError


def refuse_overlapping_writes(graph: fx.Graph) -> None:
    """Refuse a graph with a write if the functional graph would compute other values than torch does.

    In some views, such as the result of `expand`, several elements share memory. Torch's functional graph of a write to
    such a view adds these elements and subtracts the old value for all but one of them. The sum is wrong if more than
    one of them was written, and inexact otherwise. If an argument overlaps the memory that the operator writes to,
    torch may read elements that it has just written.

    If the windows of `unfold` leave out elements of the tensor, torch's functional graph of a write to the windows sets
    these elements to zero.

    Raises:
        TranslationError: there is such a write.
    """
    for node in graph.nodes:
        if not isinstance(node.target, OpOverload) or torch.Tag.inplace_view in node.target.tags:
            continue
        found = overlapping_write_reason(node.target, *plain_arguments(node, lambda n: n.meta.get("val")))
        written: list[fx.Node] = []
        for position, name in written_arguments(node.target):
            map_arg(_argument(node, position, name), written.append)
        through = next(filter(None, map(_lossy_view, written)), None)
        found = found or (through and f"it writes through the result of {through}")
        if found:
            raise TranslationError(f"{found} (`{node.target}`), and this cannot be translated. Write to a `clone()`")


def _lossy_view(node: fx.Node) -> str | None:
    """Describe the first view that cannot be written back, from a node to its base; return None if there is none."""
    current: fx.Node | None = node
    while current is not None:
        value = current.meta.get("val")
        if isinstance(value, torch.Tensor):
            if may_overlap(value):
                return f"`{current.target}`, whose elements share memory"
            # The windows do not overlap, so they contain each element at most once.
            is_unfold = current.target is torch.ops.aten.unfold.default
            if is_unfold and value.numel() < current.all_input_nodes[0].meta["val"].numel():
                return f"`{current.target}`, whose windows leave out elements of the tensor"
        current = _viewed(current)
    return None


def _viewed(node: fx.Node) -> fx.Node | None:
    """Return the node that the result of a node is a view of; None if the result has its own memory."""
    if node.target is getitem:
        return cast(fx.Node, node.args[0])
    if not isinstance(node.target, OpOverload):
        return None
    schema = schema_of(node.target)
    if all(returned.alias_info is None for returned in schema.returns):
        return None
    for position, argument in enumerate(schema.arguments):
        value = _argument(node, position, argument.name)
        if argument.alias_info is not None and isinstance(value, fx.Node):
            return value
    return None


def _argument(node: fx.Node, position: int, name: str) -> Any:
    return node.kwargs.get(name, node.args[position] if position < len(node.args) else None)
