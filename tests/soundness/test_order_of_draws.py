"""For a key, torch draws the same numbers for all strides of a tensor: in a value, a derivative and a batch."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F

import jtbridge

pytestmark = [
    pytest.mark.filterwarnings("ignore::jtbridge.errors.CalledWarning"),
    pytest.mark.filterwarnings("ignore::jtbridge.errors.SequentialVmapWarning"),
]
KEY = jax.random.key(0)
X = jnp.ones((3, 4))
W = jnp.arange(12.0).reshape(3, 4)


@torch.library.custom_op("jtbridge_test_order::same", mutates_args=())
def same(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


same.register_fake(torch.empty_like)
same.register_autograd(lambda ctx, g: g.clone())

# Linear functions of an array with 3 rows and 4 columns, with the factors that were drawn.
FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dropout of a transpose": lambda x: F.dropout(x.T, 0.5),
    "dropout of a product": lambda x: F.dropout(x.T * 2, 0.5),
    "channels last": lambda x: F.dropout(x.reshape(1, 3, 2, 2).contiguous(memory_format=torch.channels_last), 0.5),
    "every second": lambda x: F.dropout(x[:, ::2], 0.5),
    "expanded": lambda x: F.dropout(x[:, :1].expand(3, 4), 0.5),
    "dropout1d": lambda x: F.dropout1d(x.T, 0.5),
    "bernoulli": lambda x: x.T * torch.bernoulli(torch.full_like(x.T, 0.5)),
    "bernoulli_": lambda x: x.T * torch.empty_like(x.T).bernoulli_(0.5),
    "bernoulli_ of probabilities": lambda x: x.T * torch.empty(4, 3).bernoulli_(torch.full_like(x, 0.5).T),
    "uniform_": lambda x: x.T * torch.empty_like(x.T).uniform_(),
    "a slice": lambda x: x * torch.zeros(6, 4)[::2].normal_(),
    "exponential_": lambda x: x.T * torch.empty_like(x.T).exponential_(),
    "rand_like": lambda x: x.T * torch.rand_like(x.T),
    "randn_like": lambda x: x.T * torch.randn_like(x.T),
    "randint_like": lambda x: x.T * torch.randint_like(x.T, 9),
    "rrelu": lambda x: F.rrelu(-torch.ones_like(x.T), training=True) * x.T,
    "matmul": lambda x: F.dropout((x.T @ x.new_ones(3, 3)).T, 0.5),
    "beside a custom operator": lambda x: F.dropout(same(x).T, 0.5),
}


@pytest.mark.parametrize("jitted", [True, False], ids=["jit", "eager"])
@pytest.mark.parametrize("backend", ["auto", "dlpack", "callback"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_one_mask_for_values_derivatives_and_batches(name: str, backend: str, jitted: bool):
    f = jtbridge.wrap(FUNCTIONS[name], backend=backend)
    as_run = jax.jit if jitted else lambda g: g

    def of(x: jax.Array) -> jax.Array:
        return f(x, rng=KEY)

    def loss(x: jax.Array) -> jax.Array:
        return (of(x) ** 2).sum()

    value = as_run(of)(W)
    same = [
        lambda x: jax.jvp(of, (x,), (x,))[1],
        lambda x: jax.linearize(of, X)[1](x),
        lambda x: jax.vjp(of, x)[0],
        lambda x: jax.vmap(of)(x[None])[0],
    ]
    for transformed in same:
        np.testing.assert_allclose(as_run(transformed)(W), value, rtol=1e-5)
    gradient = as_run(jax.grad(lambda x: of(x).sum()))(W)
    np.testing.assert_allclose(gradient.ravel() @ W.ravel(), value.sum(), rtol=1e-5)
    want = as_run(jax.grad(loss))(W)
    np.testing.assert_allclose(as_run(lambda x: jax.jvp(jax.grad(loss), (x,), (x,))[1])(W), want, rtol=1e-5)
    np.testing.assert_allclose(as_run(jax.vmap(jax.grad(loss)))(W[None])[0], want, rtol=1e-5)


def test_a_transformer_layer_has_one_mask():
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True)
    f = jtbridge.wrap(layer, backend="dlpack")
    x = jnp.linspace(-1.0, 1.0, 48).reshape(2, 3, 8)

    def loss(x: jax.Array) -> jax.Array:
        return (f(x, rng=KEY) ** 2 * jnp.linspace(0.5, 2.0, 8)).sum()

    value, gradient = jax.jit(jax.value_and_grad(loss))(x)
    np.testing.assert_allclose(jax.jit(loss)(x), value, rtol=1e-5)
    np.testing.assert_allclose(loss(x), value, rtol=1e-5)
    primal, tangent = jax.jit(lambda x: jax.jvp(loss, (x,), (x,)))(x)
    np.testing.assert_allclose(primal, value, rtol=1e-5)
    np.testing.assert_allclose(tangent, (gradient * x).sum(), rtol=1e-3, atol=1e-3)


def test_draws_without_a_key_match_torch():
    for fn in (FUNCTIONS["dropout of a transpose"], FUNCTIONS["uniform_"], FUNCTIONS["randn_like"]):
        torch.manual_seed(7)
        want = fn(torch.ones(3, 4))
        torch.manual_seed(7)
        np.testing.assert_array_equal(jtbridge.wrap(fn)(X), want)


def test_dropout_with_probability_zero_does_not_advance_the_generator():
    before = torch.get_rng_state()
    f = jtbridge.wrap(lambda x: torch.native_dropout(x, 0.0, True)[0])
    np.testing.assert_array_equal(f(X, rng=KEY), X)
    assert torch.equal(torch.get_rng_state(), before)
