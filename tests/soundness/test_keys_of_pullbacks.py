"""A pullback of an eager call with a key draws the numbers of that call, wherever it is used."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jtbridge

pytestmark = pytest.mark.filterwarnings("ignore::jtbridge.errors.CalledWarning")
X = jnp.arange(1.0, 17.0)
ONES = jnp.ones(16)


def dropped(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.dropout(x, 0.5)


def noisy(x: torch.Tensor) -> torch.Tensor:
    return x * torch.randn_like(x) + torch.rand(16) * x.sin()


def dropped_twice(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.dropout(torch.nn.functional.dropout(x * x, 0.3).cos(), 0.3)


USES: dict[str, Callable] = {
    "jit": lambda pull: jax.jit(pull)(ONES),
    "map": lambda pull: jax.lax.map(pull, ONES[None])[0],
    "cond": lambda pull: jax.lax.cond(ONES.sum() > 0, pull, lambda ct: ct * 0, ONES),
    "fori_loop": lambda pull: jax.lax.fori_loop(0, 1, lambda _, ct: pull(ct), ONES),
    "checkpoint": lambda pull: jax.checkpoint(pull)(ONES),
    "vmap": lambda pull: jax.vmap(pull)(ONES[None])[0],
    "jit of vmap": lambda pull: jax.jit(jax.vmap(pull))(ONES[None])[0],
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("backend", ["auto", "dlpack", "callback"])
@pytest.mark.parametrize("fn", [dropped, noisy, dropped_twice], ids=lambda fn: fn.__name__)
def test_a_pullback_in_a_trace(fn: Callable, backend: str, use: str):
    f = jtbridge.wrap(fn, backend=backend)
    key = jax.random.key(3)
    pull = jax.vjp(lambda x: f(x, rng=key), X)[1]
    want = pull(ONES)[0]
    np.testing.assert_allclose(USES[use](lambda ct: pull(ct)[0]), want, rtol=1e-5)
    np.testing.assert_allclose(jax.jit(lambda pull, ct: pull(ct)[0])(pull, ONES), want, rtol=1e-5)


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("fn", [dropped, noisy, dropped_twice], ids=lambda fn: fn.__name__)
def test_a_linear_function_in_a_trace(fn: Callable, use: str):
    f = jtbridge.wrap(fn)
    key = jax.random.key(3)
    _, linear = jax.linearize(lambda x: f(x, rng=key), X)
    np.testing.assert_allclose(USES[use](linear), linear(ONES), rtol=1e-5)


def test_rows_with_keys_of_their_own():
    f = jtbridge.wrap(dropped)
    keys = jax.random.split(jax.random.key(0), 4)
    rows = jnp.stack([X] * 4)
    y, pull = jax.vjp(lambda x: jax.vmap(lambda x, key: f(x, rng=key))(x, keys), rows)
    want = jnp.where(y != 0, 2.0, 0.0)
    np.testing.assert_array_equal(pull(jnp.ones_like(rows))[0], want)
    np.testing.assert_array_equal(jax.jit(pull)(jnp.ones_like(rows))[0], want)
