"""Tracing a torch function to a functional ATen graph, each node with where it came from.

What is known of a node besides its operator is in ``node.meta["custom"]``, which torch keeps when a graph is traced
again: ``module`` (the path of the module it ran in), ``line`` (file and line of the user's code), ``backward`` (it
computes the gradient of what ran there) and ``draw`` (which draw of the function a random operator is, as a tuple: the
same in the forward and in its recomputation); ``launch`` is the launch of a Triton kernel. A graph's own
``meta["read"]`` are the closed-over tensors whose values it depends on though it may not hold them, and
``meta["keeps"]`` says whether the function kept something that depends on its arguments.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import torch
from torch import fx

from jtbridge import _rng
from jtbridge._compat import TorchDispatchMode, autograd_place, last_traced_node_of, trace_joint, tracing
from jtbridge._dtypes import torch_dtype
from jtbridge._flat import ArrayType
from jtbridge.launches import deferring_numbers, launch_of, launch_operator, routed

from ._branches import Decisions, traced_both_ways
from ._closed_over import OnCpu, may_be_on_gpu, with_closed_over
from ._known import Known
from ._replaced import Replaced
from ._statistics import keep_statistics_wide
from .chains import Chains

_LIBRARIES = tuple(
    os.path.dirname(os.path.abspath(path)) + os.sep
    for path in (torch.__file__, os.path.dirname(__file__), jax.__file__)
) + (contextlib.__file__,)
_DETACHING = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)  # torch 2.15 traces `detach` as the latter
_LAUNCH = launch_operator._opoverload


def trace(fn: Callable[..., Sequence[Any]], types: Sequence[ArrayType], *, to_run: bool) -> fx.GraphModule:
    """The functional graph of ``fn``, after autograd, on tensors of some types.

    With `to_run`, torch itself will run it; else it is translated, and may hold operators that are there for that.
    """
    module = _traced(fn, types, to_run)
    # What depends on arguments and is kept is state, if it is read: that shows when it is there from the beginning.
    return _traced(fn, types, to_run) if module.meta["keeps"] else module


def _traced(fn: Callable[..., Sequence[Any]], types: Sequence[ArrayType], to_run: bool) -> fx.GraphModule:
    if to_run:
        return trace_on(fn, examples(types, called_on()), to_run=True)
    return Chains().settled(lambda chains: trace_on(fn, examples(types), to_run=False, chains=chains))


def trace_on(
    fn: Callable[..., Sequence[Any]], tensors: Sequence[torch.Tensor], *, to_run: bool, chains: Chains | None = None
) -> fx.GraphModule:
    """The functional graph of ``fn``, after autograd, on tensors like these, whose sizes may be symbols.

    It is the CPU's graph with composite operators that oneDNN would take over written out, and with those of `chains`
    that can be operators of ours as these.
    """
    if to_run:
        return _trace_one_way(fn, tensors, None, None)

    def trace_one(decisions: Decisions) -> fx.GraphModule:
        return _trace_one_way(fn, tensors, decisions, chains)

    return deferring_numbers(lambda: traced_both_ways(trace_one))


def _trace_one_way(
    fn: Callable[..., Sequence[Any]],
    tensors: Sequence[torch.Tensor],
    decisions: Decisions | None,
    chains: Chains | None,
) -> fx.GraphModule:
    on_cpu = OnCpu() if decisions is not None and may_be_on_gpu() else None
    # A function that is called reads what it closes over in each call: its graphs hold no values of that.
    known = Known(answers=decisions is not None) if on_cpu is None else Known(stands_for=on_cpu.stands_for)
    with (
        tracing(),
        _rng.tracing(),
        _rng.preserved_state(),
        torch.backends.mkldnn.flags(enabled=False),
        _without_fast_paths(),
        routed(),
        contextlib.nullcontext() if decisions is None else Replaced(),
        on_cpu or contextlib.nullcontext(),
    ):
        torch.default_generator.manual_seed(0)
        try:
            module = trace_joint(_noted(fn, decisions, chains, known), tensors)
        finally:
            keeps = known.settle()
    module.meta["keeps"] = keeps
    if on_cpu is not None:
        with_closed_over(module)
    if decisions is not None:
        module.meta["read"] = known.read
        keep_statistics_wide(module.graph)
    for detaching in _DETACHING:
        for node in module.graph.find_nodes(op="call_function", target=detaching):
            node.replace_all_uses_with(node.args[0])
            module.graph.erase_node(node)
    return module


def examples(types: Sequence[ArrayType], device: str = "cpu") -> list[torch.Tensor]:
    """Tensors of some types to trace on; their values mean nothing."""
    return [torch.empty(type_.shape, dtype=torch_dtype(type_.dtype, "an argument"), device=device) for type_ in types]


def called_on() -> str:
    """The type of the devices that called functions are taken to run on: graphs differ by that."""
    return "cuda" if jax.default_backend() == "gpu" and torch.cuda.is_available() else "cpu"


def origin(node: fx.Node) -> dict[str, Any]:
    """What is known of where a node came from."""
    return node.meta.get("custom") or {}


def _noted(
    fn: Callable[..., Sequence[Any]], decisions: Decisions | None, chains: Chains | None, known: Known
) -> Callable[..., Sequence[Any]]:
    def run(*tensors: torch.Tensor) -> Sequence[Any]:
        modules = _ModulePaths()
        trail = contextlib.nullcontext() if chains is None else chains.trail()
        with modules.followed(), _Notes(modules, decisions), known, trail:
            results = fn(*tensors)
        return results if decisions is None else [*results, *decisions.conditions]

    return run


@contextlib.contextmanager
def _without_fast_paths() -> Iterator[None]:
    """Without the fused transformer kernels of torch's own modules, which one graph would have and another not."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


