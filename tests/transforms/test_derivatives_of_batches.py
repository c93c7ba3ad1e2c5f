"""Eager derivatives of batches of derivatives: a batch over one argument, and gradients by another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jtbridge

RNG = np.random.default_rng(0)
W = jnp.asarray(RNG.normal(size=(2, 3)), jnp.float32)
DW = jnp.asarray(RNG.normal(size=(2, 3)), jnp.float32)
X = jnp.asarray(RNG.normal(size=(5, 4, 2)), jnp.float32)
CT = jnp.asarray(RNG.normal(size=(5, 4, 3)), jnp.float32)
MANY = jnp.stack([W, DW])


def in_torch(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ w)


def in_jax(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ w)


Function = Callable[..., Any]


def _loss(f: Function) -> Function:
    return lambda w, x: (f(w, x) ** 2).sum()


def _rows(f: Function) -> Function:
    """Return a function of w that returns the gradients by w for each row of X."""
    return lambda w: jax.vmap(jax.grad(_loss(f)), (None, 0))(w, X)


def _pulled(f: Function, ct: jax.Array) -> Function:
    """Return a function of w that pulls a cotangent back to w."""
    return lambda w: jax.vjp(lambda w: f(w, X[0]), w)[1](ct)[0]


def _summed(f: Function) -> Function:
    return lambda w: (f(w) ** 2).sum()


PROGRAMS: dict[str, Callable[[Function], Any]] = {
    "grad of vmap of grad": lambda f: jax.grad(_summed(_rows(f)))(W),
    "jvp of vmap of grad": lambda f: jax.jvp(_rows(f), (W,), (DW,))[1],
    "jacfwd of vmap of grad": lambda f: jax.jacfwd(_rows(f))(W),
    "jacrev of vmap of grad": lambda f: jax.jacrev(lambda w: _rows(f)(w).sum(1))(W),
    "vmap of a linearized vmap of grad": lambda f: jax.vmap(jax.linearize(_rows(f), W)[1])(MANY),
    "grad of grad of vmap of grad": lambda f: jax.grad(_summed(jax.grad(_summed(_rows(f)))))(W),
    "vmap of grad of vmap of grad": lambda f: jax.vmap(jax.grad(_summed(_rows(f))))(MANY),
    "grad of vmap of grad of grad": lambda f: jax.grad(
        _summed(lambda w: jax.vmap(lambda x: jax.grad(_summed(lambda w: jax.grad(_loss(f))(w, x)))(w))(X))
    )(W),
    "grad of vmap of gradients by both arguments": lambda f: jax.grad(
        lambda w: sum((g**2).sum() for g in jax.vmap(jax.grad(_loss(f), (0, 1)), (None, 0))(w, X))
    )(W),
    "vmap of jvp of vjp": lambda f: jax.vmap(lambda ct: jax.jvp(_pulled(f, ct), (W,), (DW,))[1])(CT),
    "vmap of grad of vjp": lambda f: jax.vmap(lambda ct: jax.grad(_summed(_pulled(f, ct)))(W))(CT),
    "grad of vmap of grad of vjp": lambda f: jax.grad(
        _summed(lambda w: jax.vmap(lambda ct: jax.grad(_summed(_pulled(f, ct)))(w))(CT))
    )(W),
    "grad of vmap of vjp": lambda f: jax.grad(_summed(lambda w: jax.vmap(lambda ct: _pulled(f, ct)(w))(CT)))(W),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_derivatives_of_batches_match_jax(name: str):
    expected = PROGRAMS[name](in_jax)
    found = PROGRAMS[name](jtbridge.wrap(in_torch))
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3 * float(jnp.abs(expected).max()))


def test_steps_of_gradient_descent_for_each_task_are_differentiated():
    """The gradient of MAML: through one step for each task, from parameters that all tasks share."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    net = jtbridge.module(model)
    params, state = net.init()

    def after_a_step(params: Any) -> jax.Array:
        def task(x: jax.Array) -> jax.Array:
            def loss(params: Any) -> jax.Array:
                return (net(params, state, x)[0] ** 2).mean()

            return loss(jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params)))

        return jax.vmap(task)(X).mean()

    found = jax.grad(after_a_step)(params)
    total = torch.zeros(())
    for x in torch.from_numpy(np.array(X)):
        given: dict[str, torch.Tensor] = dict(model.named_parameters())
        loss = (torch.func.functional_call(model, given, (x,)) ** 2).mean()
        gradients = torch.autograd.grad(loss, list(given.values()), create_graph=True)
        stepped = {name: p - 0.1 * g for (name, p), g in zip(given.items(), gradients, strict=True)}
        total = total + (torch.func.functional_call(model, stepped, (x,)) ** 2).mean() / len(X)
    total.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        np.testing.assert_allclose(found[name], parameter.grad, rtol=1e-4, atol=1e-6, err_msg=name)
