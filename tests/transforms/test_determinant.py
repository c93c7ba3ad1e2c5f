"""Second derivatives of a determinant where singular values are equal, and where there is no inverse."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jtbridge


def rotation(size: int) -> np.ndarray:
    return np.linalg.qr(np.random.default_rng(size).normal(size=(size, size)))[0]


MATRICES = {
    "number": np.full((1, 1), 2.0),
    "identity": np.eye(3),
    "near identity": np.eye(3) + 1e-6 * np.arange(9).reshape(3, 3),
    "rotation": rotation(5),
    "near rotation": rotation(4) + 1e-8 * np.arange(16).reshape(4, 4),
    "no symmetry": np.arange(16).reshape(4, 4) ** 1.5 + np.eye(4),
    "batch": np.stack([np.eye(4), rotation(4), np.diag([1.0, 2.0, 3.0, 4.0])]),
}
FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "torch.det": lambda x: torch.det(x).sum(),
    "torch.linalg.det": lambda x: torch.linalg.det(A=x).sin().sum(),
    "method": lambda x: (x.det() * x[..., 0, 0]).sum(),
}
WAYS: dict[str, Callable] = {
    "eager": jax.hessian,
    "jit": lambda f: jax.jit(jax.hessian(f)),
    "vmap": lambda f: lambda x: jax.vmap(jax.hessian(f))(jnp.stack([x, 2 * x]))[0],
    "jit of vmap": lambda f: lambda x: jax.jit(jax.vmap(jax.hessian(f)))(jnp.stack([x, 2 * x]))[0],
    "reverse": lambda f: jax.jacrev(jax.grad(f)),
    "jit of reverse": lambda f: jax.jit(jax.jacrev(jax.grad(f))),
    "forward": lambda f: jax.jacfwd(jax.jacfwd(f)),
}


@pytest.mark.parametrize("backend", ["auto", "dlpack"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("matrix", MATRICES)
def test_second_derivative_equals_torch(matrix: str, name: str, way: str, backend: str, x64: None):
    x = MATRICES[matrix]
    expected = torch.autograd.functional.hessian(FUNCTIONS[name], torch.tensor(x))
    got = WAYS[way](jtbridge.wrap(FUNCTIONS[name], backend=backend))(jnp.asarray(x))
    np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-9 * float(expected.abs().max()))


@pytest.mark.parametrize("way", ["jit", "jit of vmap", "jit of reverse"])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_second_derivative_of_a_singular_matrix(size: int, way: str, x64: None):
    """Torch's own derivatives are zero there. These are compared with central differences."""
    x = rotation(size) @ np.diag([0.0, *np.arange(1.0, size)]) @ rotation(size).T
    got = WAYS[way](jtbridge.wrap(lambda x: torch.det(x) ** 2))(jnp.asarray(x))
    step = 1e-5
    units = np.eye(size * size).reshape(-1, size, size)
    gradient = np.array([np.linalg.det(x + step * e) - np.linalg.det(x - step * e) for e in units]) / (2 * step)
    # Where the determinant is zero, the second derivative of its square is 2 g g^T.
    np.testing.assert_allclose(got.reshape(size**2, -1), 2 * np.outer(gradient, gradient), rtol=1e-6, atol=1e-6)


@pytest.mark.filterwarnings("ignore::jtbridge.errors.SequentialVmapWarning")  # eagerly, in jacfwd of jacfwd
@pytest.mark.parametrize("way", WAYS)
def test_complex_matrix(way: str, x64: None):
    def of(x: torch.Tensor) -> torch.Tensor:
        return torch.det(torch.complex(x, 0.3 * x.mT)).abs()

    x = rotation(4)
    expected = torch.autograd.functional.hessian(of, torch.tensor(x))
    np.testing.assert_allclose(WAYS[way](jtbridge.wrap(of))(jnp.asarray(x)), expected, rtol=1e-8, atol=1e-8)
