"""Writes that autograd does not record, such as to `.data`: torch's gradients read the overwritten memory."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jtbridge
from jtbridge.errors import TranslationError

pytestmark = [
    pytest.mark.filterwarnings("ignore::jtbridge.errors.CalledWarning"),
    pytest.mark.filterwarnings("ignore::jtbridge.errors.SequentialVmapWarning"),
]

X = np.array([1.0, 3.0, 2.0], np.float32)


def saved_result(x: torch.Tensor) -> torch.Tensor:
    """Overwrite a maximum: its gradient compares the result with the elements, and finds no equal element."""
    y = x.max()
    y.data.mul_(-0.57)
    return y


def saved_argument(x: torch.Tensor) -> torch.Tensor:
    """Overwrite the argument of a product: its gradient divides by the elements."""
    y = x.prod(-1)
    torch.mul(x.detach(), -0.14, out=x.data)
    return y


def solved(x: torch.Tensor) -> torch.Tensor:
    """The gradient of a solution reads the factors of the matrix; the gradient of the gradient reads the matrix."""
    a = 5 * torch.eye(3) + x.outer(x).tanh()
    y = torch.linalg.solve(a, x)
    a.data.mul_(1.34)
    return y.sum()


def kronecker(x: torch.Tensor) -> torch.Tensor:
    """Autograd saves the factors, and does not detect that one of them is overwritten."""
    a = x * 1.5
    y = torch.kron(a, x)
    a.mul_(3)
    return (y * torch.arange(9.0)).sum()


FUNCTIONS = [kronecker, saved_result, saved_argument, solved]


def gradient_in_torch(fn: Callable[[torch.Tensor], torch.Tensor]) -> np.ndarray:
    x = torch.tensor(X, requires_grad=True)
    y = fn(x)
    return torch.autograd.grad(y, x)[0].numpy()


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("name", ["auto", "dlpack", "callback"])
@pytest.mark.parametrize("fn", FUNCTIONS)
def test_gradients(fn: Callable[[torch.Tensor], torch.Tensor], name: str, jit: bool):
    f = jtbridge.wrap(fn, backend=name)
    staged = jax.jit if jit else lambda g: g
    expected = gradient_in_torch(fn)
    np.testing.assert_allclose(staged(f)(X), fn(torch.tensor(X)), rtol=1e-6)
    np.testing.assert_allclose(staged(jax.grad(f))(X), expected, rtol=1e-5)
    rows = jnp.stack([X, X])
    np.testing.assert_allclose(staged(jax.vmap(jax.grad(f)))(rows), np.stack([expected, expected]), rtol=1e-5)


@pytest.mark.parametrize("name", ["auto", "dlpack", "callback"])
@pytest.mark.parametrize("fn", FUNCTIONS)
def test_the_forward_derivative_agrees_with_the_gradient(fn: Callable[[torch.Tensor], torch.Tensor], name: str):
    f = jtbridge.wrap(fn, backend=name)
    slope = jax.jit(lambda x, dx: jax.jvp(f, (x,), (dx,))[1])
    for direction in np.eye(3, dtype=np.float32):
        np.testing.assert_allclose(slope(X, direction), gradient_in_torch(fn) @ direction, rtol=1e-5)


def test_a_large_jacobian_is_refused():
    def fn(x: torch.Tensor) -> torch.Tensor:
        y = x * x
        y.data.mul_(2)
        return y

    x = jnp.ones(20_000)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"DifferentiationError: `fn` has no forward mode: .*`\.data`"):
        jax.jit(lambda x: jax.jvp(jtbridge.wrap(fn, backend="dlpack"), (x,), (x,))[1])(x)


@pytest.mark.parametrize("fn", FUNCTIONS)
def test_a_translation_of_the_gradient_is_refused(fn: Callable[[torch.Tensor], torch.Tensor]):
    f = jtbridge.wrap(fn, backend="xla")
    np.testing.assert_allclose(jax.jit(f)(X), fn(torch.tensor(X)), rtol=1e-6)
    with pytest.raises(TranslationError, match=rf"derivative of `{fn.__name__}` cannot be traced: .*`\.data`"):
        jax.jit(jax.grad(f))(X)


def test_data_that_is_only_read_is_translated():
    def fn(x: torch.Tensor) -> torch.Tensor:
        scale = x.data.abs().max()
        return (x / scale).sum()

    slope = jax.jit(jax.grad(jtbridge.wrap(fn, backend="xla")))(X)
    np.testing.assert_allclose(slope, np.full(3, 1 / 3), rtol=1e-6)
