"""Derivatives that torch itself does not have: through reentrant checkpoints, running statistics and distances."""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

import jtbridge
from jtbridge.errors import RandomnessError

X = np.array([0.3, -1.2, 0.7], np.float32)
WEIGHT = torch.tensor(2.0, requires_grad=True)


def plain(v, a):
    return torch.sin(v) ** 2 * a * WEIGHT.detach() + v * a * v


def checkpointed(v, a):
    """Both `v` and `a` are closed over inside; `v` is an argument as well."""

    def outer(x):
        inner = checkpoint(lambda y: y * a * v, x, use_reentrant=True)
        return torch.sin(x) ** 2 * a * WEIGHT + inner

    return checkpoint(outer, v, use_reentrant=True)


# Torch gives this warning if only a value is requested.
pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
backends = pytest.mark.parametrize("backend", ["auto", "dlpack"])


@backends
def test_reentrant_checkpoint(backend):
    v, a = jnp.asarray(X), jnp.asarray(X) + 1
    inputs = [torch.tensor(X, requires_grad=True), torch.tensor(X + 1, requires_grad=True)]
    wanted = torch.autograd.grad(plain(*inputs).sum(), inputs)
    f = jtbridge.wrap(checkpointed, backend=backend)
    got = jax.jit(jax.grad(lambda v, a: f(v, a).sum(), argnums=(0, 1)))(v, a)
    for ours, theirs in zip(got, wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    assert WEIGHT.grad is None


@backends
@pytest.mark.filterwarnings("ignore::jtbridge.errors.SequentialVmapWarning")
def test_second_derivatives_of_a_reentrant_checkpoint(backend):
    v, a = jnp.asarray(X), jnp.asarray(X) + 1
    f = jtbridge.wrap(checkpointed, backend=backend)
    wanted = torch.autograd.functional.hessian(lambda v, a: plain(v, a).sum(), (torch.tensor(X), torch.tensor(X + 1)))
    got = jax.jit(jax.hessian(lambda v, a: f(v, a).sum(), argnums=(0, 1)))(v, a)
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)


@backends
@pytest.mark.filterwarnings("ignore::jtbridge.errors.SequentialVmapWarning")
def test_dropout_in_a_reentrant_checkpoint_has_one_mask(backend):
    f = jtbridge.wrap(
        lambda v: checkpoint(lambda x: torch.dropout(x, 0.5, True), v, use_reentrant=True), backend=backend
    )
    key, v = jax.random.key(0), jnp.ones(64)
    value, pullback = jax.vjp(lambda v: f(v, rng=key), v)
    assert 0 < int((value == 0).sum()) < 64
    np.testing.assert_array_equal(pullback(jnp.ones(64))[0], value)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_in_a_program_does_not_advance_the_default_generator(reentrant):
    """Other threads draw from it."""
    seen = queue.SimpleQueue()

    def inner(x):
        seen.put(torch.default_generator.get_state())
        return torch.dropout(x, 0.5, True)

    f = jtbridge.wrap(lambda v: checkpoint(inner, v, use_reentrant=reentrant), backend="dlpack")
    key, v = jax.random.key(0), jnp.ones(64)
    value, pullback = jax.vjp(jax.jit(lambda v: f(v, rng=key)), v)
    np.testing.assert_array_equal(pullback(jnp.ones(64))[0], value)
    states = [seen.get() for _ in range(seen.qsize())]
    assert len(states) > 2
    assert all(torch.equal(state, states[0]) for state in states)


@backends
def test_running_statistics_among_the_parameters_in_training(backend):
    module = torch.nn.BatchNorm1d(3)
    x = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    state = {name: jnp.asarray(value.detach().numpy()) for name, value in module.state_dict().items()}
    moving = {name: value for name, value in state.items() if value.dtype == jnp.float32}
    f = jtbridge.wrap(
        lambda state, x: torch.func.functional_call(module, state, (x,)), backend=backend, return_mutated=True
    )

    def loss(moving):
        out, written = f({**state, **moving}, jnp.asarray(x))
        return (out**3).sum(), written

    grads, written = jax.jit(jax.grad(loss, has_aux=True))(moving)
    other = torch.nn.BatchNorm1d(3)
    (other(torch.tensor(x)) ** 3).sum().backward()
    assert not grads["running_mean"].any()
    assert not grads["running_var"].any()
    np.testing.assert_allclose(grads["weight"], other.weight.grad, rtol=1e-4)
    np.testing.assert_allclose(grads["bias"], other.bias.grad, rtol=1e-4)
    np.testing.assert_allclose(written["state['running_mean']"], other.running_mean, rtol=1e-5)
    np.testing.assert_allclose(written["state['running_var']"], other.running_var, rtol=1e-5)


