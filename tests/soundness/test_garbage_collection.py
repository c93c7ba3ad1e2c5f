"""Functions of every kind that are made, used and dropped by the thousand are collected."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch

import jtbridge

X = jnp.arange(3.0)
USES: dict[str, Callable[[Callable], Any]] = {
    "eager": lambda f: f(X),
    "grad": lambda f: jax.grad(f)(X),
    "vmap": lambda f: jax.vmap(f)(jnp.ones((2, 3))),
    "jit": lambda f: jax.jit(f)(X),
}


class _Scale(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).sum()


class _Factor:
    def __init__(self) -> None:
        self.factor = torch.ones(3)

    def times(self, x: torch.Tensor) -> torch.Tensor:
        return (self.factor * x).sum()


def _plain_function() -> tuple[Callable, Any]:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x).sum()

    return fn, fn


def _closure() -> tuple[Callable, Any]:
    factor = torch.ones(3)
    return (lambda x: (factor * x).sum()), factor


def _module() -> tuple[Callable, Any]:
    module = _Scale()
    return module, module


def _bound_method() -> tuple[Callable, Any]:
    owner = _Factor()
    return owner.times, owner


def _partial() -> tuple[Callable, Any]:
    factor = _Factor()
    return functools.partial(lambda factor, x: factor.times(x), factor), factor


# Each entry makes a function, and returns the object that must be freed with it.
KINDS = {make.__name__.strip("_"): make for make in (_plain_function, _closure, _module, _bound_method, _partial)}


@pytest.mark.parametrize(("use", "count"), [("eager", 1000), ("grad", 1000), ("vmap", 1000), ("jit", 30)])
@pytest.mark.parametrize("kind", KINDS)
def test_many_functions_are_collected(kind: str, use: str, count: int):
    """Functions that are made, used and dropped leave nothing behind. ``jit`` takes time to compile each of them."""

    def used() -> weakref.ref:
        fn, owner = KINDS[kind]()
        jax.block_until_ready(USES[use](jtbridge.wrap(fn)))
        return weakref.ref(owner)

    refs = [used() for _ in range(count)]
    for _ in range(4):  # a compiled program is a chain of objects that free one another
        gc.collect()
    assert sum(ref() is not None for ref in refs) == 0
