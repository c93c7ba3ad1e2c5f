"""Torch's tracing of functions to graphs, on which torch.export and torch.compile build."""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from operator import getitem
from typing import Any, cast

import torch

from ._torch import FakeTensorMode, OpOverload
from ._torch_fields import undeclared_writes

TRACING = threading.RLock()


class _TracingDepth(threading.local):
    """The number of :func:`tracing` blocks that this thread is in."""

    depth = 0


_HERE = _TracingDepth()


@contextlib.contextmanager
def tracing() -> Iterator[None]:
    """Let one thread at a time run a function on fake tensors. This lock is taken before the locks of modules.

    Nothing that another thread could see is changed: the setting of torch.compile belongs to this thread, and so does
    the counter that the filter of the logger reads.
    """
    _filter_log()
    with TRACING, _without_compiling():
        _HERE.depth += 1
        try:
            yield
        finally:
            _HERE.depth -= 1


@functools.cache
def _filter_log() -> None:
    """Stop torch from logging the tracebacks of exceptions on fake tensors while a thread traces.

    These exceptions are raised as well. The filter is added once and stays; it drops records of tracing threads only.
    Tried on torch 2.13.
    """
    logging.getLogger("torch._subclasses.fake_tensor").addFilter(lambda record: not _HERE.depth)


def _without_compiling() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which a compiled function runs as its original, which can be traced. Tried on torch 2.13.

    The setting of torch.compile belongs to this thread.
    """
    if "torch._dynamo" not in sys.modules:  # then nothing was compiled
        return contextlib.nullcontext()
    return torch._dynamo.config.patch(disable=True)


_ATTENTION_ON_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


class AssumedSizeError(Exception):
    """A graph is right only for some of the sizes that depend on data; the message says for which."""


def trace_joint(
    fn: Callable,
    args: Sequence[torch.Tensor],
    check: Callable[[torch.fx.Graph], None],
    *,
    has_dynamic_sizes: bool,
) -> torch.fx.GraphModule:
    """Return the functional ATen graph, after autograd, of ``fn(*args)`` on fake tensors.

    The graph is passed to `check`, which may refuse it, before its writes are made functional.

    Args:
        fn, args: the function and its arguments.
        check: refuses a graph by an exception.
        has_dynamic_sizes: whether sizes and numbers in the graph may depend on data, as symbols.

    Raises:
        AssumedSizeError: the trace assumed something about such sizes.

    Tried on torch 2.13. torch.export functionalises with `dispatch_functionalize`. Here writes are made functional in a
    second trace, after autograd, because on functional tensors autograd silently loses the gradient of sparse
    conversions.
    """
    from torch._subclasses.functional_tensor import dispatch_functionalize
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    def run(*tensors: torch.Tensor) -> Any:
        tracer = get_proxy_mode().tracer  # type: ignore[union-attr]
        try:
            return fn(*tensors)
        finally:
            trackers.append(tracer.tensor_tracker)

    trackers: list[Any] = []
    try:
        graph = _make_graph(run, args, has_dynamic_sizes)
    finally:
        for tracker in trackers:
            tracker.clear()
    check(graph.graph)
    if any(_is_write(node) for node in graph.graph.nodes):
        # `_linalg_check_errors` is an effect that is not made functional here: removed, as results show an error too.
        for node in graph.graph.find_nodes(op="call_function", target=torch.ops.aten._linalg_check_errors.default):
            graph.graph.erase_node(node)
        graph = _make_graph(dispatch_functionalize(_Again(graph).run), args, has_dynamic_sizes)
    _correct_types(graph)
    return graph


def _is_write(node: torch.fx.Node) -> bool:
    target = node.target
    return isinstance(target, OpOverload) and bool(target._schema.is_mutable or undeclared_writes(target, node.args))


def _refuse_assumed_sizes(environment: Any) -> None:
    """Raise if a trace assumed something about sizes that depend on data.

    Tried on torch 2.13. Torch assumes, for example, that two such sizes are equal where tensors are added, though one
    of them may be 1. It defers the check until the graph runs, but the graph does not contain the check.
    """
    for assumed in environment.deferred_runtime_asserts.values():
        raise AssumedSizeError(f"it assumes of a size that depends on data: {assumed[0].expr}")


def _make_graph(fn: Callable[..., Any], args: Sequence[torch.Tensor], has_dynamic_sizes: bool) -> torch.fx.GraphModule:
    """Return ``make_fx(fn, tracing_mode="fake")(*args)``, without a change that another thread could see.

    Torch's `make_fx` replaces ``nn.Module.__call__`` and ``__getattr__`` by wrappers and sets a flag that makes
    compiled functions raise, on every thread. Tried on torch 2.13, where the wrappers do nothing for this tracer.
    """
    from torch.fx.experimental import proxy_tensor

    class Tracer(proxy_tensor._MakefxTracer):
        @contextlib.contextmanager
        def _init_modes_from_inputs(self, f: Any, args: Any) -> Iterator[None]:
            with super()._init_modes_from_inputs(f, args):
                self.fx_tracer.trace = functools.partial(_trace_by, self.fx_tracer)  # type: ignore[attr-defined]
                try:
                    yield
                    if has_dynamic_sizes:
                        _refuse_assumed_sizes(self.fake_tensor_mode.shape_env)  # type: ignore[union-attr]
                finally:
                    forget_tensors(self.fake_tensor_mode)

        @contextlib.contextmanager
        def _init_modes_from_parent(self, parent_tracer: Any) -> Iterator[None]:
            with super()._init_modes_from_parent(parent_tracer):
                self.fx_tracer.trace = functools.partial(_trace_by, self.fx_tracer)  # type: ignore[attr-defined]
                yield

        def _make_sub_tracer(self, *args: Any, **kwargs: Any) -> Any:
            made = super()._make_sub_tracer(*args, **kwargs)
            made.__class__ = Tracer
            return made

    tracer = Tracer(
        decomposition_table=None,
        tracing_mode="fake",
        _allow_non_fake_inputs=True,
        pre_dispatch=False,
        record_module_stack=False,
        _allow_fake_constant=False,
        _error_on_data_dependent_ops=not has_dynamic_sizes,
    )
    return tracer.trace(fn, *args)


@contextlib.contextmanager
def fake_tensors() -> Iterator[FakeTensorMode]:
    """Enter a fake mode that refers to no tensor after the block."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        try:
            yield mode
        finally:
            forget_tensors(mode)


