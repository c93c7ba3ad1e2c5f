"""Reverse mode that runs the forward once: a forward graph that also returns residuals, and a backward graph.

The function and its torch gradient are traced together, after autograd, so `autograd.Function`, `no_grad`, `detach`
and custom operators have already taken effect. Torch's partitioner then decides which residuals the forward keeps.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import fx

from jtbridge._compat import OpOverload, TorchDispatchMode, forgetting_graph_sources, materializes_gradients, schema_of
from jtbridge.core import random_numbers
from jtbridge.core.array_types import ArrayType, Tensors
from jtbridge.core.dtypes import canonical_dtype, numpy_dtype
from jtbridge.core.functions import TorchFunction, TracedFunction
from jtbridge.core.torch_state import TorchState
from jtbridge.errors import DTypeError, MutationError, RandomnessError
from jtbridge.transforms import Vjp, Vmap, conjugate
from jtbridge.triton import with_intercepted_launches

from ._constants import lift_constants
from ._destinations import with_destinations
from ._trace import trace
from .modes.graph_reads import GraphReads

_RULE = 8  # a batching rule makes at most so many operators from one


@dataclasses.dataclass(eq=False)
class GraphFunction(TorchFunction):
    """A captured graph on flat tensors. Derivatives are taken of the captured function, never of the graph."""

    owner: TracedFunction
    module: fx.GraphModule
    in_types: tuple[ArrayType, ...]
    out_types: tuple[ArrayType, ...]
    seed: int | None = None  # position of the seed among the inputs, for graphs that draw

    def __post_init__(self) -> None:
        self._run = self._runner(self.module)
        self._on_gpus: dict[torch.device, Callable[..., Tensors]] = {}

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
        run = self._run if not tensors or tensors[0].is_cpu else self._on_gpu(tensors[0].device)
        if self.seed is None:
            return run(*tensors)
        with random_numbers.seeded(tensors[self.seed]):
            return run(*tensors)

    def _on_gpu(self, device: torch.device) -> Callable[..., Tensors]:
        if device not in self._on_gpus:
            with forgetting_graph_sources():
                self._on_gpus[device] = self._runner(on_device(self.module, device))
        return self._on_gpus[device]

    def writing(self) -> tuple[GraphFunction, tuple[int, ...]]:
        """Return the graph with destinations after its inputs, and the positions of the results written there."""
        with forgetting_graph_sources():
            module, positions = with_destinations(self.module)
        types = tuple(self.out_types[position] for position in positions)
        return dataclasses.replace(self, module=module, in_types=(*self.in_types, *types)), positions


def on_device(module: fx.GraphModule, device: torch.device) -> fx.GraphModule:
    """Return a copy of a graph that has its constants on a device and makes its tensors there."""
    attributes = {
        str(node.target): getattr(module, str(node.target)) for node in module.graph.find_nodes(op="get_attr")
    }
    moved = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in attributes.items()}
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    for node in graph.nodes:
        if node.kwargs.get("device") is not None:
            node.kwargs = {**node.kwargs, "device": device}
    return fx.GraphModule(moved, graph)


@dataclasses.dataclass(frozen=True)
class Split:
    """Forward ``x -> (y, residuals)`` and backward ``(x, y, residuals, ct) -> grads``.

    The backward takes only some of x, y and the residuals: `sources` are positions in their concatenation.
    """

    forward: TorchFunction
    backward: TorchFunction
    sources: tuple[int, ...]


def split(fn: TorchFunction, wrt: tuple[int, ...], outs: tuple[int, ...], *, translated: bool) -> Split | str:
    """Split a function and its gradient into forward and backward, or return why this is impossible.

    Without a split, the backward runs the forward again. A batched function is traced under torch.vmap and then split.
    If it will be `translated`, the function of one row is split, and the forward and the backward are batched.
    """
    splits = fn.base.cache.splits
    key = (fn, wrt, outs, translated)
    if key not in splits:
        splits[key] = (
            _split_by_row(fn, wrt, outs)
            if translated and isinstance(fn, Vmap)
            else _try_split(fn, wrt, outs, translated)
        )
    return splits[key]


def _split_by_row(fn: Vmap, wrt: tuple[int, ...], outs: tuple[int, ...]) -> Split | str:
    row = split(fn.fn, wrt, outs, translated=True)
    if isinstance(row, str):
        return row
    if fn.base.seeded and fn.dims[len(fn.base.in_types) - 1] is not None:
        return "every row of the batch draws with a key of its own"
    count = len(fn.in_types)
    saved = tuple(fn.dims[source] if source < count else 0 for source in row.sources)
    shared = tuple(position for position, i in enumerate(wrt) if fn.dims[i] is None)
    return Split(
        forward=Vmap(row.forward, fn.dims, fn.size),
        backward=Vmap(row.backward, (*saved, *(0,) * len(outs)), fn.size, shared),
        sources=row.sources,
    )


def _try_split(fn: TorchFunction, wrt: tuple[int, ...], outs: tuple[int, ...], translated: bool) -> Split | str:
    if fn.base.residuals == "recompute":
        return 'residuals="recompute" was asked for'
    traits = fn.base.traits
    reason = traits.untranslatable if translated else traits.untraceable
    if reason:
        return f"it cannot be traced: {reason}"
    if fn.base.seeded and fn.in_types[-1].shape != random_numbers.SEED_SHAPE:
        return "every row of the batch draws with a key of its own"
    if fn.order > 0:
        return "only first derivatives keep residuals"
    try:
        with forgetting_graph_sources():
            joint = fn.base.guarded(lambda: _trace(fn, wrt, outs, translated))
            return _partition(fn, joint, wrt, outs)
    except _CannotSplit as reason:
        return str(reason)
    except (MutationError, RandomnessError):
        raise
    except Exception as error:  # noqa: BLE001  (what torch cannot trace, it can still run)
        return f"{type(error).__name__} while tracing its gradient: {error}"


def forward_graph(fn: TorchFunction) -> GraphFunction | None:
    """Return the graph of a function without its gradient; None if no graph does exactly the same as the function.

    The graph of a batched function computes the whole batch, by torch's batching rules.
    """
    if fn.base.traits.untraceable or fn.base.seeded:
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
            module = fn.base.guarded(lambda: trace(run, fn.in_types, to_run=True))
            _clean(module)
            (output,) = module.graph.find_nodes(op="output")
            output.args = (tuple(_outputs(module)),)
            return GraphFunction(fn.base, _finished(module), fn.in_types, fn.out_types)
    except Exception:  # noqa: BLE001  (then it runs as it is)
        return None


class _AtMost(TorchDispatchMode):
    """Raises after a number of operators: torch.vmap loops over the batch where an operator has no batching rule."""

    def __init__(self, operators: int):
        super().__init__()
        self._left = operators

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self._left -= 1
        if self._left < 0:
            raise RuntimeError("more operators than batching rules make")
        return func(*args, **(kwargs or {}))


class _CannotSplit(Exception):
    """A joint graph cannot be split; the text says why."""


def _trace(fn: TorchFunction, wrt: tuple[int, ...], outs: tuple[int, ...], translated: bool) -> fx.GraphModule:
    """Trace the joint graph of a function: from arguments and cotangents to results and gradients."""
    pullback = Vjp(fn, wrt, outs)
    count = len(fn.in_types)

    def joint(*tensors: torch.Tensor) -> list[torch.Tensor]:
        cotangents = [conjugate(ct) for ct in tensors[count:]]
        reads = GraphReads()
        results, grads = pullback.by_autograd(tensors[:count], cotangents, around=reads)
        fn.base.cache.reads_graph = fn.base.cache.reads_graph or reads.found
        if len(outs) > 1 and (reads.hooks or not materializes_gradients([results[o] for o in outs])):
            raise _CannotSplit("its backward may tell a gradient of zeros from none")
        return [*(y.detach() for y in results), *(conjugate(g) for g in grads)]

    with fn.base.trace_state.differentiable().applied():
        module = trace(joint, pullback.in_types, to_run=not translated)
    lift_constants(module, fn.base)
    return module


def _partition(fn: TorchFunction, joint: fx.GraphModule, wrt: tuple[int, ...], outs: tuple[int, ...]) -> Split:
    """Split a joint graph by torch's partitioner."""
    from functorch.compile import default_partition

    count, results = len(fn.in_types), len(fn.out_types)
    _clean(joint)
    for i, node in enumerate(joint.graph.find_nodes(op="placeholder")):
        # The names by which torch's partitioner tells arguments from cotangents.
        node.target = f"primals_{i + 1}" if i < count else f"tangents_{i - count + 1}"
        node.name = node.target
    _tag_forward(joint, results)
    joint.recompile()
    forward, backward = default_partition(joint, [], num_fwd_outputs=results)
    forward.graph.eliminate_dead_code()
    backward.graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))
    for node in backward.graph.nodes:
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            raise _CannotSplit(f"its backward draws random numbers ({node.target})")
    residuals = _replay_views(forward, backward, results)
    return _as_split(fn, wrt, outs, forward, backward, residuals)


