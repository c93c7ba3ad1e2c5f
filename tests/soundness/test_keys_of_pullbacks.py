"""A pullback of an eager call with a key draws the numbers of that call, wherever it is used."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jtbridge
from jtbridge.errors import RandomnessError

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


def test_rows_with_separate_keys():
    f = jtbridge.wrap(dropped)
    keys = jax.random.split(jax.random.key(0), 4)
    rows = jnp.stack([X] * 4)
    y, pull = jax.vjp(lambda x: jax.vmap(lambda x, key: f(x, rng=key))(x, keys), rows)
    want = jnp.where(y != 0, 2.0, 0.0)
    np.testing.assert_array_equal(pull(jnp.ones_like(rows))[0], want)
    np.testing.assert_array_equal(jax.jit(pull)(jnp.ones_like(rows))[0], want)


class Masked(torch.autograd.Function):
    """A product whose gradient is multiplied by random numbers."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * torch.rand(3)


def hooked(x: torch.Tensor) -> torch.Tensor:
    y = x**2
    y.register_hook(lambda grad: grad * torch.rand(3))
    return (y**2).sum()


BACKWARDS = {
    "hook": hooked,
    "backward": lambda x: Masked.apply(x * x).sum(),
    "both": lambda x: Masked.apply(x * torch.rand(3)).sum(),
    "none": lambda x: torch.nn.functional.dropout(x * x).sum(),
    "checkpoint": lambda x: torch.utils.checkpoint.checkpoint(
        lambda y: torch.nn.functional.dropout(y * y).sum(), x, use_reentrant=False
    ),
}


def repeated(derivative: Callable) -> np.ndarray:
    """Return a derivative; assert that a second call gives the same, and that torch's generator does not advance."""
    state = torch.get_rng_state()
    first, second = np.asarray(derivative()), np.asarray(derivative())
    np.testing.assert_array_equal(first, second)
    assert torch.equal(torch.get_rng_state(), state)
    return first


@pytest.mark.parametrize("name", BACKWARDS)
def test_a_backward_that_draws_has_the_key_of_its_row(name: str):
    f = jtbridge.wrap(BACKWARDS[name])
    x, keys = jnp.arange(1.0, 7.0).reshape(2, 3), jax.random.split(jax.random.key(0), 2)

    def gradient(row, key):
        return jax.grad(lambda x: f(x, rng=key))(row)

    rows = repeated(lambda: jnp.stack([gradient(x[i], keys[i]) for i in range(2)]))
    np.testing.assert_allclose(repeated(lambda: jax.vmap(gradient)(x, keys)), rows, rtol=1e-6)

    def of_batch():
        return jax.grad(lambda x: jax.vmap(lambda row, key: f(row, rng=key))(x, keys).sum())(x)

    if name in ("none", "checkpoint"):
        np.testing.assert_allclose(repeated(of_batch), rows, rtol=1e-6)
    else:
        with pytest.raises(RandomnessError, match="rows have a key each"):
            of_batch()


@pytest.mark.parametrize("name", BACKWARDS)
def test_a_backward_that_draws_in_a_second_derivative(name: str):
    f = jtbridge.wrap(BACKWARDS[name])
    x, key = jnp.arange(1.0, 4.0), jax.random.key(1)

    def loss(x):
        return f(x, rng=key)

    repeated(lambda: jax.grad(lambda x: (jax.grad(loss)(x) ** 2).sum())(x))
    repeated(lambda: jax.jvp(jax.grad(loss), (x,), (x,))[1])
    repeated(lambda: jax.hessian(loss)(x))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_forward_derivative_whose_result_has_the_shape_of_a_seed(size: int):
    f = jtbridge.wrap(torch.nn.functional.dropout)
    x, key = jnp.ones(size), jax.random.key(3)
    y, dy = jax.jvp(lambda x: f(x, rng=key), (x,), (x,))
    np.testing.assert_array_equal(y, dy)
    np.testing.assert_array_equal(jax.jacfwd(lambda x: f(x, rng=key))(x), np.diag(y))
