"""The modes and transforms of torch that are active on a thread, and contexts outside of them.

Torch has no public way to leave a mode or a transform for a while.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._C._functorch as functorch_bindings
from torch import overrides
from torch.utils import _python_dispatch

# Tried on torch 2.11 to 2.15. Disables all dispatch modes in a block, so that a mode can compute real values.
outside_modes: Callable = _python_dispatch._disable_current_modes


@contextlib.contextmanager
def hidden_from_modes() -> Iterator[None]:
    """Hide reads and writes of tensors inside the block from torch's modes and from autograd."""
    with outside_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
        yield


# Tried on torch 2.13. Returns the number of torch function modes of this thread (a default device is one of them).
has_torch_modes: Callable[[], int] = torch._C._len_torch_function_stack


def inside_functorch() -> bool:
    """Return whether a torch.func transform is running on this thread. Tried on torch 2.13; no public query."""
    return functorch_bindings.maybe_current_level() is not None


@contextlib.contextmanager
def outside_functorch() -> Iterator[None]:
    """Leave the torch.func transforms that run on this thread, inside the block. Tried on torch 2.13."""
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    with temporarily_clear_interpreter_stack():
        yield


_FAKING = tuple(getattr(torch._C._TorchDispatchModeKey, key) for key in ("FAKE", "PROXY", "FUNCTIONAL"))


def is_tracing() -> bool:
    """Return whether a torch mode that traces, or that computes no values, is active. Tried on torch 2.11 and 2.13."""
    return any(torch._C._get_dispatch_mode(key) is not None for key in _FAKING)


def is_transforming() -> bool:
    """Return whether a torch.func transform or a torch dispatch mode is active. Tried on torch 2.11 and 2.13."""
    return functorch_bindings.maybe_current_level() is not None or torch._C._len_torch_dispatch_stack() > 0


@contextlib.contextmanager
def _outside_transforms() -> Iterator[None]:
    """Leave this thread's torch.func transforms, and its modes that trace or compute no values, inside the block.

    A user's own mode stays active. Tried on torch 2.11 and 2.13; torch has no public way to leave a mode for a while.
    """
    with outside_functorch():
        left = [mode for key in _FAKING if (mode := torch._C._unset_dispatch_mode(key)) is not None]
        try:
            yield
        finally:
            for mode in reversed(left):
                torch._C._set_dispatch_mode(mode)


def outside_traces() -> contextlib.AbstractContextManager[None]:
    """Return a context outside of the modes that trace or transform on this thread, including jtbridge's own.

    A trace that starts inside an unrelated trace must not be recorded by it. User modes stay active, and so do the
    modes that refuse uses of a module's own tensors. Tried on torch 2.13.
    """
    if torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack():
        return _outside_own_modes()
    return contextlib.nullcontext()


class _Left(threading.local):
    modes: tuple[Any, ...] = ()  # the tracing modes that `outside_traces` has left on this thread


_LEFT = _Left()


def was_left(mode: Any) -> bool:
    """Return whether `outside_traces` has left a mode on this thread."""
    return any(mode is left for left in _LEFT.modes)


@contextlib.contextmanager
def _outside_own_modes() -> Iterator[None]:
    tracing = [mode for key in _FAKING if (mode := torch._C._unset_dispatch_mode(key)) is not None]
    dispatch = [_python_dispatch._pop_mode() for _ in range(torch._C._len_torch_dispatch_stack())][::-1]
    functions = [overrides._pop_mode() for _ in range(torch._C._len_torch_function_stack())][::-1]
    kept = [[mode for mode in modes if not _traces(mode)] for modes in (dispatch, functions)]
    _push(*kept)
    before, _LEFT.modes = _LEFT.modes, (*_LEFT.modes, *tracing)
    try:
        yield
    finally:
        _LEFT.modes = before
        for _ in kept[0]:
            _python_dispatch._pop_mode()
        for _ in kept[1]:
            overrides._pop_mode()
        _push(dispatch, functions)
        for mode in reversed(tracing):
            torch._C._set_dispatch_mode(mode)


@contextlib.contextmanager
def outside_function_modes() -> Iterator[None]:
    """Run the block without torch function modes."""
    modes = [overrides._pop_mode() for _ in range(torch._C._len_torch_function_stack())]
    try:
        yield
    finally:
        for mode in reversed(modes):
            overrides._push_mode(mode)


def _traces(mode: object) -> bool:
    return type(mode).__module__.startswith(("jtbridge.capture.", "jtbridge.transforms."))


def _push(dispatch: list[Any], functions: list[Any]) -> None:
    for mode in dispatch:
        _python_dispatch._push_mode(mode)
    for mode in functions:
        overrides._push_mode(mode)


def run_outside_transforms(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function, which needs values, run outside of torch.func transforms and of modes without values."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not is_transforming():
            return function(*args, **kwargs)
        with _outside_transforms():
            return function(*args, **kwargs)

    return call


def functorch_depth() -> int:
    """Return how many torch.func transforms are running on this thread. Tried on torch 2.13; no public query."""
    return functorch_bindings.maybe_current_level() or 0
