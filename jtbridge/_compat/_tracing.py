"""How torch traces a function, which torch.export and torch.compile build on."""

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

TRACING = threading.RLock()


class _TracingDepth(threading.local):
    """Whether this thread is inside :func:`tracing`."""

    depth = 0


_HERE = _TracingDepth()


@contextlib.contextmanager
def tracing() -> Iterator[None]:
    """For running a function on fake tensors, one thread at a time. This lock is taken before those of modules.

    Nothing that another thread could see is changed: the setting of torch.compile belongs to this thread, and so does
    what the filter of the logger looks at.
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
    """Have torch not log the traceback of an exception on fake tensors, which is raised as well, while we trace.

    The filter is added once and stays; it lets everything pass that another thread logs. Tried on torch 2.13.
    """
    logging.getLogger("torch._subclasses.fake_tensor").addFilter(lambda record: not _HERE.depth)


def _without_compiling() -> contextlib.AbstractContextManager[Any]:
    """What torch.compile made runs as the function it was made of, which can be traced. Tried on torch 2.13.

    A setting of torch.compile belongs to a thread.
    """
    if "torch._dynamo" not in sys.modules:  # then nothing was compiled
        return contextlib.nullcontext()
    return torch._dynamo.config.patch(disable=True)


_ATTENTION_ON_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def trace_joint(fn: Callable, args: Sequence[torch.Tensor]) -> torch.fx.GraphModule:
    """The functional ATen graph, after autograd, of ``fn(*args)`` on fake tensors.

    Tried on torch 2.13. torch.export functionalises with `dispatch_functionalize`. Writes are made functional only once
    autograd is out of the graph: on functional tensors autograd loses the gradient of sparse conversions, in silence.
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
        graph = _make_graph(run, args)
    finally:
        for tracker in trackers:
            tracker.clear()
    targets = [node.target for node in graph.graph.nodes]
    if any(isinstance(target, OpOverload) and target._schema.is_mutable for target in targets):
        # It counts as an effect, which is not made functional here. Where there is an error, the results tell too.
        for node in graph.graph.find_nodes(op="call_function", target=torch.ops.aten._linalg_check_errors.default):
            graph.graph.erase_node(node)
        graph = _make_graph(dispatch_functionalize(_Again(graph).run), args)
    _correct_types(graph)
    return graph


def _make_graph(fn: Callable[..., Any], args: Sequence[torch.Tensor]) -> torch.fx.GraphModule:
    """``make_fx(fn, tracing_mode="fake")(*args)``, which changes nothing that another thread could see.

    Torch's own puts wrappers in the place of ``nn.Module.__call__`` and ``__getattr__`` and sets a flag that makes what
    torch.compile made raise, on every thread. Tried on torch 2.13: this tracer's wrappers do nothing.
    """
    from torch.fx.experimental import proxy_tensor

    class Tracer(proxy_tensor._MakefxTracer):
        @contextlib.contextmanager
        def _init_modes_from_inputs(self, f: Any, args: Any) -> Iterator[None]:
            with super()._init_modes_from_inputs(f, args):
                self.fx_tracer.trace = functools.partial(_trace_by, self.fx_tracer)  # type: ignore[attr-defined]
                try:
                    yield
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
        _error_on_data_dependent_ops=True,
    )
    return tracer.trace(fn, *args)


