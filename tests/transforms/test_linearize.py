"""jax.linearize, and jax.linear_transpose of the linear function that it returns."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
import torch

import jtbridge
from tests import reference
from tests.compare import assert_matches

from .problem import Problem, jaxes, tensors
from .test_jvp import FORWARD_MODE


@pytest.mark.parametrize("name", FORWARD_MODE)
def test_linearize(name: str, backend: str, x64: None):
    problem = Problem(name)
    out, linear = jax.linearize(problem.jax_fn, *jaxes(problem.primals))
    assert_matches(out, problem.torch_fn(*tensors(problem.primals)))
    for seed in (1, 2):  # one linearization serves several tangents
        tangents = problem.like(problem.primals, seed)
        expected = reference.jvp(problem.torch_fn, tensors(problem.primals), tensors(tangents))
        assert_matches(linear(*jaxes(tangents)), expected)


@pytest.mark.parametrize("name", ["pointwise", "complex_to_real", "no_grad_region", "module"])
def test_jitted_and_vmapped_linear_map(name: str, backend: str, x64: None):
    problem = Problem(name)
    _, linear = jax.linearize(problem.jax_fn, *jaxes(problem.primals))
    rows = [problem.like(problem.primals, seed) for seed in (1, 2, 3)]
    moved = jax.jit(jax.vmap(linear))(*[jnp.stack(jaxes(column)) for column in zip(*rows, strict=True)])
    expected = [reference.jvp(problem.torch_fn, tensors(problem.primals), tensors(row)) for row in rows]
    assert_matches(moved, [torch.stack(column) for column in zip(*expected, strict=True)])


@pytest.mark.parametrize("name", ["pointwise", "complex_to_real", "no_grad_region", "module"])
def test_transpose_of_the_linear_map(name: str, backend: str, x64: None):
    problem = Problem(name)
    out, linear = jax.linearize(problem.jax_fn, *jaxes(problem.primals))
    cotangents = problem.like(out)
    pulled = jax.linear_transpose(linear, *jaxes(problem.primals))(jaxes(cotangents))
    expected = reference.vjp(problem.torch_fn, tensors(problem.primals), tensors(cotangents))
    assert_matches(list(pulled), expected)


def test_linearize_under_jit(backend: str):
    f = jtbridge.wrap(torch.sin)

    @jax.jit
    def run(x, dx):
        y, linear = jax.linearize(f, x)
        return y, linear(dx), linear(2 * dx)

    y, once, twice = run(jnp.array([0.5, 1.0]), jnp.ones(2))
    assert_matches([y, once], [torch.sin(torch.tensor([0.5, 1.0])), torch.cos(torch.tensor([0.5, 1.0]))])
    assert twice.tolist() == (2 * once).tolist()
