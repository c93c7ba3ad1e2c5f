"""Linear torch functions have transposes, as iterative solvers and implicit differentiation ask for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from jax.scipy.sparse.linalg import bicgstab, cg, gmres

import jtbridge
from jtbridge.errors import DifferentiationError

BACKENDS = ["xla", "dlpack", "callback"]
X = jnp.array([0.5, -1.0, 2.0, 3.0])
IMAGE = jnp.sin(jnp.arange(36.0)).reshape(1, 1, 6, 6)
COMPLEX = jnp.array([0.5 + 1j, -1.0, 2.0 - 2j])
MATRIX = torch.eye(4) * 5 + torch.sin(torch.arange(16.0)).reshape(4, 4)
GRID = torch.linspace(-1, 1, 18).reshape(1, 3, 3, 2)


def with_slice_written(v: torch.Tensor) -> torch.Tensor:
    v = v.clone()
    v[1:3] = 0.0
    v[0] = v[3]
    return v


LINEAR: dict[str, tuple[Callable[..., Any], jax.Array]] = {
    "twice": (lambda v: 2 * v, X),
    "quotient": (lambda v: v / 3, X),
    "with_a_constant": (lambda v: v + 1, X),
    "without_the_argument": (lambda v: torch.ones(3), X),
    "product": (lambda v: MATRIX @ v, X),
    "module": (torch.nn.Linear(4, 2), X),
    "einsum": (lambda v: torch.einsum("i,ij->j", v, MATRIX), X),
    "centered": (lambda v: v - v.mean(), X),
    "written_in_place": (with_slice_written, X),
    "scattered": (lambda v: torch.zeros(6).index_put((torch.tensor([0, 3, 5, 1]),), v), X),
    "indexed": (lambda v: v[[0, 2, 2]], X),
    "masked": (lambda v: torch.where(torch.tensor([True, False, True, True]), v, 0.0), X),
    "solved": (lambda v: torch.linalg.solve(MATRIX, v), X),
    "double_inside": (lambda v: v.double() * 2, X),
    "convolution": (lambda v: F.conv2d(v, torch.ones(1, 1, 3, 3), padding=1, stride=2), IMAGE),
    "transposed_convolution": (lambda v: F.conv_transpose2d(v, torch.ones(1, 1, 3, 3)), IMAGE),
    "pooled": (lambda v: F.avg_pool2d(v, 2), IMAGE),
    "resized": (lambda v: F.interpolate(v, scale_factor=2, mode="bilinear"), IMAGE),
    "sampled": (lambda v: F.grid_sample(v, GRID, align_corners=True), IMAGE),
    "spectrum": (lambda v: torch.fft.rfft(v), X),
}

OF_COMPLEX: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "product": (lambda v: v * (1 + 2j), lambda v: v * (1 + 2j)),
    "spectrum": (lambda v: torch.fft.ifft(v) * 2j, lambda v: jnp.fft.ifft(v) * 2j),
    "real_part": (lambda v: v.real, lambda v: v.real),
    "conjugate": (torch.conj_physical, jnp.conj),
}


def without_gradient(v: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return 2 * v


NOT_LINEAR: dict[str, Callable[..., Any]] = {
    "sine": torch.sin,
    "square": lambda v: v * v,
    "reciprocal": lambda v: 1 / v,
    "absolute": torch.abs,
    "largest": lambda v: v.max(),
    # The derivative of these functions does not use v, so it does not show that they are not linear.
    "sign": torch.sign,
    "floor": torch.floor,
    "fraction": torch.frac,
    "remainder": lambda v: v % 2,
    "rounded_quotient": lambda v: torch.div(v, 2, rounding_mode="floor"),
    "integer": lambda v: v.to(torch.int32).to(torch.float32),
    # These functions are linear, but their derivative is not their transpose.
    "detached": lambda v: 2 * v.detach(),
    "partly_detached": lambda v: v + v.detach(),
    "detached_result": lambda v: (lambda y: (y, y.detach() + v))(2 * v),
    "without_gradient": without_gradient,
    "data": lambda v: v.data * 2,
}


def cotangent_like(result: jax.Array) -> jax.Array:
    values = jnp.cos(jnp.arange(result.size, dtype=jnp.float32)).reshape(result.shape)
    return values.astype(result.dtype) * (1 + 1j) if jnp.iscomplexobj(result) else values.astype(result.dtype)


def close(got: Any, expected: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=3e-5, atol=3e-6), got, expected)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("case", LINEAR)
def test_linear_functions(case: str, name: str):
    fn, x = LINEAR[case]
    f = jtbridge.wrap(fn, backend=name)
    ct = cotangent_like(f(x))
    (got,) = jax.linear_transpose(f, x)(ct)
    expected = jnp.real(jnp.tensordot(ct, jax.jacfwd(f)(x), ct.ndim)).astype(x.dtype)
    close(got, expected)
    close(jax.jit(lambda c: jax.linear_transpose(f, x)(c)[0])(ct), expected)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("case", OF_COMPLEX)
def test_complex_functions_as_jax_transposes_them(case: str, name: str):
    fn, in_jax = OF_COMPLEX[case]
    f = jtbridge.wrap(fn, backend=name)
    ct = cotangent_like(f(COMPLEX))
    close(jax.linear_transpose(f, COMPLEX)(ct), jax.linear_transpose(in_jax, COMPLEX)(ct))


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("case", NOT_LINEAR)
def test_other_functions_are_refused(case: str, name: str):
    f = jtbridge.wrap(NOT_LINEAR[case], backend=name)
    with pytest.raises(DifferentiationError, match="takes a linear function"):
        jax.linear_transpose(f, X)(f(X))


def test_a_function_that_reads_values_is_refused():
    f = jtbridge.wrap(lambda v: v * float(v[0]), backend="dlpack")
    with pytest.raises(DifferentiationError, match="it has no graph that could show"):
        jax.linear_transpose(f, X)(X)


@pytest.mark.parametrize("name", BACKENDS)
def test_several_arguments(name: str):
    f = jtbridge.wrap(lambda a, b: (a + 2 * b, {"s": 3 * a}), backend=name)
    close(jax.linear_transpose(f, X, X)((X, {"s": X})), (4 * X, 2 * X))
    product = jtbridge.wrap(lambda a, v: a @ v, backend=name)
    matrix = jnp.asarray(MATRIX.numpy())
    close(jax.linear_transpose(lambda v: product(matrix, v), X)(X), (matrix.T @ X,))
    close(jax.linear_transpose(lambda a: product(a, X), matrix)(X), (jnp.outer(X, X),))
    with pytest.raises(DifferentiationError, match=r"aten\.mv"):
        jax.linear_transpose(product, matrix, X)(X)


@pytest.mark.parametrize("name", BACKENDS)
def test_pullbacks_and_tangent_maps(name: str):
    f = jtbridge.wrap(lambda v: torch.sin(v) * v.sum(), backend=name)
    pullback, tangents = jax.vjp(f, X)[1], jax.linearize(f, X)[1]
    jacobian = jax.jacfwd(f)(X)
    close(jax.linear_transpose(pullback, X)((X,)), (jacobian @ X,))
    close(jax.jit(lambda x: jax.linear_transpose(jax.vjp(f, x)[1], X)((X,)))(X), (jacobian @ X,))
    close(jax.linear_transpose(tangents, X)(X), (jacobian.T @ X,))
    close(jax.linear_transpose(lambda d: jax.jvp(f, (X,), (d,))[1], X)(X), (jacobian.T @ X,))


@pytest.mark.parametrize("name", BACKENDS)
def test_nestings(name: str):
    f = jtbridge.wrap(lambda v: MATRIX @ v, backend=name)
    matrix = jnp.asarray(MATRIX.numpy())
    rows = jnp.stack([X, 2 * X])
    close(jax.vmap(lambda c: jax.linear_transpose(f, X)(c)[0])(rows), rows @ matrix)
    close(jax.linear_transpose(jax.vmap(f), rows)(rows)[0], rows @ matrix)
    close(jax.linear_transpose(jax.checkpoint(f), X)(X)[0], X @ matrix)
    close(jax.linear_transpose(lambda v: jax.vjp(f, v)[0], X)(X)[0], X @ matrix)
    back = jax.linear_transpose(lambda c: jax.linear_transpose(f, X)(c)[0], X)
    close(back(X)[0], matrix @ X)
    twice = jax.linear_transpose(lambda v: jax.lax.scan(lambda c, _: (f(c), None), v, None, length=2)[0], X)
    close(twice(X)[0], X @ matrix @ matrix)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("solver", [gmres, bicgstab, cg])
def test_solvers_and_their_derivatives(solver: Callable[..., Any], name: str):
    matrix = jnp.asarray((MATRIX @ MATRIX.T).numpy()) / 10
    product = jtbridge.wrap(lambda a, v: a @ v, backend=name)

    def solved(product: Callable[..., Any], a: jax.Array, b: jax.Array) -> jax.Array:
        return solver(lambda v: product(a, v), b, tol=1e-7)[0]

    def loss(product: Callable[..., Any], a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.sum(solved(product, a, b) ** 2)

    close(solved(product, matrix, X), jnp.linalg.solve(matrix, X))
    gradient = jax.jit(jax.grad(loss, (1, 2)), static_argnums=0)
    close(gradient(product, matrix, X), gradient(jnp.matmul, matrix, X))
    hessian = jax.jit(jax.hessian(loss, 2), static_argnums=0)
    close(hessian(product, matrix, X), hessian(jnp.matmul, matrix, X))


@pytest.mark.parametrize("name", BACKENDS)
def test_custom_linear_solve(name: str):
    """jax.lax.custom_linear_solve, with which jaxopt differentiates an optimum, and lineax a solution."""
    matrix = jnp.asarray(MATRIX.numpy())
    product = jtbridge.wrap(lambda a, v: a @ v, backend=name)

    def loss(product: Callable[..., Any], a: jax.Array, b: jax.Array) -> jax.Array:
        def solve(matvec: Callable[..., Any], right: jax.Array) -> jax.Array:
            return jnp.linalg.solve(jax.vmap(matvec, out_axes=1)(jnp.eye(4)), right)  # forms it from products

        return jax.lax.custom_linear_solve(lambda v: product(a, v), b, solve, transpose_solve=solve).sum()

    close(
        jax.jit(jax.grad(loss, (1, 2)), static_argnums=0)(product, matrix, X),
        jax.grad(loss, (1, 2))(jnp.matmul, matrix, X),
    )


@pytest.mark.parametrize("name", BACKENDS)
def test_lineax(name: str):
    lineax = pytest.importorskip("lineax", reason="it is not installed; the tests above do what it does")
    f = jtbridge.wrap(lambda v: MATRIX @ v, backend=name)
    operator = lineax.FunctionLinearOperator(f, jax.ShapeDtypeStruct((4,), jnp.float32))
    close(operator.T.as_matrix(), MATRIX.T.numpy())
    close(lineax.linear_solve(operator, X).value, np.linalg.solve(MATRIX.numpy(), X))
