"""A policy of ``jax.checkpoint`` saves the same values for a translated function as for the function in jnp."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.ad_checkpoint import checkpoint_name

import jtbridge

SIZE = 64
X = jnp.ones((32, SIZE))
WEIGHTS = jnp.sin(jnp.arange(3.0 * SIZE * SIZE)).reshape(3, SIZE, SIZE) / 8
POLICIES = jax.checkpoint_policies
# Each with the matrix products of the compiled gradient, in the loop forward and the loop backward: four products, two
# for the derivative of each, and those that are computed again.
CASES = {
    "default": (None, 16),
    "everything_saveable": (POLICIES.everything_saveable, 12),
    "nothing_saveable": (POLICIES.nothing_saveable, 16),
    "dots_saveable": (POLICIES.dots_saveable, 12),
    "dots_with_no_batch_dims_saveable": (POLICIES.dots_with_no_batch_dims_saveable, 12),
    "save_only_these_names": (POLICIES.save_only_these_names("h"), 16),
    "save_anything_except_these_names": (POLICIES.save_anything_except_these_names("h"), 12),
}


def in_torch(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.sin(torch.sin(x @ w) @ w.T)


def in_jax(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.sin(jnp.sin(x @ w) @ w.T)


def loss_of(f: Callable[..., Any], policy: Any) -> Callable[..., jax.Array]:
    def step(carry: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return f(checkpoint_name(f(carry, w), "h"), w), None

    # In a loop XLA cannot see that a product was computed before.
    return lambda x, weights: jnp.sum(jax.lax.scan(jax.checkpoint(step, policy=policy), x, weights)[0] ** 2)


def compiled_gradient(f: Callable[..., Any], policy: Any) -> Any:
    return jax.jit(jax.grad(loss_of(f, policy), (0, 1))).lower(X, WEIGHTS).compile()


@pytest.mark.parametrize("case", CASES)
def test_operations_and_memory(case: str):
    policy, products = CASES[case]
    ours = compiled_gradient(jtbridge.wrap(in_torch, backend="xla"), policy)
    expected = compiled_gradient(in_jax, policy)
    assert ours.as_text().count(" dot(") == expected.as_text().count(" dot(") == products
    assert 0.97 < ours.cost_analysis()["flops"] / expected.cost_analysis()["flops"] < 1.001
    assert ours.memory_analysis().temp_size_in_bytes <= expected.memory_analysis().temp_size_in_bytes
    for a, b in zip(ours(X, WEIGHTS), expected(X, WEIGHTS), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["xla", "dlpack", "callback"])
@pytest.mark.parametrize("policy", ["everything_saveable", "dots_saveable"])
def test_nestings(policy: str, name: str, x64: None):
    f = jtbridge.wrap(lambda x, w: torch.softmax(torch.sin(x @ w) @ w.T, -1), backend=name)

    def expected(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.nn.softmax(jnp.sin(x @ w) @ w.T, -1)

    x, w = jnp.linspace(0.0, 1.0, 6).reshape(2, 3), jnp.linspace(-1.0, 1.0, 9).reshape(3, 3)

    def results(f: Callable[..., Any]) -> Any:
        checkpointed = jax.checkpoint(f, policy=getattr(POLICIES, policy))

        def loss(x: jax.Array, w: jax.Array) -> jax.Array:
            return jnp.sum(jnp.cos(checkpointed(x, w)))

        gradient = jax.grad(loss, (0, 1))
        return {
            "eager": gradient(x, w),
            "jit": jax.jit(gradient)(x, w),
            "vmap": jax.vmap(gradient, (0, None))(x, w),
            "forward": jax.jvp(loss, (x, w), (x, w)),
            "forward over reverse": jax.jit(jax.jacfwd(gradient))(x, w),
            "reverse over reverse": jax.jit(jax.jacrev(gradient))(x, w),
        }

    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-10), results(f), results(expected))


def test_indices_and_random_masks_are_computed_again():
    """A policy may want to save 64-bit integers or keys, which JAX has no place for while x64 is off."""

    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = torch.nn.functional.dropout(x @ w, 0.5)
        return torch.sort(torch.sin(y), -1).values * torch.arange(SIZE)

    f = jtbridge.wrap(fn, backend="xla")
    key = jax.random.key(0)
    gradients = [
        jax.jit(
            jax.grad(lambda x, p=policy: jnp.sum(jax.checkpoint(lambda x: f(x, WEIGHTS[0], rng=key), policy=p)(x)))
        )(X)
        for policy in (None, POLICIES.everything_saveable, POLICIES.dots_saveable, lambda *_, **__: True)
    ]
    plain = jax.grad(lambda x: jnp.sum(f(x, WEIGHTS[0], rng=key)))(X)
    for gradient in gradients:
        np.testing.assert_allclose(gradient, plain, rtol=1e-4, atol=1e-4)


def test_a_scan_runs_the_forward_once():
    """Like JAX's own operations, a torch function in a loop saves residuals for its backward."""

    def gradient(f: Callable[..., Any]) -> Any:
        def loss(x: jax.Array, weights: jax.Array) -> jax.Array:
            return jnp.sum(jax.lax.scan(lambda c, w: (f(c, w), None), x, weights)[0])

        return jax.jit(jax.grad(loss, (0, 1))).lower(X, WEIGHTS).compile()

    ours, expected = gradient(jtbridge.wrap(in_torch, backend="xla")), gradient(in_jax)
    assert ours.as_text().count(" dot(") == expected.as_text().count(" dot(") == 6