def _clean(joint: fx.GraphModule) -> None:
    """Drop unused nodes, and make the graph independent of strides, which residuals do not keep.

    Raises:
        _CannotSplit: the graph uses `as_strided`.
    """
    for node in joint.graph.nodes:
        if node.op != "call_function":
            continue
        if node.target is torch.ops.aten.view.default:
            node.target = torch.ops.aten.reshape.default
        elif "as_strided" in str(node.target):
            raise _CannotSplit("it uses as_strided, which depends on memory layout")
    joint.graph.eliminate_dead_code()


def _tag_forward(joint: fx.GraphModule, results: int) -> None:
    """Tag the nodes that the results depend on as forward; the partitioner leaves the other nodes to the backward."""
    pending = [node for node in _outputs(joint)[:results] if isinstance(node, fx.Node)]
    forward: set[fx.Node] = set()
    while pending:
        node = pending.pop()
        if node not in forward:
            forward.add(node)
            pending += node.all_input_nodes
    for node in list(forward):  # all results of an operator, so that the backward does not run it again
        while node.next.target is operator.getitem and node.next.args[0] in forward:
            node = node.next
            forward.add(node)
    for node in joint.graph.nodes:
        node.meta["partitioner_tag"] = "is_forward" if node in forward else "is_backward"


