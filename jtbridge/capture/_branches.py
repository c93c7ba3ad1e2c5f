"""Functions that branch on data while they are traced: every way through is traced, and the results are selected.

``if torch.equal(a, b)`` has no answer on tensors without values. It is answered both ways, in a trace each, and the
graph that results computes both and takes what the condition, which is part of the graph, says. That is right for a few
conditions and ways of equal shapes; everything else is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from jtbridge.errors import TranslationError

_MOST = 3  # conditions on one way


class Decisions:
    """The answers to the conditions that one trace meets, and the conditions themselves."""

    def __init__(self, given: Sequence[bool] = ()):
        self.given = given
        self.conditions: list[torch.Tensor] = []

    def answer(self, func: Any, args: Sequence[Any]) -> bool | None:
        """What an operator that asks for the truth of data is told; None if it does not ask."""
        if func is torch.ops.aten.equal.default:
            a, b = args
            if a.shape != b.shape or a.dtype != b.dtype:
                return False
            return self._decided((a == b).all())
        if func is torch.ops.aten._local_scalar_dense.default and args[0].dtype is torch.bool:
            return self._decided(args[0].reshape(()))
        return None

    def _decided(self, condition: torch.Tensor) -> bool:
        number = len(self.conditions)
        if number >= _MOST:
            raise TranslationError(f"it branches on data more than {_MOST} times")
        self.conditions.append(condition.detach())
        return self.given[number] if number < len(self.given) else True


def traced_both_ways(trace: Callable[[Decisions], fx.GraphModule]) -> fx.GraphModule:
    """The graph of all ways through a function.

    Args:
        trace: traces one way, its graph returning the results and then the conditions.
    """
    return _from(trace, ())


def _from(trace: Callable[[Decisions], fx.GraphModule], given: tuple[bool, ...]) -> fx.GraphModule:
    decisions = Decisions(given)
    module = trace(decisions)
    if len(decisions.conditions) == len(given):
        _drop_outputs(module, len(given))
        return module
    position = len(given) - len(decisions.conditions)  # from the end
    return _selected(module, position, _from(trace, (*given, True)), _from(trace, (*given, False)))


def _drop_outputs(module: fx.GraphModule, count: int) -> None:
    if count:
        (output,) = module.graph.find_nodes(op="output")
        output.args = (output.args[0][:-count],)
        module.graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))
        module.recompile()


def _selected(module: fx.GraphModule, position: int, yes: fx.GraphModule, no: fx.GraphModule) -> fx.GraphModule:
    """The results of `yes` or of `no`, as an output of `module` says."""
    root = torch.nn.Module()
    graph = fx.Graph()
    places = []
    for node in module.graph.find_nodes(op="placeholder"):
        places.append(graph.placeholder(str(node.target)))
        places[-1].meta = dict(node.meta)

    def inlined(part: fx.GraphModule) -> list[Any]:
        for node in part.graph.find_nodes(op="get_attr"):
            name = f"{node.target}_{len(root._buffers)}"
            root.register_buffer(name, getattr(part, str(node.target)))
            node.target = name
        known = dict(zip(part.graph.find_nodes(op="placeholder"), places, strict=True))
        return list(graph.graph_copy(part.graph, known))  # type: ignore[arg-type]

    condition = inlined(module)[position]
    outputs = []
    for a, b in zip(inlined(yes), inlined(no), strict=True):
        if a.meta["val"].shape != b.meta["val"].shape or a.meta["val"].dtype != b.meta["val"].dtype:
            raise TranslationError("it branches on data, to results of different shapes or dtypes")
        outputs.append(graph.call_function(torch.ops.aten.where.self, (condition, a, b)))
        outputs[-1].meta = {"val": a.meta["val"]}
    graph.output(outputs)
    graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))
    return fx.GraphModule(root, graph)
