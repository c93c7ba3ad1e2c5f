"""Backwards that compute outside autograd: torch silently takes the derivative of such a gradient for zero."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jtbridge
from jtbridge.errors import DifferentiationError

pytestmark = [
    pytest.mark.usefixtures("x64"),
    pytest.mark.filterwarnings("ignore::jtbridge.errors.SequentialVmapWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),  # by torch.cond
]

X, DX = np.array([0.3, -0.7, 1.2]), np.array([1.0, 0.5, -2.0])
CALLED = ["auto", "dlpack", "callback"]


class ByNumPy(torch.autograd.Function):
    """The sine."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, ct: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return torch.from_numpy(ct.detach().numpy() * np.cos(x.detach().numpy()))


def alone(x: torch.Tensor) -> torch.Tensor:
    return ByNumPy.apply(x)


def in_a_part(x: torch.Tensor) -> torch.Tensor:
    return ByNumPy.apply(x) + x * x


def by_cond(x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))


def scaled(x: torch.Tensor) -> torch.Tensor:
    """With a backward of simple operators."""
    return Scaled.apply(x)


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, ct: torch.Tensor) -> torch.Tensor:
        return 3 * ctx.saved_tensors[0] ** 2 * ct


DERIVATIVES = {
    alone: jnp.cos,
    in_a_part: lambda x: jnp.cos(x) + 2 * x,
    by_cond: jnp.cos,
    scaled: lambda x: 3 * x**2,
}
each = pytest.mark.parametrize("fn", DERIVATIVES)


@each
@pytest.mark.parametrize("by", CALLED)
def test_forward_derivatives(fn, by):
    f = jtbridge.wrap(fn, backend=by)
    expected = DERIVATIVES[fn](X)
    np.testing.assert_allclose(jax.jvp(f, (X,), (DX,))[1], expected * DX, rtol=1e-12)
    np.testing.assert_allclose(jax.jacfwd(f)(X), np.diag(expected), rtol=1e-12)
    np.testing.assert_allclose(jax.vmap(lambda x, dx: jax.jvp(f, (x,), (dx,))[1])(X[None], DX[None])[0], expected * DX)


@each
@pytest.mark.parametrize("by", CALLED)
def test_gradients(fn, by):
    f = jtbridge.wrap(fn, backend=by)
    np.testing.assert_allclose(jax.vjp(f, X)[1](DX)[0], DERIVATIVES[fn](X) * DX, rtol=1e-12)


@pytest.mark.parametrize("fn", [alone, by_cond])
@pytest.mark.parametrize("by", CALLED)
def test_second_derivatives_are_refused(fn, by):
    f = jtbridge.wrap(fn, backend=by)
    with pytest.raises(DifferentiationError, match="outside autograd"):
        jax.hessian(lambda x: f(x).sum())(X)


def test_second_derivatives_of_simple_operators():
    f = jtbridge.wrap(scaled)
    np.testing.assert_allclose(jax.hessian(lambda x: f(x).sum())(X), np.diag(6 * X), rtol=1e-12)


def test_a_jacobian_that_is_too_large_is_refused(monkeypatch):
    monkeypatch.setattr("jtbridge.calls.eager._rows.LARGEST_JACOBIAN", 8)
    with pytest.raises(DifferentiationError, match="outside autograd"):
        jax.jvp(jtbridge.wrap(alone), (X,), (DX,))