def _replay_views(forward: fx.GraphModule, backward: fx.GraphModule, results: int) -> list[fx.Node]:
    """Have the backward graph take views again; return the nodes of the forward graph to keep.

    The nodes are in the order of the backward graph's placeholders. A view is not kept but taken again from its base,
    and a constant is shared by both graphs. Otherwise the transpose of every weight would be copied into a residual.
    """
    graph = backward.graph
    kept: list[fx.Node] = list(_outputs(forward)[results:])
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
        if _is_view(node):
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


def _outputs(graph_module: fx.GraphModule) -> list[Any]:
    (output,) = graph_module.graph.find_nodes(op="output")
    return list(cast(Sequence[Any], output.args[0]))


def _is_view(node: fx.Node) -> bool:
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return False
    returns = schema_of(node.target).returns
    alias = returns[0].alias_info if len(returns) == 1 else None
    is_view = (alias is not None and not alias.is_write) or node.target is torch.ops.aten.reshape.default
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
    """Return the split, in which each saved value is an argument, a result or a residual of its own."""
    count, results = len(fn.in_types), len(fn.out_types)
    (forward_output,) = forward.graph.find_nodes(op="output")
    arguments = forward.graph.find_nodes(op="placeholder")
    result_nodes = _outputs(forward)[:results]
    known = {node: count + i for i, node in reversed(list(enumerate(result_nodes)))}
    known |= {node: i for i, node in enumerate(arguments)}
    extra: list[fx.Node] = []
    sources = []
    for node in residuals:
        if node not in known:
            known[node] = count + results + len(extra)
            extra.append(node)
        sources.append(known[node])
    packed = [_packing(fn, node) for node in extra]
    with forward.graph.inserting_before(forward_output):
        carried = [pack.pack(forward.graph, node) for pack, node in zip(packed, extra, strict=True)]
    forward_output.args = ((*result_nodes, *carried),)
    saved = backward.graph.find_nodes(op="placeholder")[: len(residuals)]
    for placeholder, source in zip(saved, sources, strict=True):
        if source >= count + results:
            packed[source - count - results].unpack(backward.graph, placeholder)
    (backward_output,) = backward.graph.find_nodes(op="output")
    backward_output.args = (tuple(_outputs(backward)),)
    all_types = [*fn.in_types, *fn.out_types, *(pack.type for pack in packed)]
    return Split(
        forward=GraphFunction(fn.base, _finished(forward), fn.in_types, tuple(all_types[count:]), _seed_position(fn)),
        backward=GraphFunction(
            fn.base,
            _finished(backward),
            (*(all_types[s] for s in sources), *(fn.out_types[o] for o in outs)),
            tuple(fn.in_types[i] for i in wrt),
        ),
        sources=tuple(sources),
    )


