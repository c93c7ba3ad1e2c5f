"""Replacement of launches of Triton kernels by the operator ``jtbridge::launch`` while a function is traced."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from jtbridge._compat import last_traced_node_of, overload_of, triton_wrapper_class
from jtbridge.errors import LaunchError
from jtbridge.triton._interpreter import LANGUAGE_LOCK
from jtbridge.triton._ir import jit_function, kernel_ir

from ._late_scalars import SymbolicScalarError
from ._launch import Launch, bind_launch
from ._memory import memories_of, overlaps_written
from ._mutation_analysis import mutated_parameters
from ._operator import RUNNING, launch_operator, register_launch


class _ActiveInterceptions(threading.local):
    """The lists of kernel names of this thread's `patched_launches` blocks, the innermost last."""

    def __init__(self) -> None:
        self.lists: list[list[str]] = []


_ACTIVE = _ActiveInterceptions()
_PATCH_LOCK = threading.Lock()
_patches: list[Callable[[], None]] = []  # the function that removes the patch, once per active block of any thread


@contextlib.contextmanager
def patched_launches() -> Iterator[list[str]]:
    """Replace this thread's launches inside the block by operators.

    Yields a list to which the names of the launched kernels are added.
    """
    launched: list[str] = []
    with _PATCH_LOCK:
        _patches.append(_patches[0] if _patches else _patch_triton())
    _ACTIVE.lists.append(launched)
    try:
        yield launched
    finally:
        _ACTIVE.lists.pop()
        with _PATCH_LOCK:
            remove = _patches.pop()
            if not _patches:
                remove()


def _patch_triton() -> Callable[[], None]:
    """Patch Triton's launches to check whether their thread intercepts them. Return a function that undoes this."""
    jit, autotuner = (sys.modules[f"triton.runtime.{name}"] for name in ("jit", "autotuner"))
    kinds = (jit.JITFunction, autotuner.Autotuner, autotuner.Heuristics)
    runs = [kind.run for kind in kinds]
    wrapper = triton_wrapper_class()
    call = wrapper.__call__
    for kind, run in zip(kinds, runs, strict=True):
        kind.run = _intercepting_run(run)
    wrapper.__call__ = _intercepting_call(call)

    def remove() -> None:
        for kind, run in zip(kinds, runs, strict=True):
            kind.run = run
        wrapper.__call__ = call

    return remove


@functools.lru_cache(maxsize=16)
def _intercepting_run(run: Callable[..., Any]) -> Callable[..., Any]:
    def run_or_intercept(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        if warmup or not _is_intercepting():
            return run(kernel, *args, grid=grid, warmup=warmup, **kwargs)
        return _ACTIVE.lists[-1].append(_apply_operator(kernel, grid, args, kwargs))

    return run_or_intercept


@functools.lru_cache(maxsize=16)
def _intercepting_call(original: Callable[..., Any]) -> Callable[..., Any]:
    def call(wrapper: Any, *args: Any, **kwargs: Any) -> Any:
        if not _is_intercepting():
            return original(wrapper, *args, **kwargs)
        return _ACTIVE.lists[-1].append(_apply_operator(wrapper.kernel, wrapper.grid, args, kwargs))

    return call


def _is_intercepting() -> bool:
    return bool(_ACTIVE.lists) and not RUNNING.kernel


def _apply_operator(kernel: Any, grid: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Apply the operator of a launch, write its results to the kernel's tensors, and return the kernel's name."""
    launch, tensors = bind_launch(kernel, grid, args, kwargs)
    if not tensors:
        raise LaunchError(f"Kernel `{launch.name}` was launched without a tensor. Pass it at least one tensor.")
    if any(isinstance(size, torch.SymInt) for tensor in tensors for size in (*tensor.shape, tensor.storage_offset())):
        raise SymbolicScalarError(
            f"Kernel `{launch.name}` was launched on a tensor whose size depends on data. Launch it on a tensor of "
            "fixed size."
        )
    memories, views = memories_of(tensors)
    names, descriptors = _mutated_tensors(launch, tensors)
    written = {view.memory for name, view in zip(launch.tensors, views, strict=True) if name in names}
    launch = dataclasses.replace(launch, views=tuple(views), written=tuple(sorted(written)), descriptors=descriptors)
    if overlaps_written(memories, launch.written):
        raise LaunchError(
            f"Kernel `{launch.name}` writes to a tensor whose storage another argument shares, with another dtype or "
            "as a view without a record of its base, such as `x.detach()`. Pass a copy of one of them (`.clone()`)."
        )
    results = launch_operator(memories, register_launch(launch))
    _keep_alive(launch)
    for position, result in zip(launch.written, results, strict=True):
        memories[position].copy_(result)
    return launch.name


def _keep_alive(launch: Launch) -> None:
    """Store a launch in the metadata of its graph node, if the launch is traced.

    The nodes of an operator that writes to its arguments are traced in an inner graph, so the node is looked up here.
    """
    node = last_traced_node_of(overload_of(launch_operator))
    if node is not None:
        node.meta["custom"] = {**(node.meta.get("custom") or {}), "launch": launch}


def _mutated_tensors(launch: Launch, tensors: Sequence[torch.Tensor]) -> tuple[Collection[str], bool]:
    """Return the names of the tensors that a kernel writes, and whether the kernel makes tensor descriptors.

    If the analysis cannot tell which tensors the kernel writes, the result has the names of all of them.
    """
    arguments = {**dict(zip(launch.tensors, tensors, strict=True)), **launch.values}
    values = {**launch.values, **launch.configurations(arguments)[0].constants}
    for name, tensor in zip(launch.tensors, tensors, strict=True):
        # A late scalar is represented by a number of its kind, any other tensor by its dtype.
        number = 2.0 if tensor.dtype.is_floating_point else 2
        values[name] = number if name in launch.numbers else tensor.dtype
    # The types are part of the key, because 1, 1.0 and True are equal.
    key = tuple((name, type(value), value) for name, value in sorted(values.items()))
    names, descriptors = _mutated_names(jit_function(launch.kernel), key)
    return launch.tensors if names is None else names, descriptors


@functools.lru_cache(maxsize=256)  # a called function launches the same kernels in every call
def _mutated_names(function: Any, arguments: tuple[tuple[str, type, Any], ...]) -> tuple[frozenset[str] | None, bool]:
    with LANGUAGE_LOCK:
        code = kernel_ir(function, {name: value for name, _, value in arguments})
    names = mutated_parameters(code, function.arg_names)
    return None if names is None else frozenset(names), "tt.make_tensor_descriptor" in code
