"""Reverse mode: jax.vjp and jax.grad against torch.autograd."""

from __future__ import annotations

import jax
import numpy as np
import pytest
import torch

import jtbridge
from tests import reference
from tests.compare import assert_matches

from .problem import MOVING, Problem, jaxes, tensors


@pytest.mark.parametrize("name", MOVING)
def test_vjp(name: str, backend: str):
    problem = Problem(name)
    primals = jaxes(problem.primals)
    out, pullback = jax.vjp(problem.jax_fn, *primals)
    cotangents = problem.like(out)
    assert_matches(out, problem.torch_fn(*tensors(problem.primals)))
    expected = reference.vjp(problem.torch_fn, tensors(problem.primals), tensors(cotangents))
    assert_matches(list(pullback(jaxes(cotangents))), expected)


@pytest.mark.parametrize("name", MOVING)
def test_jitted_vjp(name: str, backend: str, x64: None):
    problem = Problem(name)

    @jax.jit
    def run(primals, cotangents):
        return jax.vjp(problem.jax_fn, *primals)[1](cotangents)

    cotangents = problem.like(problem.torch_fn(*tensors(problem.primals)))
    expected = reference.vjp(problem.torch_fn, tensors(problem.primals), tensors(cotangents))
    assert_matches(list(run(jaxes(problem.primals), jaxes(cotangents))), expected)


@pytest.mark.parametrize("name", MOVING)
def test_recomputed_vjp(name: str, x64: None):
    """Without residuals the gradient is the same."""
    problem = Problem(name, residuals="recompute")
    cotangents = problem.like(problem.torch_fn(*tensors(problem.primals)))
    expected = reference.vjp(problem.torch_fn, tensors(problem.primals), tensors(cotangents))
    pullback = jax.jit(lambda *primals: jax.vjp(problem.jax_fn, *primals)[1](jaxes(cotangents)))
    assert_matches(list(pullback(*jaxes(problem.primals))), expected)


@pytest.mark.parametrize("name", MOVING)
def test_one_argument_at_a_time(name: str, x64: None):
    """The gradient by one argument is the same with and without the gradients by the others."""
    problem = Problem(name)
    cotangents = problem.like(problem.torch_fn(*tensors(problem.primals)))
    expected = reference.vjp(problem.torch_fn, tensors(problem.primals), tensors(cotangents))
    primals = jaxes(problem.primals)
    for i, x in enumerate(primals):
        pullback = jax.vjp(lambda x, i=i: problem.jax_fn(*primals[:i], x, *primals[i + 1 :]), x)[1]
        assert_matches(pullback(jaxes(cotangents))[0], expected[i])


@pytest.mark.parametrize("name", MOVING)
def test_one_result_at_a_time(name: str, x64: None):
    """Results that are not used have no cotangent, instead of a zero cotangent."""
    problem = Problem(name)
    count = len(problem.torch_fn(*tensors(problem.primals)))
    for o in range(count):
        out, pullback = jax.vjp(lambda *primals, o=o: problem.jax_fn(*primals)[o], *jaxes(problem.primals))
        (cotangent,) = problem.like([out])
        expected = reference.vjp(
            lambda *primals, o=o: [problem.torch_fn(*primals)[o]],
            tensors(problem.primals),
            tensors([cotangent]),
        )
        assert_matches(list(pullback(jax.numpy.asarray(cotangent))), expected)


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("by", ["auto", "dlpack", "callback"])
def test_lazy_zeros(by: str, jitted: bool):
    """Autograd returns a tensor of zeros without memory for each of these."""
    for fn in (
        lambda x: torch.sgn(torch.pow(torch.amin(x.view(-1), dim=0), 4)),
        lambda x: torch.sgn(x.amax()),
        lambda x: torch.sgn(x.sum()),
        lambda x: torch.sgn(x[0]),
    ):
        gradient = jax.grad(jtbridge.wrap(fn, backend=by))
        x = jax.numpy.array([1.0, -2.0, 3.0])
        np.testing.assert_array_equal((jax.jit(gradient) if jitted else gradient)(x), np.zeros(3))


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("by", ["auto", "dlpack", "callback"])
def test_lazy_zeros_of_batches(by: str, jitted: bool):
    """Torch traces operators on a lazy zero, as those of the gradient of `amax`, for no device."""
    jacobian = jax.jacrev(jtbridge.wrap(lambda x: [torch.sgn(torch.amax(x)), x.sum()], backend=by))
    of_sign, of_sum = (jax.jit(jacobian) if jitted else jacobian)(jax.numpy.array([1.0, -2.0, 3.0]))
    np.testing.assert_array_equal(of_sign, np.zeros(3))
    np.testing.assert_array_equal(of_sum, np.ones(3))
    hessian = jax.hessian(jtbridge.wrap(lambda x: torch.sgn(torch.amax(x)) * (x * x).sum(), backend=by))
    found = (jax.jit(hessian) if jitted else hessian)(jax.numpy.array([1.0, -2.0, 3.0]))
    np.testing.assert_array_equal(found, 2 * np.eye(3))


@pytest.mark.parametrize("by", ["auto", "xla", "dlpack", "callback"])
def test_lazy_zeros_of_inner_gradients(by: str):
    def inner(x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            y = x.detach().requires_grad_()
            (found,) = torch.autograd.grad(torch.sgn(torch.amax(y)), y, create_graph=True)
        return found + 1

    x = jax.numpy.array([1.0, -2.0, 3.0])
    f = jtbridge.wrap(inner, backend=by)
    np.testing.assert_array_equal(jax.jit(f)(x), np.ones(3))
