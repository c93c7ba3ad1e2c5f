"""Draws from the global generators of Python and NumPy are refused under a trace."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jtbridge
from jtbridge.errors import RandomnessError
from jtbridge.state import GlobalDraws

X = jnp.asarray([1.0, 2.0, 4.0])


DRAWS: dict[str, Callable[[], float]] = {
    "random.random": lambda: random.random(),
    "random.gauss": lambda: random.gauss(0, 1),
    "random.choice": lambda: random.choice([1.0, 2.0, 3.0]),
    "numpy.random.rand": lambda: float(np.random.rand()),
    "numpy.random.normal": lambda: np.random.normal(size=2)[0],
}


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("backend", ["xla", "dlpack"])
def test_draws_from_a_global_generator_are_refused(name, backend):
    draw = DRAWS[name]
    random.seed(5)
    np.random.seed(5)
    want = draw()
    random.seed(5)
    np.random.seed(5)
    with pytest.raises(RandomnessError, match=r"test_global_generators\.py:\d+.*`rng=`"):
        jax.jit(jtbridge.wrap(lambda x: x * draw(), backend=backend))(X)
    assert draw() == want


def test_draws_of_other_threads_are_not_attributed_to_the_function():
    source = random.Random(7)
    want = [source.random() for _ in range(20_000)]
    found: list[float] = []
    draws = np.random.RandomState(7).rand(2_000).tolist()
    found_numpy: list[float] = []

    def draw():
        found.extend(random.random() for _ in range(20_000))
        found_numpy.extend(np.random.rand() for _ in range(2_000))

    def f(x):
        return x * random.random() if len(x) > 5 else x + 1

    random.seed(7)
    np.random.seed(7)
    thread = threading.Thread(target=draw)
    thread.start()
    traced = 0
    while thread.is_alive() or not traced:
        np.testing.assert_array_equal(jax.jit(jtbridge.wrap(f))(X), X + 1)
        with pytest.raises(RandomnessError):
            jax.jit(jtbridge.wrap(f))(jnp.ones(6))
        traced += 1
    thread.join()
    assert found == want
    assert found_numpy == draws


@pytest.mark.parametrize("draw", [random.random, lambda: float(np.random.rand())], ids=["Python", "NumPy"])
@pytest.mark.parametrize("transform", [jax.grad, lambda f: jax.jit(jax.grad(f)), lambda f: jax.jit(jax.hessian(f))])
def test_draws_only_in_a_backward(transform: Callable, draw: Callable[[], float]):
    """The forward, which is traced first, draws nothing."""

    class Noisy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * draw()

    f = jtbridge.wrap(lambda x: (Noisy.apply(x) ** 2).sum())
    random.seed(5)
    np.random.seed(5)
    want = draw()
    random.seed(5)
    np.random.seed(5)
    if transform is jax.grad:  # torch runs it, and it draws
        np.testing.assert_allclose(transform(f)(X), 4 * X * want, rtol=1e-6)
        return
    with pytest.raises(RandomnessError, match=r"test_global_generators\.py:\d+.*`rng=`"):
        transform(f)(X)
    assert draw() == want


def test_random_function_is_observed_only_in_its_first_run(monkeypatch: pytest.MonkeyPatch):
    watched = []
    enter = GlobalDraws.watched
    monkeypatch.setattr(GlobalDraws, "watched", lambda self: watched.append(self) or enter(self))
    f = jtbridge.wrap(lambda x: (x * (random.random() if len(x) > 5 else 2.0)).sum())
    np.testing.assert_array_equal(jax.jit(jax.grad(f))(X), [2, 2, 2])
    assert len(watched) == 1


def seeded(x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(1)
    return x * torch.rand(3)


def seeded_without_draws(x: torch.Tensor) -> torch.Tensor:
    torch.random.seed()
    return x * 2


def seeded_apart(x: torch.Tensor) -> torch.Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return x * torch.rand(3)


def seeded_by_a_value(x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(int(x[0]))
    return x * torch.rand(3)


def seeded_through_the_object(x: torch.Tensor) -> torch.Tensor:
    torch.default_generator.manual_seed(1)
    return x * torch.rand(3)


@pytest.mark.parametrize(
    "fn", [seeded, seeded_through_the_object, seeded_without_draws, seeded_apart, seeded_by_a_value]
)
@pytest.mark.parametrize("backend", ["auto", "dlpack"])
@pytest.mark.parametrize("keys", [{}, {"rng": jax.random.key(0)}], ids=["no key", "key"])
def test_a_seed_of_torch_is_refused_in_a_trace(fn: Callable, backend: str, keys: dict):
    """A trace numbers its draws: a seed would give two draws the same number, whatever the key is."""
    f = jtbridge.wrap(fn, backend=backend)
    before = torch.get_rng_state()
    with pytest.raises(RandomnessError, match=r"seeds torch's generator.*`torch.manual_seed`"):
        jax.jit(lambda x: f(x, **keys))(X)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_seed_of_torch_works_eagerly():
    torch.manual_seed(1)
    wanted = torch.rand(3).numpy()
    torch.manual_seed(2)
    f = jtbridge.wrap(seeded)
    np.testing.assert_allclose(f(X), X * wanted, rtol=1e-6)
    before = torch.get_rng_state()
    np.testing.assert_allclose(f(X, rng=jax.random.key(3)), X * wanted, rtol=1e-6)
    assert torch.equal(torch.get_rng_state(), before)


def test_seeded_generator_of_the_function_repeats_its_draws():
    def f(x: torch.Tensor) -> torch.Tensor:
        return x * torch.rand(3, generator=torch.Generator().manual_seed(1))

    wanted = X * torch.rand(3, generator=torch.Generator().manual_seed(1)).numpy()
    for run in (jtbridge.wrap(f), jax.jit(jtbridge.wrap(f, backend="dlpack"))):
        np.testing.assert_allclose(run(X), wanted, rtol=1e-6)
