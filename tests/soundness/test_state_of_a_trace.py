"""State that changes while a program is traced, or between its trace and the trace of a derivative."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch

import jtbridge

X = jnp.arange(1.0, 4)


class Scales:
    """A factor in every kind of state that a function may read."""

    def __init__(self, size: int):
        self.size = size
        self.items = [2.0]
        self.number = 2.0
        self.module: Any = torch.nn.Module()
        self.module.weight = torch.nn.Parameter(torch.full((size,), 2.0))
        self.tensor = torch.full((size,), 2.0)
        self.table = {"scale": 2.0}


KINDS: dict[str, tuple[Callable[[Scales], Any], Callable[[Scales, float], Any]]] = {
    "list": (lambda s: s.items[0], lambda s, value: s.items.__setitem__(0, value)),
    "attribute": (lambda s: s.number, lambda s, value: setattr(s, "number", value)),
    "dict": (lambda s: s.table["scale"], lambda s, value: s.table.update(scale=value)),
    "mode": (
        lambda s: 2.0 if s.module.training else 7.0,
        lambda s, value: s.module.train(value == 2.0),
    ),
    "tensor in place": (lambda s: s.tensor[:3], lambda s, value: s.tensor.fill_(value)),
    "weight in place": (lambda s: s.module.weight[:3], lambda s, value: _fill(s.module.weight, value)),
    "weight assigned": (
        lambda s: s.module.weight[:3],
        lambda s, value: setattr(s.module, "weight", torch.nn.Parameter(torch.full((s.size,), value))),
    ),
    "value read": (lambda s: s.items[0] * torch.tensor([s.number]).item() / 2, lambda s, v: s.items.__setitem__(0, v)),
}


@torch.no_grad()
def _fill(tensor: torch.Tensor, value: float) -> None:
    tensor.fill_(value)


@pytest.fixture(params=KINDS)
def kind(request) -> str:
    return request.param


@pytest.fixture(params=[3, 10_000], ids=["small", "large"])
def parts(request, kind: str) -> tuple[Callable[..., Any], Callable[[float], Any]]:
    """Return a wrapped function that scales the square of its argument, and a function that sets the factor."""
    scales = Scales(request.param)
    read, write = KINDS[kind]
    return jtbridge.wrap(lambda x: x**2 * read(scales)), lambda value: write(scales, value)


def test_two_calls_in_one_trace_read_the_state_of_their_time(parts):
    f, write = parts

    def both(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        write(2.0)
        first = f(x)
        write(7.0)
        return first, f(x)

    first, second = jax.jit(both)(X)
    assert first.tolist() == (2 * X**2).tolist()
    assert second.tolist() == (7 * X**2).tolist()


def test_two_loops_in_one_trace_read_the_state_of_their_time(parts):
    f, write = parts

    def both(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        write(2.0)
        first = jax.lax.map(lambda row: f(row), x[None])[0]
        write(7.0)
        return first, jax.grad(lambda x: f(x).sum())(x)

    first, second = jax.jit(both)(X)
    assert first.tolist() == (2 * X**2).tolist()
    assert second.tolist() == (14 * X).tolist()


DERIVATIVES: dict[str, tuple[Callable[..., Any], Callable[[jax.Array], jax.Array]]] = {
    "grad": (lambda f: jax.grad(lambda x: f(x).sum())(X), lambda x: 4 * x),
    "jvp": (lambda f: jax.jvp(f, (X,), (X,))[1], lambda x: 4 * x * x),
    "vmap": (lambda f: jax.vmap(f)(X[None])[0], lambda x: 2 * x * x),
    "hessian": (lambda f: jax.hessian(lambda x: f(x).sum())(X), lambda x: 4 * jnp.eye(3)),
    "jit": (lambda f: jax.jit(f)(X), lambda x: 2 * x * x),
}


@pytest.mark.parametrize("derivative", DERIVATIVES)
def test_a_derivative_of_a_program_has_the_state_of_the_program(parts, derivative: str):
    f, write = parts
    write(2.0)
    program = jax.jit(lambda x: f(x))
    program(X)  # JAX keeps its trace
    write(7.0)
    run, expected = DERIVATIVES[derivative]
    assert run(program).tolist() == expected(X).tolist()
    assert f(X).tolist() == (7 * X**2).tolist()  # the state is as it was
    assert jax.jit(lambda x: f(x))(X).tolist() == (7 * X**2).tolist()


def test_a_linear_function_has_the_state_of_its_trace(parts):
    f, write = parts
    write(2.0)
    linear = jax.linearize(jax.jit(lambda x: f(x)), X)[1]
    write(7.0)
    assert linear(X).tolist() == (4 * X * X).tolist()
    assert jax.jit(linear)(X).tolist() == (4 * X * X).tolist()


def test_a_module_in_both_modes_in_one_trace():
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Dropout(0.9))
    f = jtbridge.wrap(model)

    @jax.jit
    def both(x: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        model.train()
        noisy = f(x, rng=key)
        model.eval()
        return noisy, f(x, rng=key)

    noisy, exact = both(jnp.ones((50, 3)), jax.random.key(0))
    assert (noisy == 0).mean() > 0.5
    assert jnp.allclose(exact, jtbridge.wrap(model.eval())(jnp.ones((50, 3))), atol=1e-6)


def test_a_weight_that_is_loaded_twice_in_one_trace():
    model = torch.nn.Linear(200, 3)
    f = jtbridge.wrap(model)
    states = [{"weight": torch.full((3, 200), value), "bias": torch.full((3,), value)} for value in (1.0, 2.0)]

    @jax.jit
    def ensemble(x: jax.Array) -> jax.Array:
        results = []
        for state in states:
            model.load_state_dict(state)
            results.append(f(x))
        return jnp.stack(results)

    assert ensemble(jnp.ones(200))[:, 0].tolist() == [201, 402]
