"""jax.grad and jax.value_and_grad of a scalar loss."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jtbridge
from tests import reference
from tests.compare import assert_matches

from .problem import MOVING, Problem, jaxes, tensors


def expected_gradient(problem: Problem) -> list[torch.Tensor]:
    """jax.grad of a real loss is the conjugate of torch's, which points uphill."""
    inputs = reference.leaves_of_graph(tensors(problem.primals))
    value = problem.torch_loss(*inputs)
    return [g.conj().resolve_conj() for g in reference.gradients([value], inputs, [torch.ones_like(value)])]


@pytest.mark.parametrize("name", MOVING)
def test_value_and_grad(name: str, backend: str, x64: None):
    problem = Problem(name)
    eager = jax.value_and_grad(problem.jax_loss, tuple(range(len(problem.primals))))
    expected = [problem.torch_loss(*tensors(problem.primals)).detach(), *expected_gradient(problem)]
    for run in (eager, jax.jit(eager)):
        value, grads = run(*jaxes(problem.primals))
        assert_matches([value, *grads], expected)


def test_integer_arguments_have_float0_gradients(backend: str):
    f = jtbridge.wrap(lambda x, i: x[i].sum())
    grads = jax.grad(f, argnums=(0, 1), allow_int=True)(jnp.arange(4.0), jnp.array([1, 1, 3]))
    assert grads[0].tolist() == [0, 2, 0, 1]
    assert grads[1].dtype == jax.dtypes.float0


def test_has_aux(backend: str):
    f = jtbridge.wrap(lambda x: (x.square().sum(), {"n": (x > 0).sum()}))
    grads, aux = jax.jit(jax.grad(f, has_aux=True))(jnp.array([1.0, -2.0]))
    assert grads.tolist() == [2, -4]
    assert aux["n"].tolist() == 1


def test_the_same_array_twice(backend: str):
    """One array passed twice is two arguments: each has its own gradient, and grad sums them."""
    f = jtbridge.wrap(lambda x, y: (x * y.detach() + 3 * y).sum())
    x = jnp.array([2.0, 5.0])
    assert jax.jit(jax.grad(lambda x: f(x, x)))(x).tolist() == [5, 8]
    assert jax.grad(lambda x: f(x, x))(x).tolist() == [5, 8]


def test_gradient_passes_through_jax_code_on_both_sides(backend: str, rng: np.random.Generator, x64: None):
    f = jtbridge.wrap(lambda x: torch.tanh(x) ** 2)
    x = rng.normal(size=(3,))
    got = jax.jit(jax.grad(lambda x: jnp.sum(jnp.sin(f(jnp.exp(x))))))(jnp.asarray(x))
    t = torch.from_numpy(x).requires_grad_()
    (expected,) = torch.autograd.grad(torch.sin(torch.tanh(t.exp()) ** 2).sum(), t)
    assert_matches(got, expected)


def test_stop_gradient_outside(backend: str):
    f = jtbridge.wrap(lambda x, y: (x * y).sum())
    grads = jax.jit(jax.grad(lambda x: f(x, jax.lax.stop_gradient(x))))(jnp.array([3.0]))
    assert grads.tolist() == [3]


def test_unused_argument_has_a_zero_gradient(backend: str):
    f = jtbridge.wrap(lambda x, y: x.sin().sum())
    assert jax.jit(jax.grad(f, argnums=1))(jnp.ones(2), jnp.ones((3, 2))).tolist() == [[0, 0]] * 3


def test_chain_of_wrapped_functions(backend: str, x64: None):
    f, g = jtbridge.wrap(torch.sin), jtbridge.wrap(lambda x: x * x)
    got = jax.jit(jax.grad(lambda x: f(g(f(x)))))(jnp.array(0.7))
    t = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad(torch.sin(torch.sin(t) ** 2), t)
    assert_matches(got, expected)


@pytest.mark.parametrize("index", [[True, False, False], torch.tensor([False, True, False])], ids=["list", "tensor"])
def test_the_rows_of_a_constant_mask_are_broadcast(index, backend: str):
    """While a called function is traced, the number of rows is a symbol, which torch assumes to be 3."""
    f = jtbridge.wrap(lambda x: (x[index] * x).sum())
    x = jnp.arange(1.0, 10).reshape(3, 3)
    row = 0 if isinstance(index, list) else 1
    expected = jax.grad(lambda x: (x[row] * x).sum())(x)
    np.testing.assert_allclose(jax.jit(jax.grad(f))(x), expected)


@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
def test_hooks_of_tensors_that_have_a_gradient_only_under_grad(backend: str, jitted: bool):
    """A function is also traced for its value, where torch refuses a hook and `retain_grad`."""

    def f(x):
        y = x * 1
        y.register_hook(lambda gradient: gradient * 3)
        y.register_hook(lambda gradient: gradient * 5).remove()
        y.retain_grad()
        return (y * y).sum()

    gradient = jax.grad(jtbridge.wrap(f, backend=backend))
    assert (jax.jit(gradient) if jitted else gradient)(jnp.arange(3.0)).tolist() == [0, 6, 12]
