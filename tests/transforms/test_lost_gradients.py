"""Operators without a kernel for autograd, whose derivative torch treats as zero, with a warning."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jtbridge
from jtbridge.errors import DifferentiationError

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*autograd kernel was not registered:UserWarning"),
    pytest.mark.filterwarnings("ignore::jtbridge.errors.CalledWarning"),
    pytest.mark.filterwarnings("ignore::jtbridge.errors.SequentialVmapWarning"),
]
modes = pytest.mark.parametrize("mode", ["eager", "jit"])
X = jnp.asarray([0.5, 1.0, 2.0])

# Torch sees the multiplication inside `seen`, but not on fake tensors, and nothing inside `unseen`.
LIBRARY = torch.library.Library("lost_gradients", "DEF")
for _name, _kernel in {"seen": lambda x: x * 2, "unseen": lambda x: torch.from_numpy(x.detach().numpy() * 2)}.items():
    LIBRARY.define(f"{_name}(Tensor x) -> Tensor")
    LIBRARY.impl(_name, _kernel, "CPU")
    LIBRARY.impl(_name, torch.empty_like, "Meta")


@torch.library.custom_op("lost_gradients::with_backward", mutates_args=())
def with_backward(x: torch.Tensor) -> torch.Tensor:
    return x * 2


with_backward.register_fake(torch.empty_like)
with_backward.register_autograd(
    lambda ctx, grad: torch.ops.lost_gradients.unseen(grad), setup_context=lambda ctx, inputs, output: None
)


def in_mode(function: Callable, mode: str) -> Callable:
    return jax.jit(function) if mode == "jit" else function


@modes
def test_operators_that_autograd_records_are_differentiated(mode: str):
    f = jtbridge.wrap(lambda x: torch.ops.lost_gradients.seen(x.sin()) + x)
    expected = 2 * np.cos(X) + 1
    np.testing.assert_allclose(in_mode(jax.grad(lambda x: f(x).sum()), mode)(X), expected, rtol=1e-6)
    np.testing.assert_allclose(in_mode(lambda x: jax.jvp(f, (x,), (x,))[1], mode)(X), expected * X, rtol=1e-6)


@modes
@pytest.mark.parametrize("backend", ["auto", "dlpack"])
def test_a_lost_gradient_is_refused(mode: str, backend: str):
    f = jtbridge.wrap(lambda x: torch.ops.lost_gradients.unseen(x) + x, backend=backend)
    np.testing.assert_allclose(in_mode(f, mode)(X), 3 * X)
    gradient = jax.grad(lambda x: f(x).sum())
    for derivative in (gradient, lambda x: jax.jvp(f, (x,), (x,))[1], lambda x: jax.vmap(gradient)(x[None])):
        with pytest.raises((DifferentiationError, jax.errors.JaxRuntimeError), match="operator without a derivative"):
            jax.block_until_ready(in_mode(derivative, mode)(X))


@modes
@pytest.mark.parametrize("backend", ["auto", "dlpack"])
def test_a_backward_that_loses_gradients(mode: str, backend: str):
    f = jtbridge.wrap(lambda x: with_backward(x.sin()) * x, backend=backend)
    expected = 2 * (np.cos(X) * X + np.sin(X))
    gradient = jax.grad(lambda x: f(x).sum())
    np.testing.assert_allclose(in_mode(gradient, mode)(X), expected, rtol=1e-6)
    np.testing.assert_allclose(in_mode(lambda x: jax.jvp(f, (x,), (x,))[1], mode)(X), expected * X, rtol=1e-6)
    with pytest.raises((DifferentiationError, jax.errors.JaxRuntimeError), match="operator without a derivative"):
        jax.block_until_ready(in_mode(jax.grad(lambda x: gradient(x).sum()), mode)(X))


@modes
def test_without_a_gradient(mode: str):
    @jtbridge.wrap
    def f(x):
        with torch.no_grad():
            weight = torch.ops.lost_gradients.unseen(x)
        return weight * x

    np.testing.assert_allclose(in_mode(jax.grad(lambda x: f(x).sum()), mode)(X), 2 * X, rtol=1e-6)
