"""Backwards that compute outside autograd: torch silently treats the derivative of such a gradient as zero."""

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
    pytest.mark.filterwarnings("ignore::jtbridge.errors.CalledWarning"),
    pytest.mark.usefixtures("x64"),
    pytest.mark.filterwarnings("ignore::jtbridge.errors.SequentialVmapWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),  # by torch.cond
]

X, DX = np.array([0.3, -0.7, 1.2]), np.array([1.0, 0.5, -2.0])
CALLED = ["auto", "dlpack", "callback"]


class ByNumPy(torch.autograd.Function):
    """The sine, computed by NumPy."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, ct: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return torch.from_numpy(ct.detach().numpy() * np.cos(x.detach().numpy()))


class Detached(ByNumPy):
    """The sine, by operators that can be translated."""

    @staticmethod
    def backward(ctx: Any, ct: torch.Tensor) -> torch.Tensor:
        return (ct * ctx.saved_tensors[0].cos()).detach()


def alone(x: torch.Tensor) -> torch.Tensor:
    return ByNumPy.apply(x)


def in_a_part(x: torch.Tensor) -> torch.Tensor:
    return ByNumPy.apply(x) + x * x


def translatable(x: torch.Tensor) -> torch.Tensor:
    return Detached.apply(x) * 2


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
    translatable: lambda x: 2 * jnp.cos(x),
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


in_programs = pytest.mark.parametrize("fn", [alone, in_a_part, translatable, scaled])  # torch.cond is for eager calls


@in_programs
@pytest.mark.parametrize("by", CALLED)
def test_derivatives_in_a_program(fn, by):
    f = jtbridge.wrap(fn, backend=by)
    expected = DERIVATIVES[fn](X)
    np.testing.assert_allclose(jax.jit(lambda x, dx: jax.jvp(f, (x,), (dx,))[1])(X, DX), expected * DX, rtol=1e-12)
    np.testing.assert_allclose(jax.jit(jax.jacfwd(f))(X), np.diag(expected), rtol=1e-12)
    np.testing.assert_allclose(jax.jit(lambda x, ct: jax.vjp(f, x)[1](ct)[0])(X, DX), expected * DX, rtol=1e-12)


SECOND = {"hessian": jax.hessian, "reverse twice": lambda f: jax.jacrev(jax.grad(f))}
second = pytest.mark.parametrize("name", SECOND)


@second
@pytest.mark.parametrize("fn", [alone, in_a_part, translatable, by_cond])
@pytest.mark.parametrize("by", CALLED)
def test_second_derivatives_are_refused(fn, by, name):
    f = jtbridge.wrap(fn, backend=by)
    with pytest.raises(DifferentiationError, match="outside autograd"):
        SECOND[name](lambda x: f(x).sum())(X)


@second
@pytest.mark.parametrize("fn", [alone, in_a_part, translatable])
@pytest.mark.parametrize("by", CALLED)
def test_second_derivatives_in_a_program_are_refused(fn, by, name):
    f = jtbridge.wrap(fn, backend=by)
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match="outside autograd"):
        jax.jit(SECOND[name](lambda x: f(x).sum()))(X).block_until_ready()


@second
@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("by", [*CALLED, "xla"])
def test_second_derivatives_of_differentiable_backwards(by, name, jitted):
    f = jtbridge.wrap(scaled, backend=by)
    found = SECOND[name](lambda x: f(x).sum())
    np.testing.assert_allclose((jax.jit(found) if jitted else found)(X), np.diag(6 * X), rtol=1e-12)


@pytest.mark.parametrize("place", ["jtbridge.calls.eager._rows", "jtbridge.transforms._jvp"])
def test_a_jacobian_that_is_too_large_is_refused(place, monkeypatch):
    monkeypatch.setattr(f"{place}.MAX_JACOBIAN", 8)

    def moved(x, dx):
        return jax.jvp(jtbridge.wrap(alone), (x,), (dx,))[1]

    run = moved if "eager" in place else jax.jit(moved)
    with pytest.raises((DifferentiationError, jax.errors.JaxRuntimeError, ValueError), match="outside autograd"):
        jax.block_until_ready(run(X, DX))