def _seed_position(fn: TorchFunction) -> int | None:
    return len(fn.in_types) - 1 if fn.base.seeded else None


def _finished(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Return the graph module ready to run: with detached parameters and generated code."""
    for node in graph_module.graph.find_nodes(op="get_attr"):
        value = getattr(graph_module, node.target)
        if isinstance(value, torch.nn.Parameter):
            delattr(graph_module, node.target)
            setattr(graph_module, node.target, value.detach())  # shares memory with the parameter
    graph_module.graph.lint()
    graph_module.recompile()
    return graph_module


@dataclasses.dataclass(frozen=True)
class _Packing:
    """The form in which JAX holds a residual: as it is, or as bytes if JAX lacks the dtype (int64 without x64)."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    as_bytes: bool

    @property
    def type(self) -> ArrayType:
        if self.as_bytes:
            return ArrayType((int(np.prod(self.shape)) * self.dtype.itemsize,), np.dtype(np.uint8))
        return ArrayType(self.shape, numpy_dtype(self.dtype, "a residual"))

    def pack(self, graph: fx.Graph, node: fx.Node) -> fx.Node:
        return graph.call_function(to_bytes, (node,)) if self.as_bytes else node

    def unpack(self, graph: fx.Graph, placeholder: fx.Node) -> None:
        if self.as_bytes:
            with graph.inserting_after(graph.find_nodes(op="placeholder")[-1]):
                value = graph.call_function(from_bytes, (placeholder, self.dtype, self.shape))
            value.meta = dict(placeholder.meta)
            placeholder.replace_all_uses_with(value, delete_user_cb=lambda user: user is not value)


def to_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a residual, as uint8 in one dimension."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def from_bytes(data: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the residual that :func:`to_bytes` was called with."""
    return data.view(dtype).reshape(shape)


def _packing(fn: TorchFunction, node: fx.Node) -> _Packing:
    value: Any = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        raise _CannotSplit(f"its backward needs {type(value).__name__} `{node.name}`, which is not a dense tensor")
    try:
        dtype = numpy_dtype(value.dtype, "a residual")
    except DTypeError as error:
        raise _CannotSplit(str(error)) from error
    return _Packing(tuple(value.shape), value.dtype, canonical_dtype(dtype) != dtype)
