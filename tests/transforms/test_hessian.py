"""Second derivatives: jax.hessian and the other three nestings, against torch's reverse mode twice."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import jtbridge
from jtbridge.errors import TranslationError
from tests import reference
from tests.compare import assert_matches

from .problem import ONCE, REAL_TWICE, TWICE, Problem, jaxes, tensors

NESTINGS = {
    "forward_over_reverse": lambda f, n: jax.jacfwd(jax.grad(f, n), n),
    "reverse_over_reverse": lambda f, n: jax.jacrev(jax.grad(f, n), n),
    "reverse_over_forward": lambda f, n: jax.jacrev(jax.jacfwd(f, n), n),
    "forward_over_forward": lambda f, n: jax.jacfwd(jax.jacfwd(f, n), n),
}


@pytest.mark.parametrize("name", REAL_TWICE)
def test_hessian(name: str, x64: None):
    problem = Problem(name)
    with problem.batching_derivatives():
        found = jax.jit(jax.hessian(problem.jax_loss, tuple(range(len(problem.primals)))))(*jaxes(problem.primals))
    expected = reference.hessian(problem.torch_loss, tensors(problem.primals))
    assert_matches([list(row) for row in found], expected)


@pytest.mark.parametrize("nesting", NESTINGS)
@pytest.mark.parametrize(
    "name",
    [
        "pointwise",
        "softmax",
        "own_backward",
        "own_backward_two_results",
        "inner_func_grad",
        "no_grad_region",
        "module",
    ],
)
def test_nestings(name: str, nesting: str, backend: str, x64: None):
    problem = Problem(name)
    found = NESTINGS[nesting](problem.jax_loss, tuple(range(len(problem.primals))))(*jaxes(problem.primals))
    expected = reference.hessian(problem.torch_loss, tensors(problem.primals))
    assert_matches([list(row) for row in found], expected)


@pytest.mark.parametrize("name", TWICE)
def test_hessian_vector_product(name: str, backend: str, x64: None):
    """grad of a directional derivative, complex arguments included."""
    problem = Problem(name)
    directions = [problem.like(problem.primals, seed) for seed in (1, 2)]

    def along(primals, direction):
        return jax.jvp(problem.jax_loss, primals, direction)[1]

    @jax.jit
    def run(primals, first, second):
        grads = jax.grad(lambda primals: along(primals, first))(primals)
        return sum(jnp.sum(jnp.real(g * d)) for g, d in zip(grads, second, strict=True))

    found = run(*[jaxes(x) for x in (problem.primals, *directions)])
    expected = reference.directional(problem.torch_loss, tensors(problem.primals), [tensors(d) for d in directions])
    assert_matches(found, expected, tolerance=1e-10)


@pytest.mark.parametrize("name", ONCE)
def test_second_derivatives_refused_by_torch_are_refused(name: str, backend: str):
    problem = Problem(name)
    twice = jax.grad(lambda x, *rest: jnp.sum(jax.grad(problem.jax_loss)(x, *rest) ** 2))
    refusal = "once_differentiable|is not implemented|does not require grad"
    if name == "flash_attention" and backend == "xla":  # a translation writes it out
        with sdpa_kernel(SDPBackend.MATH):
            first, *rest = tensors(problem.primals)
            once = lambda x: torch.func.grad(problem.torch_loss)(x, *rest).square().sum()  # noqa: E731
            want = torch.func.grad(once)(first)
        assert_matches(twice(*jaxes(problem.primals)), want)
        return
    inputs = [x.requires_grad_() for x in tensors(problem.primals)]
    first = torch.autograd.grad(problem.torch_loss(*inputs), inputs, create_graph=True)
    with pytest.raises(RuntimeError, match=f"{refusal}|not have been used in the graph"):
        torch.autograd.grad(sum(g.sum() for g in first), inputs)
    with pytest.raises((RuntimeError, TranslationError), match=refusal):
        twice(*jaxes(problem.primals))


def test_mixed_second_derivative(backend: str, x64: None):
    f = jtbridge.wrap(lambda x, y: x**2 * y**3)
    mixed = jax.jit(jax.grad(jax.grad(f, argnums=0), argnums=1))
    assert mixed(jnp.array(2.0), jnp.array(3.0)).tolist() == 2 * 2 * 3 * 9


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("x", [[0.1, 0.2, 0.2, -0.5], [-200.0, 0.0, 150.0, 0.0]])
def test_logcumsumexp_whose_second_derivative_torch_lacks(x: list[float], jit: bool, backend: str, x64: None):
    """Torch's own is NaN wherever the cotangent is 0."""
    f = jtbridge.wrap(lambda x: x.logcumsumexp(0)[-1], backend=backend)
    hessian = jax.jit(jax.hessian(f)) if jit else jax.hessian(f)
    expected = jax.hessian(jax.nn.logsumexp)(jnp.array(x))
    np.testing.assert_allclose(hessian(jnp.array(x)), expected, atol=1e-12)
