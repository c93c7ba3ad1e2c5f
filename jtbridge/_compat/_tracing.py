"""How torch traces a function, which torch.export and torch.compile build on."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from operator import getitem
from typing import Any, cast

import torch

from ._torch import FakeTensorMode, OpOverload


@contextlib.contextmanager
def exporting() -> Iterator[None]:
    """Make ``torch.compiler.is_exporting()`` true: model code then avoids branching on data.

    Tried on torch 2.13. The flag has no public setter; without it Hugging Face's mask code reads tensor values. While
    it is set, a TorchScript module gets its arguments wrong (it is called with itself twice): there it is off.
    """
    before = torch.compiler._is_exporting_flag
    thread = threading.get_ident()

    def set_flag(module: torch.nn.Module, value: bool) -> None:
        if isinstance(module, torch.jit.ScriptModule) and threading.get_ident() == thread:
            torch.compiler._is_exporting_flag = value

    hooks = torch.nn.modules.module
    with contextlib.ExitStack() as stack:
        stack.callback(setattr, torch.compiler, "_is_exporting_flag", before)
        entering = hooks.register_module_forward_pre_hook(lambda module, _: set_flag(module, before))
        leaving = hooks.register_module_forward_hook(lambda module, *_: set_flag(module, True), always_call=True)
        stack.callback(entering.remove)
        stack.callback(leaving.remove)
        torch.compiler._is_exporting_flag = True
        yield


TRACING = threading.RLock()


@contextlib.contextmanager
def tracing() -> Iterator[None]:
    """For running a function to learn about it: exporting, and with warnings off.

    Torch warns of its own internals here, which would turn into wrong conclusions where warnings are errors; what
    concerns the user is said again when the function runs. One thread at a time: `make_fx` puts a wrapper in the place
    of ``nn.Module.__call__``, and two threads would leave it there. This lock is taken before those of modules.
    """
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    disabled = logger.disabled
    with TRACING, exporting(), warnings.catch_warnings(), _without_compiling():
        warnings.simplefilter("ignore")
        logger.disabled = True  # it prints the traceback of every exception, which is raised as well
        try:
            yield
        finally:
            logger.disabled = disabled


def _without_compiling() -> contextlib.AbstractContextManager[Any]:
    """What torch.compile made runs as the function it was made of, which can be traced. Tried on torch 2.11 to 2.15."""
    if "torch._dynamo" not in sys.modules:  # then nothing was compiled
        return contextlib.nullcontext()
    return torch._dynamo.config.patch(error_on_nested_fx_trace=False)


_ATTENTION_ON_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def trace_joint(fn: Callable, args: Sequence[torch.Tensor]) -> torch.fx.GraphModule:
    """The functional ATen graph, after autograd, of ``fn(*args)`` on fake tensors.

    Tried on torch 2.13. `make_fx` lives in an experimental module; torch.export functionalises with
    `dispatch_functionalize`. Writes are made functional only once autograd is out of the graph: on functional tensors
    autograd loses the gradient of sparse conversions, in silence.
    """
    from torch._subclasses.functional_tensor import dispatch_functionalize
    from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
    from torch.fx.traceback import preserve_node_meta

    def run(*tensors: torch.Tensor) -> Any:
        tracer = get_proxy_mode().tracer  # type: ignore[union-attr]
        try:
            return fn(*tensors)
        finally:
            trackers.append(tracer.tensor_tracker)

    trackers: list[Any] = []
    try:
        graph = make_fx(run, tracing_mode="fake", _allow_non_fake_inputs=True)(*args)
    finally:
        for tracker in trackers:
            tracker.clear()
    targets = [node.target for node in graph.graph.nodes]
    if any(isinstance(target, OpOverload) and target._schema.is_mutable for target in targets):
        # It counts as an effect, which is not made functional here. Where there is an error, the results tell too.
        for node in graph.graph.find_nodes(op="call_function", target=torch.ops.aten._linalg_check_errors.default):
            graph.graph.erase_node(node)
        again = torch.fx.Interpreter(graph).run  # unlike the graph itself it keeps what is noted of each node
        with preserve_node_meta():
            graph = make_fx(dispatch_functionalize(again), tracing_mode="fake", _allow_non_fake_inputs=True)(*args)
    _correct_types(graph)
    return graph


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
