"""jax.checkpoint: the forward runs again in the backward, and the gradient is the same."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from tests import reference
from tests.compare import assert_matches

from .problem import MOVING, Problem, jaxes, tensors
from .test_grad import expected_gradient


@pytest.mark.parametrize("name", MOVING)
def test_gradient(name: str, x64: None):
    problem = Problem(name)
    loss = jax.checkpoint(problem.jax_loss)
    grads = jax.jit(jax.grad(loss, tuple(range(len(problem.primals)))))(*jaxes(problem.primals))
    assert_matches(list(grads), expected_gradient(problem))


@pytest.mark.parametrize("policy", ["everything_saveable", "nothing_saveable", "dots_saveable"])
def test_policies(policy: str, backend: str, x64: None):
    problem = Problem("softmax")
    loss = jax.checkpoint(problem.jax_loss, policy=getattr(jax.checkpoint_policies, policy))
    assert_matches(list(jax.grad(loss, (0, 1))(*jaxes(problem.primals))), expected_gradient(problem))


@pytest.mark.parametrize("name", ["pointwise", "own_backward", "module", "spectrum"])
def test_second_derivative(name: str, backend: str, x64: None):
    problem = Problem(name)
    directions = [problem.like(problem.primals, seed) for seed in (1, 2)]

    def along(fn, direction):
        fn = jax.checkpoint(fn)

        def run(primals):
            grads = jax.grad(fn)(primals)
            return sum(jnp.sum(jnp.real(g * d)) for g, d in zip(grads, direction, strict=True))

        return run

    fn = along(along(lambda p: problem.jax_loss(*p), jaxes(directions[0])), jaxes(directions[1]))
    expected = reference.directional(problem.torch_loss, tensors(problem.primals), [tensors(d) for d in directions])
    assert_matches(jax.jit(fn)(jaxes(problem.primals)), expected, tolerance=1e-10)