class _ModulePaths:
    """Which module is running, by its path from the outermost one."""

    def __init__(self) -> None:
        self._stack: list[str] = []
        self._names: dict[torch.nn.Module, str] = {}

    @property
    def current(self) -> str:
        return self._stack[-1] if self._stack else ""

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        enter = torch.nn.modules.module.register_module_forward_pre_hook(self._enter)
        leave = torch.nn.modules.module.register_module_forward_hook(self._leave, always_call=True)
        try:
            yield
        finally:
            enter.remove()
            leave.remove()

    def _enter(self, module: torch.nn.Module, _: Any) -> None:
        if not self._stack:
            root = type(module).__name__
            self._names = {child: f"{root}.{name}" if name else root for name, child in module.named_modules()}
        self._stack.append(self._names.get(module, type(module).__name__))

    def _leave(self, *_: Any) -> None:
        if self._stack:
            self._stack.pop()


class _Notes(TorchDispatchMode):
    """Writes down for every new node where it came from."""

    def __init__(self, modules: _ModulePaths, decisions: Decisions | None):
        super().__init__()
        self._modules = modules
        self._decisions = decisions
        self._draws: dict[int, int] = {}
        self._steps: dict[int, dict[str, Any]] = {}  # by autograd's number of them

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        notes = self._notes()
        if torch.Tag.nondeterministic_seeded in func.tags:
            notes["draw"] = (self._draw(),)
        if self._decisions is not None and (answer := self._decisions.answer(func, args)) is not NotImplemented:
            return answer
        if func is _LAUNCH:
            notes["launch"] = launch_of(args[1])
        out = func(*args, **(kwargs or {}))
        node = last_traced_node_of(func)
        if node is not None:
            node.meta["custom"] = notes
        return out

    def _notes(self) -> dict[str, Any]:
        """Where an operator is: of one in the backward, where the operator is whose gradient it computes."""
        step, backward = autograd_place()
        if backward:
            return {**self._steps.get(step, {"module": "", "line": ""}), "backward": True}
        notes = {"module": self._modules.current, "line": _user_line()}
        self._steps.setdefault(step, notes)  # what comes later in a step records none of its own
        return dict(notes)

    def _draw(self) -> int:
        """The number of this draw. The state of the generator tells a recomputation that started from the same one."""
        state = torch.default_generator.initial_seed()
        torch.default_generator.manual_seed(state + 1)
        return self._draws.setdefault(state, len(self._draws))


def line_of(error: BaseException) -> str:
    """File and line of the user's code that an exception came from; empty if none of it ran."""
    lines = [f"{frame.f_code.co_filename}:{line}" for frame, line in traceback.walk_tb(error.__traceback__)]
    return next((line for line in reversed(lines) if _is_users(line)), "")


def _user_line() -> str:
    """File and line of the innermost frame that is neither torch's nor ours."""
    frame = sys._getframe(2)
    while frame is not None:
        if _is_users(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def _is_users(file: str) -> bool:
    return not file.startswith((*_LIBRARIES, "<"))
