"""grad(vmap(f)): the gradient of a batched loss, also by arguments that its rows share."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jtbridge
from tests import reference
from tests.compare import assert_matches

from .problem import MOVING, Problem, jaxes, tensor, tensors
from .test_vmap_of_grad import ROWS, _columns


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("name", MOVING)
def test_vjp_of_vmap(name: str, shared: bool, x64: None):
    """With `shared` the last argument has no rows, so its gradient is a sum over them."""
    problem = Problem(name)
    rows = [problem.like(problem.primals, seed) for seed in range(ROWS)]
    if name in ("reductions", "cumulative"):  # the case wants positive numbers
        rows = [[abs(x) + 0.5 for x in row] for row in rows]
    count = len(problem.primals)
    shared = shared and count > 1
    columns = _columns(rows)
    if shared:
        columns[-1] = jnp.asarray(rows[0][-1])
    in_axes = [None if shared and i == count - 1 else 0 for i in range(count)]

    def torch_batch(*columns):
        one = [
            problem.torch_fn(*(c if axis is None else c[row] for c, axis in zip(columns, in_axes, strict=True)))
            for row in range(ROWS)
        ]
        return [torch.stack(column) for column in zip(*one, strict=True)]

    primals = [tensor(np.asarray(c)) for c in columns]
    cotangents = problem.like(torch_batch(*primals))
    with problem.batching_derivatives():
        out, grads = jax.jit(lambda *c: _vjp(jax.vmap(problem.jax_fn, in_axes), c, cotangents))(*columns)
    assert_matches(out, torch_batch(*primals))
    assert_matches(list(grads), reference.vjp(torch_batch, primals, tensors(cotangents)))


def _vjp(fn, primals, cotangents):
    out, pullback = jax.vjp(fn, *primals)
    return out, pullback(jaxes(cotangents))


@pytest.mark.parametrize("name", ["pointwise", "softmax", "module", "complex_to_real", "own_backward"])
def test_jvp_of_vmap(name: str, backend: str, x64: None):
    problem = Problem(name)
    rows = [problem.like(problem.primals, seed) for seed in range(ROWS)]
    moves = [problem.like(problem.primals, 10 + seed) for seed in range(ROWS)]
    _, moved = jax.jit(lambda x, dx: jax.jvp(jax.vmap(problem.jax_fn), x, dx))(_columns(rows), _columns(moves))
    expected = [
        reference.jvp(problem.torch_fn, tensors(row), tensors(move)) for row, move in zip(rows, moves, strict=True)
    ]
    assert_matches(moved, [torch.stack(column) for column in zip(*expected, strict=True)])


def test_grad_of_vmap_of_grad(backend: str, x64: None):
    """A gradient penalty: the derivative of per-example gradient norms."""
    f = jtbridge.wrap(lambda w, x: torch.tanh(x @ w).sum())
    w, x = np.linspace(-1, 1, 3), np.arange(6.0).reshape(2, 3) / 5

    @jax.jit
    def penalty(w, x):
        return jnp.sum(jax.vmap(jax.grad(f, argnums=1), in_axes=(None, 0))(w, x) ** 2)

    got = jax.grad(penalty)(jnp.asarray(w), jnp.asarray(x))
    t = tensor(w).requires_grad_()
    inputs = tensor(x).requires_grad_()
    (per_row,) = torch.autograd.grad(torch.tanh(inputs @ t).sum(), inputs, create_graph=True)
    assert_matches(got, torch.autograd.grad((per_row**2).sum(), t)[0])
