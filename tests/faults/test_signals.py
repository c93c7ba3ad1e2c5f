"""Exceptions of signal handlers, such as time limits: they reach the caller, and nothing of them is remembered."""

from __future__ import annotations

import functools
import io
import signal
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jtbridge

X = jnp.ones((2, 3))


class TimeLimit(Exception):
    pass


def over(*_: Any) -> None:
    raise TimeLimit("the time is over")


class Handler:
    def __call__(self, number: int, frame: Any) -> None:
        over()

    def method(self, number: int, frame: Any) -> None:
        over()


HANDLERS = {
    "function": over,
    "method": Handler().method,
    "object": Handler(),
    "partial": functools.partial(over),
}


@pytest.fixture
def handler(request: pytest.FixtureRequest) -> Iterator[None]:
    before = signal.signal(signal.SIGUSR1, HANDLERS[getattr(request, "param", "function")])
    yield
    signal.signal(signal.SIGUSR1, before)


class Interrupted:
    """A function that gets a signal in its run `number`, counted from 0.

    It counts its runs in a buffer, which is not restored after a run of a trace as a number would be.
    """

    def __init__(self, number: int):
        self.runs = io.BytesIO()
        self.number = number

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x = x.sin()
        self.runs.write(b".")
        if self.runs.tell() == self.number + 1:
            signal.raise_signal(signal.SIGUSR1)
        return x * 2


WAYS: dict[str, Callable[[Any], Any]] = {
    "eager": lambda f: f(X),
    "eager vmap": lambda f: jax.vmap(f)(X),
    "eager grad": lambda f: jax.grad(lambda x: f(x).sum())(X),
    "eager jvp": lambda f: jax.jvp(f, (X,), (X,))[1],
    "jit": lambda f: jax.jit(f)(X),
    "jit of vmap": lambda f: jax.jit(jax.vmap(f))(X),
    "jit of grad": lambda f: jax.jit(jax.grad(lambda x: f(x).sum()))(X),
    "jit of jvp": lambda f: jax.jit(lambda x: jax.jvp(f, (x,), (x,))[1])(X),
}
EXPECTED = {"grad": 2 * np.cos(1), "jvp": 2 * np.cos(1)}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("backend", ["auto", "xla"])
def test_interrupt_in_any_run_of_a_trace(handler: None, backend: str, way: str):
    expected = np.full((2, 3), EXPECTED.get(way.split()[-1], 2 * np.sin(1)))
    found = 0
    for number in range(8):
        interrupted = Interrupted(number)
        f = jtbridge.wrap(interrupted, backend=backend)
        try:
            result = WAYS[way](f)
            assert interrupted.runs.tell() <= number  # no run got the signal
        except TimeLimit:
            found += 1
            result = WAYS[way](f)
            if way == "jit":
                assert "custom_call" not in jax.jit(f).lower(X).as_text()
        np.testing.assert_allclose(result, expected, 1e-6)
    assert found >= 1


@pytest.mark.parametrize("handler", HANDLERS, indirect=True)
def test_signal_handlers_of_all_kinds(handler: None):
    f = jtbridge.wrap(Interrupted(0))
    with pytest.raises(TimeLimit):
        jax.jit(f)(X)
    np.testing.assert_allclose(jax.jit(f)(X), np.full((2, 3), 2 * np.sin(1)), 1e-6)


def test_exception_of_the_function_is_raised_unchanged(handler: None):
    """A function that raises on tensors without values runs in torch. A handler that is set makes no difference."""

    def f(x: torch.Tensor) -> torch.Tensor:
        if not isinstance(x.numpy(), np.ndarray):
            over()
        return x * 2

    with pytest.warns(jtbridge.errors.CalledWarning):
        np.testing.assert_array_equal(jax.jit(jtbridge.wrap(f))(X), np.full((2, 3), 2.0))