def forget_tensors(mode: FakeTensorMode | None) -> None:
    """Drop a fake mode's weak references to the tensors that it converted, after its last trace.

    Tried on torch 2.13. The mode stays alive in reference cycles of fake tensors and graphs until Python's garbage
    collector runs. `torch.utils.swap_tensors`, and so `nn.Module.to` under some settings, refuses tensors that have
    weak references.
    """
    if mode is not None:
        mode.fake_tensor_converter.meta_converter.describer.lookup_tensor.clear()


def _trace_by(tracer: Any, root: Any, concrete_args: Any) -> torch.fx.Graph:
    """Trace a function as ``Tracer.trace`` does, without its patches."""
    tracer.root = torch.nn.Module()
    tracer.graph = torch.fx.Graph(tracer_cls=type(tracer))
    tracer.tensor_attrs = {}
    tracer.submodule_paths = None
    fn, args = tracer.create_args_for_root(root, False, concrete_args)
    tracer.create_node("output", "output", (tracer.create_arg(fn(*args)),), {}, type_expr=None)
    return tracer.graph


class _Again(torch.fx.Interpreter):
    """An interpreter that traces a graph again; the new nodes keep the "custom" metadata of the old nodes."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator, and make new tensors that it computes from only closed-over tensors functional.

        Tried on torch 2.13: the functional mode returns a functional tensor only if an argument is one or if there is
        no tensor among the arguments, and refuses to write a functional tensor to one that is not.
        """
        from torch._subclasses.functional_tensor import FunctionalTensor
        from torch.utils._pytree import tree_map_only

        result = super().call_function(target, args, kwargs)
        if not isinstance(target, OpOverload) or any(returned.alias_info for returned in target._schema.returns):
            return result

        def functional(x: torch.Tensor) -> torch.Tensor:
            stays = isinstance(x, FunctionalTensor) or x.layout is not torch.strided
            return x if stays else FunctionalTensor.to_functional(x)

        return tree_map_only(torch.Tensor, functional, result)

    def run_node(self, n: torch.fx.Node) -> Any:
        from torch.fx.experimental.proxy_tensor import get_proxy_mode

        graph = get_proxy_mode().tracer.graph  # type: ignore[union-attr]
        last = next(iter(reversed(graph.nodes)))
        result = super().run_node(n)
        if "custom" in n.meta:
            for node in reversed(graph.nodes):
                if node is last:
                    break
                node.meta["custom"] = {**n.meta["custom"], **node.meta.get("custom", {})}
        return result


