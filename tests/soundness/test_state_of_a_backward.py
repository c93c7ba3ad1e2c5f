"""State that the backward of an `autograd.Function` writes, and methods that a library's code calls."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jtbridge
from jtbridge.errors import MutationError

X = jnp.asarray([1.0, 2.0, 4.0])
calls: list[str] = []
counts = {"backward": 0}


class Counting(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        calls.append("backward")
        counts["backward"] += 1
        return grad * 3


class Halved(torch.distributions.Normal):
    def log_prob(self, value):  # no user code names it
        calls.append("log_prob")
        return super().log_prob(value) / 2


def counted(x: torch.Tensor) -> torch.Tensor:
    return Counting.apply(x).sum()


def of_a_mixture(x: torch.Tensor) -> torch.Tensor:
    components = torch.distributions.Independent(Halved(torch.zeros(3, 2), 1.0), 1)
    weights = torch.distributions.Categorical(torch.ones(3))
    return torch.distributions.MixtureSameFamily(weights, components).log_prob(x[:2])


@pytest.fixture(autouse=True)
def empty() -> None:
    calls.clear()
    counts["backward"] = 0


@pytest.mark.parametrize("backend", ["auto", "xla", "dlpack", "callback"])
@pytest.mark.parametrize("order", [jax.grad, jax.hessian])
def test_writes_of_a_backward_are_refused_under_a_trace(order: Callable, backend: str):
    f = jtbridge.wrap(counted, backend=backend)
    np.testing.assert_array_equal(jax.jit(f)(X), 14)
    with pytest.raises(MutationError, match=r'writes to (?=.*global `calls`).*global `counts\["backward"\]`'):
        jax.jit(order(f))(X)
    assert not calls
    assert counts == {"backward": 0}


def test_an_eager_gradient_writes_once():
    np.testing.assert_array_equal(jax.grad(jtbridge.wrap(counted))(X), [3, 3, 3])
    assert calls == ["backward"]
    assert counts == {"backward": 1}


def test_methods_called_by_torch_are_examined():
    f = jtbridge.wrap(of_a_mixture)
    with pytest.raises(MutationError, match="global `calls`"):
        jax.jit(f)(X)
    assert not calls
    f(X)
    assert calls == ["log_prob"]
