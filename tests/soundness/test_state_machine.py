"""State changes in random ways between calls, and no call, derivative or batch ever uses an earlier state.

Everything is compared with torch itself, run at that moment. Eagerly, and through a `jax.jit` that is made anew for
each call, since that is where a JAX function reads Python's state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, rule

import jtbridge
from tests.compare import as_numpy, assert_close

from .world import CHANGES, World

X = torch.tensor([0.5, -1.25, 2.0])
BATCH = torch.stack([X, X.flip(0) * 0.5])
_BACKENDS = ("auto", "xla", "dlpack", "callback")
_NUMBERS = (0.5, -0.75, 1.5, 2.25, -2.0)


def _gradient(f: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    leaf = x.clone().requires_grad_()
    return torch.autograd.grad(f(leaf).sum(), leaf)[0]


def _jacobian(f: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    leaf = x.clone().requires_grad_()
    return torch.stack([torch.autograd.grad(y, leaf, retain_graph=True)[0] for y in f(leaf)])


# The calls of a user: a JAX function on a JAX array, and the torch function on a tensor.
USES: dict[str, tuple[Callable[..., Any], Callable[..., Any], torch.Tensor]] = {
    "call": (lambda f: f, lambda f, x: [f(x)], X),
    "grad": (lambda f: jax.grad(lambda x: f(x).sum()), lambda f, x: [_gradient(f, x)], X),
    "value_and_grad": (
        lambda f: jax.value_and_grad(lambda x: f(x).sum()),
        lambda f, x: [f(x).sum(), _gradient(f, x)],
        X,
    ),
    "vjp": (
        lambda f: lambda x: jax.vjp(f, x)[1](jnp.ones(3, jax.eval_shape(f, x).dtype)),
        lambda f, x: [_gradient(f, x)],
        X,
    ),
    "jacfwd": (lambda f: jax.jacfwd(f), lambda f, x: [_jacobian(f, x)], X),
    "vmap": (lambda f: jax.vmap(f), lambda f, xs: [torch.stack([f(x) for x in xs])], BATCH),
    "vmap of grad": (
        lambda f: jax.vmap(jax.grad(lambda x: f(x).sum())),
        lambda f, xs: [torch.stack([_gradient(f, x) for x in xs])],
        BATCH,
    ),
}


def compare(world: World, wrapped: Any, use: str, fresh_jit: bool) -> None:
    """Compare one use of the wrapped function with torch."""
    of_jax, of_torch, x = USES[use]
    with world.surroundings():
        expected = of_torch(world.function, x)
        run = of_jax(wrapped)
        actual = (jax.jit(lambda x: run(x)) if fresh_jit else run)(jnp.asarray(as_numpy(x)))
    for ours, theirs in zip(jax.tree.leaves(actual), expected, strict=True):
        assert_close(ours, as_numpy(theirs), 3e-2 if world.autocast else 1e-4)


class States(RuleBasedStateMachine):
    """A state machine with one world and one wrapped function for each backend."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.wrapped = {name: jtbridge.wrap(self.world.function, backend=name) for name in _BACKENDS}

    @rule(names=st.lists(st.sampled_from(sorted(CHANGES)), min_size=1, max_size=3), number=st.sampled_from(_NUMBERS))
    def change(self, names: list[str], number: float) -> None:
        for name in names:
            CHANGES[name](self.world, number)

    @rule(use=st.sampled_from(sorted(USES)))
    def eagerly(self, use: str) -> None:
        compare(self.world, self.wrapped["auto"], use, fresh_jit=False)

    @rule(use=st.sampled_from(sorted(USES)), backend=st.sampled_from(_BACKENDS))
    def under_a_fresh_jit(self, use: str, backend: str) -> None:
        compare(self.world, self.wrapped[backend], use, fresh_jit=True)


TestStates = pytest.mark.slow(States.TestCase)
TestStates.settings = settings(max_examples=8, stateful_step_count=10, deadline=None)

# Changes that only undo another change, which must come first.
_AFTER = {
    "hooks_are_removed": "a_forward_hook_is_registered",
    "forward_of_an_instance_is_deleted": "forward_of_an_instance_is_set",
    "a_parametrization_is_changed": "a_parametrization_is_registered",
    "a_parametrization_is_removed": "a_parametrization_is_registered",
}


def _world_before(name: str) -> World:
    world = World()
    if name in _AFTER:
        CHANGES[_AFTER[name]](world, 0.5)
    return world


@pytest.mark.parametrize("name", sorted(CHANGES))
def test_each_change_affects_torch(name: str):
    """Otherwise the tests of this file would pass with any cache."""
    world = _world_before(name)
    with world.surroundings():
        before = world.function(X).detach().float(), _gradient(world.function, X).float()
    CHANGES[name](world, 1.5)
    with world.surroundings():
        after = world.function(X).detach().float(), _gradient(world.function, X).float()
    moved = max(float((a - b).abs().max()) for a, b in zip(before, after, strict=True))
    assert moved > 0.05


@pytest.mark.parametrize("use", ["call", "grad"])
@pytest.mark.parametrize("name", sorted(CHANGES))
def test_eager_calls_after_each_change(name: str, use: str):
    world = _world_before(name)
    wrapped = jtbridge.wrap(world.function)
    compare(world, wrapped, use, fresh_jit=False)
    CHANGES[name](world, 1.5)
    compare(world, wrapped, use, fresh_jit=False)


@pytest.mark.parametrize("name", sorted(CHANGES))
def test_fresh_jit_after_each_change(name: str):
    world = _world_before(name)
    backend = _BACKENDS[sorted(CHANGES).index(name) % len(_BACKENDS)]
    wrapped = jtbridge.wrap(world.function, backend=backend)
    compare(world, wrapped, "value_and_grad", fresh_jit=True)
    CHANGES[name](world, 1.5)
    compare(world, wrapped, "value_and_grad", fresh_jit=True)


def test_there_are_enough_changes():
    assert len(CHANGES) >= 25