def _correct_types(graph: torch.fx.GraphModule) -> None:
    """Correct the dtypes in a graph where torch's fake tensors have the wrong dtype.

    In torch 2.11 the log-sum-exp of attention on float64 tensors is float32; in 2.13 it is float64.
    """
    for node in graph.graph.find_nodes(op="call_function", target=_ATTENTION_ON_CPU):
        out, log_sum_exp = node.meta["val"]
        if out.dtype == torch.float64 != log_sum_exp.dtype:
            node.meta["val"] = (out, log_sum_exp.to(torch.float64))
            for user in node.users:
                user.meta["val"] = node.meta["val"][user.args[1]]


def lstm_in_operators(
    input: torch.Tensor,
    hx: Sequence[torch.Tensor],
    params: Sequence[torch.Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute ``torch.lstm`` by torch's decomposition into steps. Tried on torch 2.13, where it has no public name.

    The decomposition is called once per layer: for several layers it omits the dropout between them.
    """
    from torch._decomp import decompositions

    weights = decompositions.gather_params(params, has_biases, hx[0].size(2) != hx[1].size(2))
    states = list(zip(hx[0], hx[1], strict=True))
    step, directions = decompositions.one_layer_lstm, 2 if bidirectional else 1
    out, last = input.transpose(0, 1) if batch_first else input, []
    for start in range(0, num_layers * directions, directions):
        part = slice(start, start + directions)
        out, state = decompositions._rnn_helper(
            out, states[part], weights[part], has_biases, 1, 0.0, train, bidirectional, False, step
        )
        last += state
        if dropout and train and start + directions < len(states):
            out = torch.dropout(out, dropout, train=True)
    hidden, cell = zip(*last, strict=True)
    return out.transpose(0, 1) if batch_first else out, torch.stack(hidden, 0), torch.stack(cell, 0)


_MODULE_CALL = torch.nn.Module._wrapped_call_impl.__code__


def running_modules(base: types.FrameType | None) -> list[torch.nn.Module]:
    """Return the modules that are being called on this thread, the outermost first.

    The stack is searched from here to the frame `base`. Tried on torch 2.13. Torch's hooks for all modules are not
    used, because they also run on other threads, and while one exists torch.compile warns and compiles again.
    """
    found: list[torch.nn.Module] = []
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame is not base:
        if frame.f_code is _MODULE_CALL:
            found.append(frame.f_locals["self"])
        frame = frame.f_back
    return found[::-1]


def autograd_place() -> tuple[int, bool]:
    """Return the sequence number of the autograd operation that this thread runs, and whether this is its backward.

    Tried on torch 2.13. torch.compile matches backward operators with forward operators by this number.
    """
    node = torch._C._current_autograd_node()
    return (torch.autograd._get_sequence_nr() - 1, False) if node is None else (node._sequence_nr(), True)


def last_traced_node() -> torch.fx.Node | None:
    """Return the newest node of the graph that this thread traces, or None. Tried on torch 2.13; no public API."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    mode = get_proxy_mode()
    return None if mode is None else next(iter(reversed(mode.tracer.graph.nodes)), None)


def last_traced_node_of(target: OpOverload) -> torch.fx.Node | None:
    """Return the node of the last traced operator, if that is `target`; else None. `getitem` nodes do not count."""
    node = last_traced_node()
    while node is not None and node.target is getitem:  # the node takes one of several results of another node
        node = cast(torch.fx.Node, node.args[0])
    return node if node is not None and node.target is target else None


def decomposition_of(operator: OpOverload) -> Callable | None:
    """Return torch's own decomposition of an operator, or None. Tried on torch 2.13.

    The public `torch.export.default_decompositions` lacks operators that some backends of torch do not decompose.
    """
    from torch._decomp import decomposition_table

    found = decomposition_table.get(operator)
    if found is None and operator.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
        return operator.decompose
    return found


@contextlib.contextmanager
def forgetting_graph_sources() -> Iterator[None]:
    """Drop the source text of the graph modules that are made inside the block.

    Tried on torch 2.13. Every GraphModule stores its source, for tracebacks, in two caches that are never emptied.
    """
    import linecache

    from torch.fx.graph_module import _loader

    before = set(_loader.eval_cache)
    try:
        yield
    finally:
        for key in set(_loader.eval_cache) - before:
            _loader.eval_cache.pop(key, None)
            linecache.cache.pop(key, None)
