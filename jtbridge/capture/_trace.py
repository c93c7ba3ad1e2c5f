"""Traces of a torch function to a functional ATen graph, whose nodes record where they came from.

The origin of a node is in ``node.meta["custom"]``, which torch keeps when a graph is traced again:

- ``module``: the path of the module that ran the operator.
- ``line``: file and line of the user's code.
- ``backward``: the node computes the gradient of an operator that ran there.
- ``draw``: the number of a random operator among the draws of the function, as a tuple. The forward and its
  recomputation have the same number.
- ``launch``: the launch of a Triton kernel.

``node.meta["detached"]`` says that other nodes use a detach of the node, which is left out of the graph. A graph's own
``meta["keeps"]`` says whether the function stored a tensor that depends on its arguments.
"""

from __future__ import annotations

import contextlib
import sys
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import torch
from torch import fx

from jtbridge import _rng
from jtbridge._compat import (
    TorchDispatchMode,
    autograd_place,
    last_traced_node_of,
    overload_of,
    running_modules,
    trace_joint,
    tracing,
)
from jtbridge._dtypes import torch_dtype
from jtbridge._functions import ArrayType
from jtbridge.state import start_over
from jtbridge.triton import intercepted_launches
from jtbridge.triton.launches import find_launch, launch_operator, with_late_scalars

from ._branches import BranchOracle, traced_both_ways
from ._closed_over import CudaAsCpuMode, may_be_on_gpu, with_closed_over
from ._constant_eval import ConstantEvalMode
from ._exceptions import none_caught
from ._frames import is_library
from ._fused_lstm import WithoutFusedLstm
from ._overrides import CopiedTensors, OverrideMode
from ._statistics import keep_statistics_wide
from .chains import FusionPatterns

_DETACHING = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)  # torch 2.15 traces `detach` as the latter
_LAUNCH = overload_of(launch_operator)


def trace(fn: Callable[..., Sequence[Any]], types: Sequence[ArrayType], *, to_run: bool) -> fx.GraphModule:
    """Return the functional graph of ``fn``, after autograd, on tensors of the given types.

    With `to_run`, torch runs the graph. Otherwise the graph is translated, and may hold operators made for that.
    """
    module = _traced(fn, types, to_run)
    # A stored tensor that depends on arguments is state if the function reads it. A second trace, which has the tensor
    # from its beginning, shows that.
    return _traced(fn, types, to_run) if module.meta["keeps"] else module


def _traced(fn: Callable[..., Sequence[Any]], types: Sequence[ArrayType], to_run: bool) -> fx.GraphModule:
    if to_run:
        return trace_on(fn, examples(types, called_on()), to_run=True)
    return FusionPatterns().settled(lambda chains: trace_on(fn, examples(types), to_run=False, chains=chains))


def trace_on(
    fn: Callable[..., Sequence[Any]],
    tensors: Sequence[torch.Tensor],
    *,
    to_run: bool,
    chains: FusionPatterns | None = None,
) -> fx.GraphModule:
    """Return the functional graph of ``fn``, after autograd, on tensors like `tensors`, whose sizes may be symbols.

    The graph is that of a CPU, with composite operators that oneDNN would take over written out. Each chain of
    operators in `chains` that can be one operator of jtbridge is replaced by that operator.
    """
    if to_run:
        return _trace_one_way(fn, tensors, None, None)

    def trace_one(oracle: BranchOracle) -> fx.GraphModule:
        return _trace_one_way(fn, tensors, oracle, chains)

    return with_late_scalars(lambda: traced_both_ways(trace_one))


def _trace_one_way(
    fn: Callable[..., Sequence[Any]],
    tensors: Sequence[torch.Tensor],
    oracle: BranchOracle | None,
    chains: FusionPatterns | None,
) -> fx.GraphModule:
    start_over()
    on_cpu = CudaAsCpuMode() if oracle is not None and may_be_on_gpu() else None
    # A function that is called reads closed-over tensors in each call: its graphs must not hold their values.
    known = (
        ConstantEvalMode(answers=oracle is not None)
        if on_cpu is None
        else ConstantEvalMode(stands_for=on_cpu.stands_for)
    )
    with (
        tracing(),
        _rng.tracing(),
        intercepted_launches(),
        WithoutFusedLstm(),
        contextlib.nullcontext() if oracle is None else OverrideMode(),
        on_cpu or contextlib.nullcontext(),
        CopiedTensors(),
    ):
        try:
            module = trace_joint(_noted(fn, oracle, chains, known), tensors)
        finally:
            keeps = known.materialize()
    module.meta["keeps"] = keeps
    if on_cpu is not None:
        with_closed_over(module)
    if oracle is not None:
        keep_statistics_wide(module.graph)
    for detaching in _DETACHING:
        for node in module.graph.find_nodes(op="call_function", target=detaching):
            node.args[0].meta["detached"] = any(user.op != "output" for user in node.users)
            node.replace_all_uses_with(node.args[0])
            module.graph.erase_node(node)
    return module


