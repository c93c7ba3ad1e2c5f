"""Replacements of functions whose derivative torch lacks or gets wrong: values and derivatives are right."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jtbridge

INF = float("inf")
FAR_APART = (
    [-1e9, 5.3, 1.0],
    [0.5, -INF, 1.0],
    [-60.0, 20.0, 30.0],
    [30.0, -20.0, -900.0],
    [0.2, 0.2, 0.2],
    [0.5, -INF, -INF],
)


@pytest.mark.parametrize("x", FAR_APART, ids=str)
@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("backend", ["auto", "dlpack"])
def test_logcumsumexp_of_masked_elements(dtype: str, jit: bool, x: list[float], backend: str, x64: None):
    values = torch.tensor(x, dtype=getattr(torch, dtype), requires_grad=True)
    ct = torch.tensor([1.0, -2.0, 0.5], dtype=values.dtype)
    expected = torch.logcumsumexp(values, 0)
    (gradient,) = torch.autograd.grad(expected, values, ct)

    f = jtbridge.wrap(lambda x: torch.logcumsumexp(x, 0), backend=backend)

    def derivatives(x: jax.Array) -> tuple[jax.Array, ...]:
        out, pullback = jax.vjp(f, x)
        moved = jax.jvp(f, (x,), (jnp.ones_like(x),))[1]
        return out, pullback(jnp.asarray(ct.numpy()))[0], moved, jax.hessian(lambda x: f(x).sum())(x)

    out, grad, moved, hessian = (jax.jit(derivatives) if jit else derivatives)(jnp.asarray(values.detach().numpy()))
    tolerance = 1e-6 if dtype == "float32" else 1e-14
    np.testing.assert_allclose(out, expected.detach(), rtol=tolerance)
    np.testing.assert_allclose(grad, gradient, rtol=10 * tolerance, atol=tolerance)  # torch's formula loses a digit
    np.testing.assert_allclose(moved, np.ones(3), rtol=tolerance)
    # Adding one number to all elements adds it to the results: the rows of second derivatives sum to zero.
    np.testing.assert_allclose(hessian.sum(-1), np.zeros(3), atol=10 * tolerance)
    np.testing.assert_allclose(np.diag(hessian), _curvatures(np.array(x)), rtol=1e-5, atol=10 * tolerance)


def _curvatures(x: np.ndarray) -> np.ndarray:
    """Return the second derivatives of the sum of logcumsumexp by each element: p (1 - p) for each prefix."""
    with np.errstate(over="ignore"):
        prefixes = [np.exp(x[:n] - x[:n].max()) for n in range(1, len(x) + 1)]
    shares = [np.append(p / p.sum(), np.zeros(len(x) - len(p))) for p in prefixes]
    return np.sum([p * (1 - p) for p in shares], axis=0)


OF_ALL: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "median": lambda x: x.median(),
    "nanmedian": lambda x: torch.nanmedian(x),
    "median by name": lambda x: torch.median(input=x),
    "max": lambda x: x.max(),
    "max by name": lambda x: torch.max(input=x),
    "min by name": lambda x: torch.min(input=x),
    "aten.max": lambda x: torch.ops.aten.max(x),
    "aten.median": lambda x: torch.ops.aten.median.default(x),
}
NAN = float("nan")
ROWS = [
    [1.0, NAN, 2.0],
    [NAN, NAN, 2.0],
    [NAN, NAN, NAN],
    [INF, INF, 1.0],
    [-INF, -INF, 3.0],
    [2.0, 2.0, 1.0],
    [0.0, 1.0, 1.0],
    [1.0, 2.0, 3.0],
    [-1.0, -1.0, -2.0],
]


@pytest.mark.parametrize("name", OF_ALL)
@pytest.mark.parametrize("jit", [False, True])
def test_reductions_of_all_elements_in_a_batch_of_gradients(jit: bool, name: str, backend: str):
    fn = OF_ALL[name]
    batched = jax.vmap(jax.value_and_grad(jtbridge.wrap(fn, backend=backend)))
    values, gradients = (jax.jit(batched) if jit else batched)(jnp.array(ROWS))
    rows = [torch.tensor(row, requires_grad=True) for row in ROWS]
    np.testing.assert_array_equal(values, [fn(row).item() for row in rows])
    np.testing.assert_allclose(gradients, [torch.autograd.grad(fn(row), row)[0].tolist() for row in rows])


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("name", ["median", "nanmedian", "max", "min by name"])
def test_reductions_of_all_integers_in_a_batch_of_gradients(jit: bool, name: str, backend: str, x64: None):
    f = jtbridge.wrap(lambda x, n: (x.sum(), OF_ALL[name](n)), backend=backend)
    batched = jax.vmap(jax.value_and_grad(f, has_aux=True))
    x, n = jnp.ones((2, 3)), jnp.array([[16777217, 16777219, 5], [-3, 2**40 + 1, 2**41]])
    (_, found), _ = (jax.jit(batched) if jit else batched)(x, n)
    assert found.dtype == jnp.int64
    assert found.tolist() == [OF_ALL[name](torch.from_numpy(np.array(row))).item() for row in n]


# A batch of cotangents alone of cdist is run row by row: torch.vmap is wrong for it.
@pytest.mark.filterwarnings("ignore::jtbridge.errors.SequentialVmapWarning")
@pytest.mark.parametrize("jit", [False, True])
def test_distances_by_the_largest_of_equal_differences(jit: bool, backend: str):
    """Torch gives the whole gradient to each of them; the forward derivative is its transpose."""
    f = jtbridge.wrap(lambda a, b: torch.cdist(a, b, float("inf")), backend=backend)
    a, b = jnp.array([[0.0, 0.0, 0.5], [INF, 0.0, 1.0]]), jnp.array([[1.0, 1.0, 1.0]])
    for jacobian in (jax.jacfwd(f), jax.jacrev(f)):
        found = (jax.jit(jacobian) if jit else jacobian)(a[:1], b)
        np.testing.assert_array_equal(found.ravel(), [-1.0, -1.0, 0.0])
    np.testing.assert_array_equal(jax.vmap(f, (0, None))(a[:, None], b).ravel(), [1.0, INF])


CUDNN = {
    "layer_norm": lambda x: torch.layer_norm(x, (3,), cudnn_enable=False) ** 3,
    "group_norm": lambda x: torch.group_norm(x, 1, cudnn_enabled=False) ** 3,
}


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("name", CUDNN)
def test_norms_with_cudnn_enabled_flag(name: str, jit: bool, x64: None):
    f = jtbridge.wrap(lambda x: CUDNN[name](x).sum())
    x = np.array([[0.1, 0.5, -0.3], [0.7, 0.2, 0.9]])
    hessian = jax.jit(jax.hessian(f)) if jit else jax.hessian(f)
    expected = torch.autograd.functional.hessian(lambda x: CUDNN[name](x).sum(), torch.from_numpy(x))
    np.testing.assert_allclose(hessian(x), expected, rtol=1e-4, atol=1e-4)


def two_results(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return x.cos(), torch.sinc(x), x[:0]


@pytest.mark.parametrize("n", [6, 9_000])
def test_forward_derivatives_where_the_second_derivative_is_nan(n: int, x64: None):
    """The derivative of the gradient is NaN at some elements. Only their rows of the Jacobian are computed."""
    x, dx = torch.arange(n, dtype=torch.float64) / 2, torch.linspace(1, 2, n, dtype=torch.float64)
    f = jtbridge.wrap(two_results)
    found = jax.jvp(f, (jnp.asarray(x.numpy()),), (jnp.asarray(dx.numpy()),))[1]
    expected = torch.func.jvp(two_results, (x,), (dx,))[1]
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-12)
    powers = jtbridge.wrap(lambda x: x**x)
    base = jnp.arange(float(n)) % 3
    moved = jax.jvp(powers, (base,), (jnp.ones(n),))[1]
    np.testing.assert_allclose(moved, np.array([0.0, 1.0, 4 * (1 + np.log(2))])[np.arange(n) % 3], atol=1e-12)


@pytest.mark.parametrize("batched", [False, True])
def test_jacobians_where_the_second_derivative_is_nan(batched: bool, x64: None):
    x = torch.tensor([[0.0, 0.5, 1.0], [2.0, 0.0, 0.0]], dtype=torch.float64)
    jacobian, expected = jax.jacfwd(jtbridge.wrap(two_results)), torch.func.jacfwd(two_results)
    if batched:
        jacobian, expected = jax.vmap(jacobian), torch.func.vmap(expected)
    for ours, theirs in zip(jacobian(jnp.asarray(x.numpy())), expected(x), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-12)


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("shape", [(3,), (2, 3), (2, 3, 2)])
@pytest.mark.parametrize("backend", ["auto", "dlpack"])
def test_forward_derivative_of_prelu_at_zero_is_that_of_its_gradient(backend: str, shape: tuple[int, ...], jit: bool):
    """Torch's forward mode has the slope 1 there, and its gradient the slope of the negative side."""
    slopes = torch.tensor([0.25] if len(shape) == 1 else [0.25, -0.5, 3.0])
    x = torch.tensor([-1.0, 0.0, 2.0]).repeat(math.prod(shape) // 3).reshape(shape)
    expected = torch.autograd.functional.jacobian(torch.prelu, (x, slopes))
    f = jtbridge.wrap(torch.prelu, backend=backend)
    arguments = jnp.asarray(x.numpy()), jnp.asarray(slopes.numpy())
    for derivative in (jax.jacrev(f, (0, 1)), jax.jacfwd(f, (0, 1))):
        got = (jax.jit(derivative) if jit else derivative)(*arguments)
        for ours, theirs in zip(got, expected, strict=True):
            np.testing.assert_array_equal(ours, theirs)
