"""Exceptions of a torch function, wherever it runs: the error names them, and the next call works."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import AxisType, PartitionSpec

import jtbridge

pytestmark = [
    pytest.mark.filterwarnings("ignore::jtbridge.errors.CalledWarning"),
    pytest.mark.filterwarnings("ignore::jtbridge.errors.SequentialVmapWarning"),
]

X = jnp.arange(8.0) + 1
BACKENDS = ("auto", "dlpack", "callback")
COMPILED = (jax.errors.JaxRuntimeError, ValueError)  # XLA raises a ValueError from the second call of a program on


def positive(x: torch.Tensor) -> torch.Tensor:
    if float(x.detach().sum()) < 0:
        raise LookupError("the sum is negative")
    return x * 2


class PositiveInBackward(torch.autograd.Function):
    """Doubles its argument. The backward fails for some values."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return cotangents[0] / x.sum().abs() * positive(x.sum()[None]) if x.ndim else cotangents[0]


@torch.library.custom_op("faults::positive", mutates_args=())
def positive_operator(x: torch.Tensor) -> torch.Tensor:
    return positive(x)


@positive_operator.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def with_island(x: torch.Tensor) -> torch.Tensor:
    """Run the operator in an island of a translated program."""
    return torch.sin(positive_operator(x)) * 0 + x * 2


def over_devices(f: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    return jax.shard_map(f, mesh=mesh, in_specs=PartitionSpec("d"), out_specs=PartitionSpec("d"))


# Each entry calls `f`; if `bad` is negative, with at least one array for which `f` raises.
PLACES: dict[str, Callable[[Callable, jax.Array], jax.Array]] = {
    "a call": lambda f, bad: f(X * bad),
    "a scan": lambda f, bad: jax.lax.scan(lambda c, x: (c, f(x)), 0.0, jnp.stack([X, X * bad, X]))[1][1],
    "a while loop": lambda f, bad: jax.lax.fori_loop(0, 3, lambda i, x: f(x) / 2 * bad, X) / bad**3 * 2,
    "one branch": lambda f, bad: jax.lax.cond(bad < 2, f, lambda x: x, X * bad),
    "vmap": lambda f, bad: jax.vmap(f)(jnp.stack([X, X * bad]))[0],
    "one of eight devices": lambda f, bad: over_devices(f)(X.at[3].multiply(bad)),
    "the forward of a gradient": lambda f, bad: X * jax.grad(lambda x: f(x).sum())(X * bad),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", BACKENDS)
def test_exception_in_a_compiled_program(place: str, name: str):
    run = jax.jit(lambda bad: PLACES[place](jtbridge.wrap(positive, backend=name), bad))
    for _ in range(2):
        with pytest.raises(COMPILED, match="LookupError: the sum is negative"):
            jax.block_until_ready(run(-1.0))
        np.testing.assert_allclose(run(1.0), X * 2)


@pytest.mark.parametrize("place", ["a call", "vmap", "one of eight devices", "the forward of a gradient"])
@pytest.mark.parametrize("name", BACKENDS)
def test_exception_in_an_eager_call(place: str, name: str):
    f = jtbridge.wrap(positive, backend=name)
    for _ in range(2):
        with pytest.raises((LookupError, *COMPILED), match="the sum is negative"):
            jax.block_until_ready(PLACES[place](f, -1.0))
        np.testing.assert_allclose(PLACES[place](f, 1.0), X * 2)


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("name", BACKENDS)
def test_exception_in_a_backward(name: str, jit: bool):
    f = jtbridge.wrap(PositiveInBackward.apply, backend=name)
    gradient = jax.grad(lambda x: f(x).sum())
    gradient = jax.jit(gradient) if jit else gradient
    for _ in range(2):
        with pytest.raises((LookupError, *COMPILED), match="the sum is negative"):
            jax.block_until_ready(gradient(-X))
        np.testing.assert_allclose(gradient(X), np.full(8, 2.0))
        np.testing.assert_allclose(f(-X), -2 * X)


@pytest.mark.parametrize("place", [place for place in PLACES if "gradient" not in place])
def test_exception_in_an_island(place: str):
    assert "faults.positive" in str(jtbridge.explain(jtbridge.wrap(with_island, islands="needed"), X).islands)
    run = jax.jit(lambda bad: PLACES[place](jtbridge.wrap(with_island, islands="needed"), bad))
    for _ in range(2):
        with pytest.raises(COMPILED, match="LookupError: the sum is negative"):
            jax.block_until_ready(run(-1.0))
        np.testing.assert_allclose(run(1.0), X * 2)


@pytest.mark.parametrize("transform", [lambda f: f, jax.vmap, lambda f: jax.grad(lambda x: f(x).sum())])
@pytest.mark.parametrize("name", ["xla", *BACKENDS])
def test_exception_while_jax_traces_is_raised_unchanged(name: str, transform: Callable[[Callable], Callable]):
    """An exception that tracing did not cause is raised unchanged, and the function is traced again."""
    fails = [True]

    def fn(x: torch.Tensor) -> torch.Tensor:
        if fails:
            raise LookupError("not yet")
        return x * 3

    f = jax.jit(transform(jtbridge.wrap(fn, backend=name)))
    for _ in range(2):
        with pytest.raises(LookupError, match="not yet"):
            f(X)
    fails.clear()
    np.testing.assert_allclose(f(X), transform(lambda x: x * 3)(X))


@pytest.mark.parametrize("name", BACKENDS)
def test_system_exit_in_a_called_function(name: str):
    """XLA does not propagate `SystemExit`: the error names it, as it names every other exception."""

    def exits(x: torch.Tensor) -> torch.Tensor:
        if float(x.detach().sum()) < 0:
            raise SystemExit(3)
        return x * 2

    f = jax.jit(jtbridge.wrap(exits, backend=name))
    with pytest.raises(COMPILED, match=r"TorchCallError: `exits`.* raised SystemExit: 3"):
        jax.block_until_ready(f(-X))
    np.testing.assert_allclose(f(X), X * 2)
    with pytest.raises(SystemExit):
        jtbridge.wrap(exits, backend=name)(-X)


class Unreadable(Exception):
    def __str__(self) -> str:
        return 3  # type: ignore[return-value]


def test_an_exception_whose_text_cannot_be_read():
    def fails(x: torch.Tensor) -> torch.Tensor:
        if float(x.sum()) < 0:
            raise Unreadable
        return x * 2

    def always(x: torch.Tensor) -> torch.Tensor:
        raise Unreadable

    with pytest.raises(Unreadable):
        jtbridge.wrap(always)(X)
    with pytest.raises(Unreadable):
        jax.jit(jtbridge.wrap(always))(X)
    for backend in BACKENDS:
        call = jax.jit(jtbridge.wrap(fails, backend=backend))
        with pytest.raises(COMPILED, match="raised Unreadable: <its text cannot be read: TypeError>"):
            jax.block_until_ready(call(-X))
        np.testing.assert_array_equal(call(X), X * 2)
