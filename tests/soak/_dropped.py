"""Wrapped functions that are made, called and dropped, and how many of them were never released."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import jax
import torch

import jtbridge

from ._function import Function

_LOCK = threading.Lock()
_ALIVE: weakref.WeakSet[Any] = weakref.WeakSet()


def functions() -> list[Function]:
    return [
        Function("made, called eagerly", "dropped", 3, lambda x: _new()(x), lambda x: x * 3),
        Function("made, differentiated", "dropped", 1, lambda x: jax.grad(_new_sum())(x), lambda x: 6 * x),
        Function("made, compiled", "dropped", 0.05, lambda x: jax.jit(_new())(x), lambda x: x * 3),
        Function("made, compiled, called", "dropped", 0.05, lambda x: jax.jit(_new("dlpack"))(x), lambda x: x * 3),
    ]


def kept() -> int:
    """Return how many functions are alive; call it while no thread uses one."""
    for _ in range(4):  # a compiled program is a chain of objects that free one another
        gc.collect()
    return len(_ALIVE)


def _new(backend: str = "auto") -> Any:
    factor = 3

    def made(x: torch.Tensor) -> torch.Tensor:
        return x * factor

    _note(made)
    return jtbridge.wrap(made, backend=backend)


def _new_sum() -> Any:
    def made(x: torch.Tensor) -> torch.Tensor:
        return (x * x * 3).sum()

    _note(made)
    return jtbridge.wrap(made)


def _note(made: Callable[..., Any]) -> None:
    with _LOCK:
        _ALIVE.add(made)
