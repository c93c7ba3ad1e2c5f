"""The forward graph of a called function. Torch runs the graph in place of the function."""

from __future__ import annotations

import torch

from jtbridge._compat import TorchDispatchMode, forgetting_graph_sources
from jtbridge.core.functions import TorchFunction
from jtbridge.core.signals import raise_if_from_signal
from jtbridge.transforms import Vmap

from ._attempts import GraphUse
from ._graph_function import GraphFunction, ready_to_run
from ._partition import clean, outputs_of
from ._trace import trace

_RULE = 8  # the most operators that a batching rule makes from one operator


def forward_graph(fn: TorchFunction) -> GraphFunction | None:
    """Return the forward graph of a function, captured on the CPU; None if no graph computes the same.

    The graph of a batched function computes the whole batch, by torch's batching rules.
    """
    if fn.base.traits.untraceable_reason or fn.base.seeded:
        return None

    def run(*tensors: torch.Tensor) -> list[torch.Tensor]:
        if isinstance(fn, Vmap):
            with _AtMost(_RULE * fn.base.traits.operators):
                results = fn.by_torch_vmap(tensors)
        else:
            results = fn(*tensors)
        return [y.detach() for y in results]

    try:
        with forgetting_graph_sources(), fn.state.applied():
            use = GraphUse.CALL if isinstance(fn, Vmap) else GraphUse.RUN
            module = fn.base.guarded(lambda: trace(run, fn.in_types, use))
            clean(module)
            (output,) = module.graph.find_nodes(op="output")
            output.args = (tuple(outputs_of(module)),)
            return GraphFunction(fn.base, ready_to_run(module), fn.in_types, fn.out_types)
    except Exception as error:  # noqa: BLE001  (then it runs as it is)
        raise_if_from_signal(error)
        return None


class _AtMost(TorchDispatchMode):
    """Raises if too many operators run: torch.vmap loops over the batch for an operator without a batching rule."""

    def __init__(self, operators: int):
        super().__init__()
        self._left = operators

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self._left -= 1
        if self._left < 0:
            raise RuntimeError("more operators than batching rules make")
        return func(*args, **(kwargs or {}))