@backends
def test_running_statistics_in_evaluation_have_their_gradient(backend):
    def f(x, mean, variance):
        return torch.native_batch_norm(x, None, None, mean, variance, False, 0.1, 1e-5)[0]

    def formula(x, mean, variance):
        return (x - mean) / jnp.sqrt(variance + 1e-5)

    x = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    arguments = (jnp.asarray(x), jnp.arange(3.0), jnp.arange(3.0) + 1)
    wrapped = jtbridge.wrap(f, backend=backend)
    got = jax.jit(jax.grad(lambda *a: (wrapped(*a) ** 2).sum(), argnums=(0, 1, 2)))(*arguments)
    wanted = jax.grad(lambda *a: (formula(*a) ** 2).sum(), argnums=(0, 1, 2))(*arguments)
    for ours, theirs in zip(got, wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


# A batch of these derivatives is run row by row: under torch.vmap, torch refuses the running statistics.
@pytest.mark.filterwarnings("ignore::jtbridge.errors.SequentialVmapWarning")
@backends
def test_second_derivatives_of_new_running_statistics(backend):
    def f(x, mean, variance):
        mean, variance = mean.clone(), variance.clone()
        torch.nn.functional.batch_norm(x, mean, variance, training=True, momentum=0.25)
        return mean**3 + variance**3

    def formula(x, mean, variance):
        return (0.75 * mean + 0.25 * x.mean(0)) ** 3 + (0.75 * variance + 0.25 * x.var(0, ddof=1)) ** 3

    x = jnp.asarray(np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32))
    wrapped = jtbridge.wrap(f, backend=backend)
    arguments = (x, jnp.arange(3.0), jnp.arange(3.0) + 1)
    got, wanted = (
        jax.jit(jax.hessian(lambda *a, g=g: g(*a).sum(), argnums=(1, 2)))(*arguments) for g in (wrapped, formula)
    )
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


# A batch of cotangents alone of cdist is run row by row: torch.vmap is wrong for it.
@pytest.mark.filterwarnings("ignore::jtbridge.errors.SequentialVmapWarning")
@backends
@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, float("inf")])
def test_distances_in_forward_mode_and_twice(backend, p):
    generator = np.random.default_rng(0)
    a, b = (jnp.asarray(generator.normal(size=(n, 3)).astype(np.float32)) for n in (4, 2))
    f = jtbridge.wrap(lambda a, b: torch.cdist(a, b, p), backend=backend)

    def formula(a, b):
        return jnp.linalg.norm(a[:, None] - b[None], ord=p, axis=-1)

    got = jax.jit(lambda a, b: jax.jvp(f, (a, b), (a * 2, b + 1)))(a, b)
    for ours, theirs in zip(got, jax.jvp(formula, (a, b), (a * 2, b + 1)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
    got = jax.jit(jax.hessian(lambda a: (f(a, b) ** 3).sum()))(a)
    np.testing.assert_allclose(got, jax.hessian(lambda a: (formula(a, b) ** 3).sum())(a), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("backend", ["auto", "xla", "dlpack"])
@pytest.mark.parametrize("p", [1.0, 1.5, 2.0, 3.0, float("inf")])
@pytest.mark.parametrize("pairs", [False, True], ids=["cdist", "pdist"])
def test_second_derivatives_of_distances_of_points_that_coincide(pairs: bool, p: float, backend: str, x64: None):
    """Each point coincides with itself; two of them with each other."""
    points = np.random.default_rng(0).standard_normal((4, 3))
    points[3] = points[0]
    x, weights = jnp.asarray(points), jnp.cos(jnp.arange(12.0)).reshape(4, 3)
    apart = (points[:, None] != points).any(-1)

    def energy(x):  # the same without the pairs that coincide
        differences = jnp.where(apart[..., None], x[:, None] - x, 1.0)
        sizes = jnp.abs(differences)
        distances = sizes.max(-1) if p == float("inf") else (sizes**p).sum(-1) ** (1 / p)
        return jnp.sum(jnp.where(apart, jnp.sin(distances), 0.0))

    def distances(x: torch.Tensor) -> torch.Tensor:
        return 2 * torch.pdist(x, p).sin().sum() if pairs else torch.cdist(x, x, p).sin().sum()

    f = jtbridge.wrap(distances, backend=backend)

    def twice(f):
        return jax.jit(jax.grad(lambda x: (jax.grad(f)(x) * weights).sum()))(x)

    np.testing.assert_allclose(twice(f), twice(energy), rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("wrapped", [lambda f: f, jax.jit])
def test_second_derivatives_of_arrays_without_elements(wrapped: Callable[..., Any]):
    """Torch's gradient of a gradient of `abs` is a lazy zero without memory."""
    f = jtbridge.wrap(lambda x: x.abs().sum())
    second = wrapped(jax.grad(lambda x: jax.grad(f)(x).sum()))
    assert second(jnp.zeros((0, 2))).shape == (0, 2)


def test_error_of_a_missing_sample_derivative_suggests_no_other_backend():
    f = jtbridge.wrap(lambda a: torch.distributions.Gamma(a, torch.ones(())).rsample())
    with pytest.raises(RandomnessError, match="Torch has no such derivative either"):
        jax.jit(jax.grad(jax.grad(lambda a: f(a, rng=jax.random.key(0)))))(2.0)
