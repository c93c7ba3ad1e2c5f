"""vmap(grad(f)): per-example gradients, against a loop in torch."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jtbridge
from tests import reference
from tests.compare import assert_matches

from .problem import MOVING, Problem, jaxes, tensors
from .test_jvp import FORWARD_MODE

ROWS = 3


def _stacked(rows: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    return [torch.stack(column) for column in zip(*rows, strict=True)]


@pytest.mark.parametrize("name", MOVING)
def test_vmap_of_vjp(name: str, backend: str, x64: None):
    problem = Problem(name)
    rows = [problem.like(problem.primals, seed) for seed in range(ROWS)]
    if name in ("reductions", "cumulative"):  # the case wants positive numbers
        rows = [[abs(x) + 0.5 for x in row] for row in rows]
    cotangents = [problem.like(problem.torch_fn(*tensors(problem.primals)), seed) for seed in range(ROWS)]

    def one(primals, cotangents):
        out, pullback = jax.vjp(problem.jax_fn, *primals)
        return out, list(pullback(cotangents))

    batched = jax.jit(jax.vmap(one))
    with problem.batching_derivatives():
        out, grads = batched(_columns(rows), _columns(cotangents))
    assert_matches(out, _stacked([problem.torch_fn(*tensors(row)) for row in rows]))
    expected = [
        reference.vjp(problem.torch_fn, tensors(row), tensors(ct)) for row, ct in zip(rows, cotangents, strict=True)
    ]
    assert_matches(grads, _stacked(expected))


@pytest.mark.parametrize("name", FORWARD_MODE)
def test_vmap_of_jvp(name: str, x64: None):
    problem = Problem(name)
    tangents = [problem.like(problem.primals, seed) for seed in range(ROWS)]
    primals = jaxes(problem.primals)
    with problem.batching_derivatives():
        moved = jax.jit(jax.vmap(lambda ts: jax.jvp(problem.jax_fn, primals, ts)[1]))(_columns(tangents))
    expected = [reference.jvp(problem.torch_fn, tensors(problem.primals), tensors(t)) for t in tangents]
    assert_matches(moved, _stacked(expected))


@pytest.mark.parametrize("name", MOVING)
def test_only_cotangents_are_batched(name: str, x64: None):
    """The primals are not batched, as in jax.jacrev."""
    problem = Problem(name)
    out, pullback = jax.vjp(problem.jax_fn, *jaxes(problem.primals))
    cotangents = [problem.like(out, seed) for seed in range(ROWS)]
    with problem.batching_derivatives():
        grads = jax.vmap(pullback)(_columns(cotangents))
    expected = [reference.vjp(problem.torch_fn, tensors(problem.primals), tensors(ct)) for ct in cotangents]
    assert_matches(list(grads), _stacked(expected))


def _hooked_if_it_requires_grad(x):
    y = x * 2
    if y.requires_grad:
        y.register_hook(lambda g: g * 10)
    return y * x


def _hooked_if_it_has_a_node(x):
    y = x.sin()
    if y.grad_fn is not None:
        y.grad_fn.register_prehook(lambda grads: tuple(g * 3 for g in grads))
    return y


def _hooked_unless_it_is_a_leaf(x):
    y = x.exp()
    if not y.is_leaf:
        y.register_hook(lambda g: g.clamp(-1, 1))
    return y * 5


def _padded_embedding(table):
    return torch.nn.functional.embedding(torch.tensor([[0, 2, 1], [2, 2, 0]]), table, padding_idx=-1)


def _padded_embedding_by_its_operator(table):
    return torch.embedding(table, torch.tensor([0, 2, 1]), 2)


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize(
    "f",
    [
        _hooked_if_it_requires_grad,
        _hooked_if_it_has_a_node,
        _hooked_unless_it_is_a_leaf,
        _padded_embedding,
        _padded_embedding_by_its_operator,
    ],
    ids=lambda f: f.__name__,
)
def test_gradients_that_differ_under_torch_vmap(f, jit: bool, backend: str):
    rows = torch.randn(ROWS, 3, 4, generator=torch.Generator().manual_seed(1))
    wrapped = jtbridge.wrap(f, backend=backend)
    gradient = jax.vmap(jax.grad(lambda x: (wrapped(x) * jnp.arange(1, 5.0)).sum()))
    weights = torch.arange(1, 5.0)
    expected = torch.stack(
        [reference.vjp(lambda x: [f(x) * weights], [row], [torch.ones(f(row).shape)])[0] for row in rows]
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", jtbridge.errors.SequentialVmapWarning)
        found = (jax.jit(gradient) if jit else gradient)(*jaxes([rows]))
    assert_matches([found], [expected])


def _columns(rows: list) -> list[jax.Array]:
    return [jnp.stack(jaxes(column)) for column in zip(*rows, strict=True)]


@pytest.mark.filterwarnings("ignore::jtbridge.errors.SequentialVmapWarning")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("backend", ["auto", "xla", "dlpack", "callback"])
def test_batched_cotangents_of_cdist_with_unbatched_arguments(backend, compiled):
    """torch.func.jacrev of it is wrong in torch 2.13."""

    def distances(x):
        return torch.cdist(x, x + 4.5)

    x = torch.tensor([[0.3, -1.0, 0.5], [1.2, 0.1, -0.4]])
    expected = torch.autograd.functional.jacobian(distances, x)
    jacobian = jax.jacrev(jtbridge.wrap(distances, backend=backend))
    found = (jax.jit(jacobian) if compiled else jacobian)(jnp.asarray(x.numpy()))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
