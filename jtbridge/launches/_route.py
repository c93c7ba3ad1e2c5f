"""While a function is traced, its launches of Triton kernels become operators of ours."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from jtbridge._compat import last_traced_node_of, triton_wrapper_class
from jtbridge._triton import analysed_code, jit_function
from jtbridge._triton_interpreter import LANGUAGE
from jtbridge.errors import LaunchError

from ._deferred import SymbolicNumberError
from ._launch import Launch, bound
from ._memory import memories_of, shared
from ._operator import RUNNING, launch_operator, number_of
from ._written import written_parameters


def with_launches(call: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose launches are operators, for torch to run."""

    @functools.wraps(call)
    def run(*tensors: torch.Tensor) -> Any:
        with routed():
            return call(*tensors)

    return run


class _Here(threading.local):
    """The lists that a thread adds its launches to, the innermost last."""

    def __init__(self) -> None:
        self.lists: list[list[str]] = []


_HERE = _Here()
_SWITCHING = threading.Lock()
_switched: list[contextlib.ExitStack] = []  # one for each block that any thread is in


@contextlib.contextmanager
def routed() -> Iterator[list[str]]:
    """What this thread launches inside the block are operators.

    Yields a list that the names of the kernels are added to.
    """
    launched: list[str] = []
    if "triton.runtime.jit" not in sys.modules:  # no kernel can have been made; one made inside the block is not seen
        yield launched
        return
    with _SWITCHING:
        _switched.append(_switched[0] if _switched else _switch())
    _HERE.lists.append(launched)
    try:
        yield launched
    finally:
        _HERE.lists.pop()
        with _SWITCHING:
            switch = _switched.pop()
            if not _switched:
                switch.close()


def _switch() -> contextlib.ExitStack:
    """Have launches ask where they are; as it was before when what is returned is closed."""

    def routing(run: Callable[..., Any]) -> Callable[..., Any]:
        def routed_run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            if warmup or not _is_here():
                return run(kernel, *args, grid=grid, warmup=warmup, **kwargs)
            return _HERE.lists[-1].append(_launched(kernel, grid, args, kwargs))

        return routed_run

    wrapper = triton_wrapper_class()
    own_call = wrapper.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not _is_here():
            return own_call(self, *args, **kwargs)
        return _HERE.lists[-1].append(_launched(self.kernel, self.grid, args, kwargs))

    jit, autotuner = (sys.modules[f"triton.runtime.{name}"] for name in ("jit", "autotuner"))
    switch = contextlib.ExitStack()
    for kind in (jit.JITFunction, autotuner.Autotuner, autotuner.Heuristics):
        switch.callback(setattr, kind, "run", kind.run)
        kind.run = routing(kind.run)
    switch.callback(setattr, wrapper, "__call__", own_call)
    wrapper.__call__ = call
    return switch


def _is_here() -> bool:
    return bool(_HERE.lists) and not RUNNING.kernel


def _launched(kernel: Any, grid: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Launch a kernel as an operator; its name."""
    launch, tensors = bound(kernel, grid, args, kwargs)
    if not tensors:
        raise LaunchError(f"Kernel `{launch.name}` is launched on no tensor.")
    if any(isinstance(size, torch.SymInt) for tensor in tensors for size in (*tensor.shape, tensor.storage_offset())):
        raise SymbolicNumberError(
            f"Kernel `{launch.name}` was given a tensor of a symbolic size: give it one of a fixed size."
        )
    memories, places = memories_of(tensors)
    names = _written(launch, tensors)
    written = {place.memory for name, place in zip(launch.tensors, places, strict=True) if name in names}
    launch = dataclasses.replace(launch, places=tuple(places), written=tuple(sorted(written)))
    if shared(memories, launch.written):
        raise LaunchError(
            f"Kernel `{launch.name}` writes to memory that it is given as tensors of several dtypes, or as parts of a "
            "tensor that are not known to belong together, as after `.detach()`. Give it one of the tensors a memory "
            "of its own (`.clone()`)."
        )
    results = launch_operator(memories, number_of(launch))
    _note(launch)
    for position, result in zip(launch.written, results, strict=True):
        memories[position].copy_(result)
    return launch.name


def _note(launch: Launch) -> None:
    """Have the node that a launch became, if it is traced, keep the launch alive.

    Those of an operator that writes to its arguments are traced where nobody else looks at them.
    """
    node = last_traced_node_of(launch_operator._opoverload)
    if node is not None:
        node.meta["custom"] = {**(node.meta.get("custom") or {}), "launch": launch}


def _written(launch: Launch, tensors: Sequence[torch.Tensor]) -> Collection[str]:
    """The names of the tensors that a kernel writes; of all of them where that cannot be told."""
    launched = {**dict(zip(launch.tensors, tensors, strict=True)), **launch.values}
    values = {**launch.values, **launch.configurations(launched)[0].constants}
    for name, tensor in zip(launch.tensors, tensors, strict=True):
        values[name] = _example(tensor, is_number=name in launch.numbers)
    # With their types, for 1, 1.0 and True are equal.
    names = _written_names(jit_function(launch.kernel), tuple((n, type(v), v) for n, v in sorted(values.items())))
    return launch.tensors if names is None else names


@functools.lru_cache(maxsize=256)  # a function that is called launches the same again and again
def _written_names(function: Any, arguments: tuple[tuple[str, type, Any], ...]) -> frozenset[str] | None:
    with LANGUAGE:
        code = analysed_code(function, {name: value for name, _, value in arguments})
    names = written_parameters(code, function.arg_names)
    return None if names is None else frozenset(names)


def _example(tensor: torch.Tensor, *, is_number: bool) -> Any:
    """What stands for a tensor there: its dtype, or a number like the one that is read from it."""
    if not is_number:
        return tensor.dtype
    return 2.0 if tensor.dtype.is_floating_point else 2