@contextlib.contextmanager
def fake_tensors() -> Iterator[FakeTensorMode]:
    """A fake mode that refers to no tensor afterwards."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        try:
            yield mode
        finally:
            forget_tensors(mode)


def forget_tensors(mode: FakeTensorMode | None) -> None:
    """Drop the weak references of a fake mode, which traces nothing any more, to the tensors that it met.

    Tried on torch 2.13. The mode stays alive in reference cycles of fake tensors and graphs until Python's collector
    runs, and `torch.utils.swap_tensors`, and so `nn.Module.to` under some settings, refuses tensors that have weak
    references.
    """
    if mode is not None:
        mode.fake_tensor_converter.meta_converter.describer.lookup_tensor.clear()


def _trace_by(tracer: Any, root: Any, concrete_args: Any) -> torch.fx.Graph:
    """What ``Tracer.trace`` does for a function, without its patches."""
    tracer.root = torch.nn.Module()
    tracer.graph = torch.fx.Graph(tracer_cls=type(tracer))
    tracer.tensor_attrs = {}
    tracer.submodule_paths = None
    fn, args = tracer.create_args_for_root(root, False, concrete_args)
    tracer.create_node("output", "output", (tracer.create_arg(fn(*args)),), {}, type_expr=None)
    return tracer.graph


class _Again(torch.fx.Interpreter):
    """Runs a graph to trace it again; the new nodes keep what is noted of the old ones."""

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
    """Where torch has a wrong dtype for a result of an operator, the right one.

    Torch 2.11 takes the log-sum-exp of attention on doubles for floats; 2.13 does not.
    """
    for node in graph.graph.find_nodes(op="call_function", target=_ATTENTION_ON_CPU):
        out, log_sum_exp = node.meta["val"]
        if out.dtype == torch.float64 != log_sum_exp.dtype:
            node.meta["val"] = (out, log_sum_exp.to(torch.float64))
            for user in node.users:
                user.meta["val"] = node.meta["val"][user.args[1]]


def symbolic_tensors(
    shapes: Sequence[Sequence[tuple[int, bool]]], dtypes: Sequence[torch.dtype]
) -> tuple[list[torch.Tensor], Any]:
    """Fake tensors some of whose sizes are symbols, and the environment that collects what is assumed of these.

    Each size is (an example of it, whether it is a symbol); symbols with the same example are the same.

    Tried on torch 2.13. torch.export does this for whole modules only, and has no way back to the graph of a function
    after autograd.
    """
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    environment = ShapeEnv()
    mode = FakeTensorMode(shape_env=environment, allow_non_fake_inputs=True)
    tensors = []
    for shape, dtype in zip(shapes, dtypes, strict=True):
        kinds = [DimDynamic.DUCK if symbolic else DimDynamic.STATIC for _, symbolic in shape]
        real = torch.empty([size for size, _ in shape], dtype=dtype)
        tensors.append(mode.from_tensor(real, symbolic_context=StatelessSymbolicContext(dynamic_sizes=kinds)))
    return tensors, environment


def symbolic_shapes(value: Any, symbols: dict[Any, torch.SymInt]) -> list[tuple[Any, ...] | None]:
    """The shapes of fake tensors with JAX's symbols for torch's (`symbols` maps the first to the second).

    Tried on torch 2.13. A size has no public form but its expression in sympy.
    """
    import sympy

    atoms = {size.node.expr: symbol for symbol, size in symbols.items()}

    def convert(size: Any) -> Any:
        if not isinstance(size, torch.SymInt):
            return size
        function = sympy.lambdify(list(atoms), size.node.expr, modules=[{"FloorDiv": lambda a, b: a // b}])
        return function(*atoms.values())

    tensors = value if isinstance(value, list | tuple) else [value]
    return [tuple(map(convert, t.shape)) if isinstance(t, torch.Tensor) else None for t in tensors]


def broken_assumption(environment: Any, sizes: Sequence[Any]) -> str | None:
    """Something that was assumed of symbolic sizes while tracing and does not hold for all of them, or None.

    Tried on torch 2.13. Guards have no public form; each is tried on a spread of sizes from 2 on, for torch treats no
    symbol as 0 or 1.
    """
    for size in sizes:
        if not isinstance(size, torch.SymInt) or environment.simplify(size.node.expr).is_number:
            return f"a size that must be {size}"
    for guard in environment.guards:
        symbols = sorted(guard.expr.free_symbols, key=str)
        for step in range(64):
            values = {
                s: (2, 3, 4, 5, 7, 8, 16, 31, 100, 1024, 4097)[(step * (i + 1)) % 11] for i, s in enumerate(symbols)
            }
            if guard.expr.subs(values) == False:  # noqa: E712  (a sympy relation)
                return str(guard.expr)
    return None


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
    """``torch.lstm``, by torch's decomposition into steps. Tried on torch 2.13, where nothing public leads to it."""
    from torch._decomp import decompositions

    layers = decompositions.gather_params(params, has_biases, hx[0].size(2) != hx[1].size(2))
    states = list(zip(hx[0], hx[1], strict=True))
    step = decompositions.one_layer_lstm
    out, last = decompositions._rnn_helper(
        input, states, layers, has_biases, num_layers, dropout, train, bidirectional, batch_first, step
    )
    hidden, cell = zip(*last, strict=True)
    return out, torch.stack(hidden, 0), torch.stack(cell, 0)


_MODULE_CALL = torch.nn.Module._wrapped_call_impl.__code__


def running_modules(base: types.FrameType | None) -> list[torch.nn.Module]:
    """The modules that are being called on this thread, the outermost first, down to a frame of the stack.

    Tried on torch 2.13. Torch's hooks for all modules are called for those of other threads as well, and while there
    are any torch.compile warns and compiles anew.
    """
    found: list[torch.nn.Module] = []
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame is not base:
        if frame.f_code is _MODULE_CALL:
            found.append(frame.f_locals["self"])
        frame = frame.f_back
    return found[::-1]


def autograd_place() -> tuple[int, bool]:
    """Which step of autograd runs on this thread: its number, and whether it is the backward of that step.

    Tried on torch 2.13. It is how torch.compile tells which forward operator a backward one belongs to.
    """
    node = torch._C._current_autograd_node()
    return (torch.autograd._get_sequence_nr() - 1, False) if node is None else (node._sequence_nr(), True)


def last_traced_node() -> torch.fx.Node | None:
    """The newest node of the graph that is being traced on this thread. Tried on torch 2.13; no public way to it."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    mode = get_proxy_mode()
    return None if mode is None else next(iter(reversed(mode.tracer.graph.nodes)), None)


def last_traced_node_of(target: OpOverload) -> torch.fx.Node | None:
    """The newest node there, or the one that it is a result of, if that is of an operator."""
    node = last_traced_node()
    while node is not None and node.target is getitem:  # of several results
        node = cast(torch.fx.Node, node.args[0])
    return node if node is not None and node.target is target else None


def decomposition_of(operator: OpOverload) -> Callable | None:
    """Torch's own decomposition of an operator, if it has one. Tried on torch 2.13.

    The public `torch.export.default_decompositions` holds fewer, for it keeps what its backends want whole.
    """
    from torch._decomp import decomposition_table

    found = decomposition_table.get(operator)
    if found is None and operator.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
        return operator.decompose
    return found


@contextlib.contextmanager
def forgetting_graph_sources() -> Iterator[None]:
    """Let go of the source text of the graph modules that are made inside.

    Tried on torch 2.13. Every GraphModule leaves its source in two caches that are never emptied, for tracebacks.
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
