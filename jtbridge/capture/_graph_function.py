"""A captured graph as a torch function."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable

import torch
from torch import fx

from jtbridge._compat import FakeTensor, OpOverload, forgetting_graph_sources, schema_of
from jtbridge.core import random_numbers
from jtbridge.core.array_types import ArrayType, Tensors
from jtbridge.core.functions import TorchFunction, TracedFunction
from jtbridge.core.runner import unrecorded_tensor_error
from jtbridge.core.torch_state import TorchState
from jtbridge.triton import with_intercepted_launches

from ._destinations import with_destinations


@dataclasses.dataclass(eq=False)
class GraphFunction(TorchFunction):
    """A captured graph as a function of flat tensors. It has the derivatives of the captured function."""

    owner: TracedFunction
    module: fx.GraphModule
    in_types: tuple[ArrayType, ...]
    out_types: tuple[ArrayType, ...]
    seed: int | None = None  # position of the seed among the inputs, for graphs that draw

    def __post_init__(self) -> None:
        self._run = self._runner(self.module)
        self._elsewhere: dict[torch.device, Callable[..., Tensors]] = {}

    def _runner(self, module: fx.GraphModule) -> Callable[..., Tensors]:
        run = module.forward  # not `__call__`, which runs hooks of nn.Module
        return with_intercepted_launches(run) if self.owner.traits.effects.launches else run

    @property
    def base(self) -> TracedFunction:
        return self.owner

    @property
    def state(self) -> TorchState:
        return self.owner.trace_state.without_casts()

    @property
    def order(self) -> int:
        return 1

    def __call__(self, *tensors: torch.Tensor) -> Tensors:
        run = self._run
        if tensors and not (tensors[0].is_cpu and self._is_of_cpu):
            run = self._on(tensors[0].device)
        if self.seed is None:
            return run(*tensors)
        with random_numbers.seeded(tensors[self.seed]):
            return run(*tensors)

    @functools.cached_property
    def names_devices(self) -> bool:  # type: ignore[override]
        return all(map(_names_device, self.module.graph.nodes))

    @functools.cached_property
    def _is_of_cpu(self) -> bool:
        """Whether the graph has its constants on the CPU and makes its tensors there."""
        attributes = (getattr(self.module, str(x.target)) for x in self.module.graph.find_nodes(op="get_attr"))
        asked = (x.kwargs.get("device") for x in self.module.graph.nodes)
        devices = [x.device for x in attributes if isinstance(x, torch.Tensor)]
        return all(torch.device(x).type == "cpu" for x in (*devices, *asked) if x is not None)  # type: ignore[arg-type]

    def _on(self, device: torch.device) -> Callable[..., Tensors]:
        if device not in self._elsewhere:
            with forgetting_graph_sources():
                self._elsewhere[device] = self._runner(on_device(self.module, device))
        return self._elsewhere[device]

    def writing(self) -> tuple[GraphFunction, tuple[int, ...]]:
        """Return the graph with destinations after its inputs, and the positions of the results written there."""
        with forgetting_graph_sources():
            module, positions = with_destinations(self.module)
        types = tuple(self.out_types[position] for position in positions)
        return dataclasses.replace(self, module=module, in_types=(*self.in_types, *types)), positions


def on_device(module: fx.GraphModule, device: torch.device) -> fx.GraphModule:
    """Return a copy of a graph that makes its tensors on a device, and copies its constants to it in every run.

    A constant may be a closed-over tensor, which user code may write to between two runs.
    """
    copied = copied_graph(module)
    graph = copied.graph
    for node in list(graph.nodes):
        if node.kwargs.get("device") is not None:
            node.kwargs = {**node.kwargs, "device": device}
        value = getattr(copied, str(node.target)) if node.op == "get_attr" else None
        if isinstance(value, torch.Tensor) and value.device != device:
            with graph.inserting_after(node):
                here = graph.call_function(torch.ops.aten._to_copy.default, (node,), {"device": device})
            node.replace_all_uses_with(here, delete_user_cb=lambda user, here=here: user is not here)
    copied.recompile()
    return copied


def copied_graph(module: fx.GraphModule) -> fx.GraphModule:
    """Return a graph module with a copy of the graph, and with the same constants."""
    names = {str(node.target) for node in module.graph.find_nodes(op="get_attr")}
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    return fx.GraphModule({name: getattr(module, name) for name in names}, graph)


def _names_device(node: fx.Node) -> bool:
    """Return whether a node makes no tensor on the default device. Operators with a tensor `self` use its device."""
    if not isinstance(node.target, OpOverload):
        return node.op != "call_function" or node.target is operator.getitem
    names = {argument.name for argument in schema_of(node.target).arguments}
    return "device" not in names or "self" in names or node.kwargs.get("device") is not None


def ready_to_run(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Return the graph module ready to run: with detached parameters, and with generated code.

    Raises:
        TranslationError: the graph uses a fake tensor that no traced operator made, for example a `Parameter` that
            torch made from a row of a batch.
    """
    for node in graph_module.graph.find_nodes(op="get_attr"):
        value = getattr(graph_module, node.target)
        if isinstance(value, FakeTensor) and node.users:
            raise unrecorded_tensor_error()
        if isinstance(value, torch.nn.Parameter):
            delattr(graph_module, node.target)
            setattr(graph_module, node.target, value.detach())  # shares memory with the parameter
    # If the target and the name of a placeholder differ, the generated code assigns the argument to a variable. That
    # variable may have the name of another argument, whose value would then be lost.
    for node in graph_module.graph.find_nodes(op="placeholder"):
        node.target = node.name
    graph_module.graph.lint()
    graph_module.recompile()
    return graph_module
