"""Derivatives inside the implementation of an operator of torch, where torch records no graph by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jtbridge

X = torch.tensor([-0.5, 0.5, 1.0])
pytestmark = [
    pytest.mark.filterwarnings("ignore::jtbridge.errors.CalledWarning"),
    pytest.mark.filterwarnings("ignore::jtbridge.errors.SequentialVmapWarning"),
]


def traceable(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x) * x


def by_data(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x[x > -100]).reshape(x.shape) * x


def total(fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x: fn(x).sum()


FUNCTIONS = {"auto": (traceable, "auto"), "called": (traceable, "dlpack"), "by data": (by_data, "auto")}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_torch_derivatives_of_a_jax_function_that_calls_torch(name):
    fn, backend = FUNCTIONS[name]
    wrapped = jtbridge.wrap(fn, backend=backend)
    f = jtbridge.to_torch_function(lambda x: wrapped(x))
    got, want = total(f), total(traceable)
    for _ in range(3):
        got, want = total(torch.func.grad(got)), total(torch.func.grad(want))
        torch.testing.assert_close(got(X), want(X))
    torch.testing.assert_close(torch.func.jvp(f, (X,), (X,)), torch.func.jvp(traceable, (X,), (X,)))
    leaf = X.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(f(leaf).sum(), leaf, create_graph=True)
    (again,) = torch.autograd.grad(gradient.square().sum(), leaf)
    torch.testing.assert_close(again, torch.func.grad(lambda x: torch.func.grad(total(traceable))(x).square().sum())(X))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_jax_derivatives_inside_a_jax_function_called_from_torch(name):
    fn, backend = FUNCTIONS[name]
    wrapped = jtbridge.wrap(fn, backend=backend)
    gradient = jtbridge.to_torch_function(lambda x: jax.grad(lambda x: wrapped(x).sum())(x))
    tangent = jtbridge.to_torch_function(lambda x: jax.jvp(wrapped, (x,), (x,))[1])
    torch.testing.assert_close(gradient(X), torch.func.grad(total(traceable))(X))
    torch.testing.assert_close(tangent(X), torch.func.jvp(traceable, (X,), (X,))[1])


TRANSFORMS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "grad": (lambda f: jax.grad(total(f)), lambda f: torch.func.grad(total(f))),
    "jit(grad)": (lambda f: jax.jit(jax.grad(total(f))), lambda f: torch.func.grad(total(f))),
    "hessian": (lambda f: jax.hessian(total(f)), lambda f: torch.func.hessian(total(f))),
    "jvp": (lambda f: lambda x: jax.jvp(f, (x,), (x,))[1], lambda f: lambda x: torch.func.jvp(f, (x,), (x,))[1]),
    "vmap(grad)": (
        lambda f: lambda x: jax.vmap(jax.grad(total(f)))(x[None])[0],
        lambda f: torch.func.grad(total(f)),
    ),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_jax_derivatives_inside_a_custom_operator(name, transform):
    fn, backend = FUNCTIONS[name]
    of_jax, of_torch = TRANSFORMS[transform]
    derivative = of_jax(jtbridge.wrap(fn, backend=backend))

    @torch.library.custom_op("test_below_autograd::derivative", mutates_args=())
    def operator(x: torch.Tensor) -> torch.Tensor:
        return torch.tensor(np.array(derivative(jnp.asarray(x.numpy()))))

    torch.testing.assert_close(operator(X), of_torch(traceable)(X))
