"""Third derivatives in all eight nestings of forward and reverse mode."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import pytest
import torch

import jtbridge
from tests import reference
from tests.compare import assert_matches

from .problem import TWICE, Problem, jaxes, tensors

ORDERS = ["".join(letters) for letters in itertools.product("fr", repeat=3)]


def derivative_along(fn, direction, mode):
    """Return the derivative of a real function along a direction, by forward ("f") or reverse ("r") mode."""
    if mode == "f":
        return lambda primals: jax.jvp(fn, (primals,), (direction,))[1]

    def by_reverse(primals):
        grads = jax.grad(fn)(primals)
        return sum(jnp.sum(jnp.real(g * d)) for g, d in zip(grads, direction, strict=True))

    return by_reverse


def layer_norm_by_hand(x, shape, weight=None, bias=None, eps=1e-5):
    """The reference for layer_norm, whose third derivative in torch treats mean and deviation as constants."""
    assert len(shape) == 1
    centered = x - x.mean(-1, keepdim=True)
    out = centered / torch.sqrt((centered**2).mean(-1, keepdim=True) + eps)
    return out * (1 if weight is None else weight) + (0 if bias is None else bias)


def check(name: str, order: str) -> None:
    problem = Problem(name)
    directions = [problem.like(problem.primals, seed) for seed in (1, 2, 3)]

    def fn(primals):
        return problem.jax_loss(*primals)

    for direction, mode in zip(directions, order, strict=True):
        fn = derivative_along(fn, jaxes(direction), mode)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "layer_norm", layer_norm_by_hand)
        expected = reference.directional(problem.torch_loss, tensors(problem.primals), [tensors(d) for d in directions])
    assert_matches(jax.jit(fn)(jaxes(problem.primals)), expected, tolerance=1e-9)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", ["pointwise", "softmax", "own_backward", "spectrum"])
def test_orders(name: str, order: str, backend: str, x64: None):
    check(name, order)


@pytest.mark.parametrize("name", TWICE)
def test_reverse_three_times(name: str, x64: None):
    check(name, "rrr")


@pytest.mark.parametrize("name", TWICE)
def test_reverse_inside_forward_inside_reverse(name: str, x64: None):
    check(name, "rfr")


def test_fifth_derivative(backend: str, x64: None):
    f = jtbridge.wrap(torch.sin)
    for _ in range(5):
        f = jax.grad(f)
    assert_matches(jax.jit(f)(jnp.array(0.3)), torch.cos(torch.tensor(0.3, dtype=torch.float64)))