def examples(types: Sequence[ArrayType], device: str = "cpu") -> list[torch.Tensor]:
    """Return tensors of the given types to trace on; their values mean nothing."""
    return [torch.empty(type_.shape, dtype=torch_dtype(type_.dtype, "an argument"), device=device) for type_ in types]


def called_on() -> str:
    """Return the type of device on which called functions are assumed to run: graphs differ between devices."""
    return "cuda" if jax.default_backend() == "gpu" and torch.cuda.is_available() else "cpu"


def origin(node: fx.Node) -> dict[str, Any]:
    """Return the origin of a node: the notes in its ``meta["custom"]``."""
    return node.meta.get("custom") or {}


def _noted(
    fn: Callable[..., Sequence[Any]],
    oracle: BranchOracle | None,
    chains: FusionPatterns | None,
    known: ConstantEvalMode,
) -> Callable[..., Sequence[Any]]:
    """Return `fn` with the modes that note the origin of nodes; with an `oracle` it also returns the conditions."""

    def run(*tensors: torch.Tensor) -> Sequence[Any]:
        modules = _ModulePaths()
        trail = contextlib.nullcontext() if chains is None else chains.trail()
        with modules.followed(), ProvenanceMode(modules, oracle), known, trail, none_caught():
            results = fn(*tensors)
        return results if oracle is None else [*results, *oracle.conditions]

    return run


class _ModulePaths:
    """The path of the running module, from the outermost module."""

    def __init__(self) -> None:
        self._base: types.FrameType | None = None  # the frame that runs the function
        self._root: torch.nn.Module | None = None
        self._names: dict[torch.nn.Module, str] = {}

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        """Follow the modules that are called until the block ends."""
        self._base = sys._getframe(2)  # the frame of the `with` statement
        try:
            yield
        finally:
            self._base = None  # the frame refers to the results, which would seem to be stored

    @property
    def current(self) -> str:
        modules = running_modules(self._base)
        if not modules:
            return ""
        if modules[0] is not self._root:
            self._root = modules[0]
            root = type(self._root).__name__
            self._names = {child: f"{root}.{name}" if name else root for name, child in self._root.named_modules()}
        return self._names.get(modules[-1], type(modules[-1]).__name__)


class ProvenanceMode(TorchDispatchMode):
    """Records the origin of every new node."""

    def __init__(self, modules: _ModulePaths, oracle: BranchOracle | None):
        super().__init__()
        self._modules = modules
        self._oracle = oracle
        self._draws: dict[int, int] = {}
        self._steps: dict[int, dict[str, Any]] = {}  # by the number that autograd gives a step

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        notes = self._notes()
        if torch.Tag.nondeterministic_seeded in func.tags:
            notes["draw"] = (self._draw(),)
        if self._oracle is not None and (answer := self._oracle.answer(func, args)) is not NotImplemented:
            return answer
        if func is _LAUNCH:
            notes["launch"] = find_launch(args[1])
        out = func(*args, **(kwargs or {}))
        node = last_traced_node_of(func)
        if node is not None:
            node.meta["custom"] = notes
        return out

    def _notes(self) -> dict[str, Any]:
        """Return the origin of an operator; in the backward, that of the operator whose gradient it computes."""
        step, backward = autograd_place()
        if backward:
            return {**self._steps.get(step, {"module": "", "line": ""}), "backward": True}
        notes = {"module": self._modules.current, "line": user_line()}
        self._steps.setdefault(step, notes)  # the first operator stands for the whole step
        return dict(notes)

    def _draw(self) -> int:
        """Return the number of this draw; in a recomputation, the number of the draw in the forward."""
        return self._draws.setdefault(_rng.next_draw(), len(self._draws))


def line_of(error: BaseException) -> str:
    """Return file and line of the user's code that an exception came from; an empty text if no user code ran."""
    lines = [f"{frame.f_code.co_filename}:{line}" for frame, line in traceback.walk_tb(error.__traceback__)]
    return next((line for line in reversed(lines) if _is_users(line)), "")


def user_line() -> str:
    """Return file and line of the innermost frame of the user's code; an empty text without such a frame."""
    frame = sys._getframe(2)
    while frame is not None:
        if _is_users(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def _is_users(file: str) -> bool:
    return not is_library(file) and not file.startswith("<") and file != contextlib.__file__
