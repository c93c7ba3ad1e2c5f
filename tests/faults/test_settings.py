"""Cleared caches, and settings of JAX and torch that change between calls."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jtbridge

BACKENDS = ("auto", "xla", "dlpack", "callback")
X = np.linspace(-1, 1, 8).astype(np.float32)


def fn(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x) * 2


@pytest.mark.parametrize("name", BACKENDS)
def test_jax_clear_caches(name: str):
    f = jtbridge.wrap(fn, backend=name)
    run, gradient = jax.jit(f), jax.jit(jax.grad(lambda x: f(x).sum()))
    compiled = run.lower(X).compile()
    pullback = jax.vjp(f, X)[1]
    for _ in range(3):
        for value in (f(X), run(X), compiled(X), jax.vmap(f)(X)):
            np.testing.assert_allclose(value, 2 * np.sin(X), rtol=1e-6)
        for slope in (gradient(X), jax.grad(lambda x: f(x).sum())(X), pullback(np.ones_like(X))[0]):
            np.testing.assert_allclose(slope, 2 * np.cos(X), rtol=1e-6)
        jax.clear_caches()


@pytest.mark.parametrize("name", BACKENDS)
def test_x64_on_and_off(name: str):
    """Results have the types of the mode that is on, whatever was traced before it changed."""
    f = jtbridge.wrap(lambda x: (x.double() * 2, x.argmax(), x + 1), backend=name)
    run = jax.jit(f)
    for _ in range(2):
        for on, wide, index in ((False, "float32", "int32"), (True, "float64", "int64")):
            with jax.enable_x64(on):
                for call in (f, run, jax.jit(lambda x: f(x))):
                    doubled, place, same = call(jnp.asarray(X))
                    assert (doubled.dtype, place.dtype, same.dtype) == (wide, index, "float32")
                    np.testing.assert_allclose(doubled, 2 * X)
                    assert int(place) == 7
                slope = jax.grad(lambda x: f(x)[0].sum())(jnp.asarray(X))
                assert slope.dtype == "float32"
                np.testing.assert_array_equal(slope, np.full(8, 2.0))
    with jax.enable_x64(True):
        assert jax.jit(f)(jnp.asarray(X, "float64"))[2].dtype == "float64"


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", BACKENDS)
def test_number_of_torch_threads_changes(name: str, threads: None):
    f = jtbridge.wrap(lambda x: (x @ x.mT).cumsum(0), backend=name)
    x = np.random.default_rng(0).normal(size=(64, 300)).astype(np.float32)
    run, expected = jax.jit(f), None
    for count in (1, 2, 4, 1, 3):
        torch.set_num_threads(count)
        expected = torch.from_numpy(x @ x.T).cumsum(0)
        for call in (f, run):
            np.testing.assert_allclose(call(x), expected, rtol=1e-3, atol=1e-2)
            assert torch.get_num_threads() == count


CHECKS: dict[str, Callable] = {
    "leaks": lambda: jax.checking_leaks(),
    "checks": lambda: jax.enable_checks(True),
    "strict promotion": lambda: jax.numpy_dtype_promotion("strict"),
    "no implicit transfers": lambda: jax.transfer_guard("disallow"),
    "nans": lambda: jax.debug_nans(True),
}


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", BACKENDS)
def test_jax_check_enabled_between_calls(name: str, check: str):
    f = jtbridge.wrap(fn, backend=name)
    run, x, one = jax.jit(f), jnp.asarray(X), jnp.ones(8)
    for _ in range(2):
        np.testing.assert_allclose(run(x), 2 * np.sin(X), rtol=1e-6)
        with CHECKS[check]():
            found = [run(x), jax.jit(f)(x), f(x), jax.vjp(f, x)[1](one)[0], jax.jit(jax.vmap(f))(x)]
        for value in (*found[:3], found[4]):
            np.testing.assert_allclose(value, 2 * np.sin(X), rtol=1e-6)
        np.testing.assert_allclose(found[3], 2 * np.cos(X), rtol=1e-6)


@pytest.mark.parametrize("check", CHECKS)
def test_jax_check_enabled_between_calls_of_a_torch_function(check: str):
    f = jtbridge.to_torch_function(lambda x: {"sine": 2 * jnp.sin(x)})
    x = torch.from_numpy(X.copy()).requires_grad_()
    for context in (contextlib.nullcontext, CHECKS[check], contextlib.nullcontext):
        with context():
            found = f(x)["sine"]
            (first,) = torch.autograd.grad(found.sum(), x, create_graph=True)
            (second,) = torch.autograd.grad(first.sum(), x)
            (direct,) = torch.autograd.grad(f(x)["sine"].sum(), x)
            rows = torch.func.vmap(torch.func.grad(lambda x: f(x)["sine"]))(x.detach())
        torch.testing.assert_close(found, 2 * x.sin())
        torch.testing.assert_close(second, -2 * x.detach().sin())
        for gradient in (first.detach(), direct, rows):
            torch.testing.assert_close(gradient, 2 * x.detach().cos())
