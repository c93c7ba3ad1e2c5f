"""Layer normalization that is written out becomes one operator, also in the gradient; code like it does not."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jtbridge
from jtbridge.capture.chains import FUNCTIONS

from .harness import (
    DTYPES,
    assert_matches_torch,
    assert_near,
    assert_not_fused,
    gradient_operators,
    loss,
    normal,
    operators,
    to_torch,
    torch_loss,
)

dtypes = pytest.mark.parametrize("dtype", DTYPES)
# x has a mean that is not small.
ARGUMENTS = normal(2, 3, 8) + 2, normal(8, seed=1)


def arguments(dtype="float32"):
    return tuple(x.astype(dtype) for x in ARGUMENTS)


def cohere(x, weight):
    h = x.to(torch.float32)
    mean = h.mean(-1, keepdim=True)
    variance = (h - mean).pow(2).mean(-1, keepdim=True)
    h = (h - mean) * torch.rsqrt(variance + 1e-5)
    h = weight.to(torch.float32) * h
    return h.to(x.dtype)


def centered_once(x, weight):
    h = x.float()
    away = torch.sub(h, torch.mean(h, dim=-1, keepdim=True))
    h = torch.rsqrt(1e-5 + away.square().mean([2], keepdim=True)) * away
    return (h * weight.float()).type_as(x)


def promoted(x, weight):
    h = x.float()
    mean = h.mean((-1,), keepdim=True)
    return (weight * ((h - mean) * ((h - mean) ** 2).mean(2, keepdim=True).add(1e-5).rsqrt())).to(x.dtype)


chains = pytest.mark.parametrize("chain", [cohere, centered_once, promoted])


@chains
@dtypes
def test_chain_is_fused_and_matches_torch(chain, dtype):
    given = arguments(dtype)
    assert operators(chain, *given, ours=False) == {"jtbridge.centered_norm": 1}
    both = {"jtbridge.centered_norm": 1, "jtbridge.centered_norm_backward": 1}
    assert gradient_operators(chain, *given) == both
    assert_matches_torch(chain, *given, second=True)


@chains
@dtypes
def test_fused_operator_matches_the_chain(chain, dtype):
    """They are equal to the bit in torch itself, and the gradients up to the order of two sums."""
    x, weight = (tensor.requires_grad_() for tensor in to_torch(arguments(dtype)))
    want, (ct,) = chain(x, weight), to_torch([normal(2, 3, 8, dtype=dtype, seed=2)])
    given = x.detach(), weight.detach()
    y, *kept = FUNCTIONS["jtbridge::centered_norm"](*given, 1e-5)
    assert torch.equal(y, want)
    grads = FUNCTIONS["jtbridge::centered_norm_backward"](ct, *given, *kept, 1e-5)
    for got, wanted in zip(grads, torch.autograd.grad(want, (x, weight), ct), strict=True):
        torch.testing.assert_close(got, wanted)


@chains
def test_every_mode_of_differentiation(chain):
    f, given = loss(jtbridge.wrap(chain, backend="xla")), arguments()
    hessian = torch.autograd.functional.hessian(torch_loss(chain), tuple(to_torch(given)))
    blocks = [block for row in hessian for block in row]
    for derivative in (
        jax.hessian(f, (0, 1)),
        jax.jacrev(jax.jacrev(f, (0, 1)), (0, 1)),
        jax.jacfwd(jax.jacfwd(f, (0, 1)), (0, 1)),
    ):
        assert_near(derivative(*given), blocks, 8)


def test_third_derivative():
    def f(x):
        return cohere(x, torch.arange(1.0, 9.0)).sin().sum()

    x = ARGUMENTS[0][0, 0]

    def curvature(x):
        return torch.autograd.functional.hessian(f, x, create_graph=True).sin().sum()

    tensor = to_torch([x])[0].requires_grad_()
    (want,) = torch.autograd.grad(curvature(tensor), tensor)
    g = jtbridge.wrap(f, backend="xla")
    assert_near([jax.grad(lambda x: jnp.sin(jax.jacrev(jax.grad(g))(x)).sum())(x)], [want], 100)


@chains
def test_batches(chain):
    f = jtbridge.wrap(chain, backend="xla")
    xs, weights = normal(4, 2, 3, 8), normal(4, 8, seed=1)
    rows = [chain(x, w) for x, w in zip(*to_torch((xs, weights)), strict=True)]
    assert_near([jax.vmap(f)(xs, weights)], [torch.stack(rows)])
    grads = [jax.grad(loss(f), (0, 1))(x, w) for x, w in zip(xs, weights, strict=True)]
    batch = jax.vmap(jax.grad(loss(f), (0, 1)))(xs, weights)
    for got, want in zip(batch, zip(*grads, strict=True), strict=True):
        np.testing.assert_allclose(got, jnp.stack(want), rtol=0, atol=1e-6)


# Code that resembles the chain and computes something else.


def turned_around(x, weight):
    h = x.float()
    mean = h.mean(-1, keepdim=True)
    return (weight.float() * ((mean - h) * torch.rsqrt((h - mean).pow(2).mean(-1, keepdim=True) + 1e-5))).to(x.dtype)


def squares_of_x(x, weight):
    h = x.float()
    mean = h.mean(-1, keepdim=True)
    return (weight.float() * ((h - mean) * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-5))).to(x.dtype)


def not_centered(x, weight):
    h = x.float()
    mean = h.mean(-1, keepdim=True)
    return (weight.float() * (h * torch.rsqrt((h - mean).pow(2).mean(-1, keepdim=True) + 1e-5))).to(x.dtype)


def of_another_mean(x, weight):
    h = x.float()
    mean, other = h.mean(-1, keepdim=True), h.sin().mean(-1, keepdim=True)
    return (weight.float() * ((h - other) * torch.rsqrt((h - mean).pow(2).mean(-1, keepdim=True) + 1e-5))).to(x.dtype)


def over_another_dimension(x, weight):
    h = x.float()
    mean = h.mean(1, keepdim=True)
    return (weight.float() * ((h - mean) * torch.rsqrt((h - mean).pow(2).mean(-1, keepdim=True) + 1e-5))).to(x.dtype)


def half_the_mean(x, weight):
    h = x.float()
    mean = h.mean(-1, keepdim=True)
    h = torch.sub(h, mean, alpha=0.5) * torch.rsqrt((h - mean).pow(2).mean(-1, keepdim=True) + 1e-5)
    return (weight.float() * h).to(x.dtype)


def standard_deviation(x, weight):
    h = x.float()
    mean = h.mean(-1, keepdim=True)
    return (weight.float() * ((h - mean) / torch.sqrt((h - mean).pow(2).mean(-1, keepdim=True) + 1e-5))).to(x.dtype)


def unbiased(x, weight):
    h = x.float()
    mean = h.mean(-1, keepdim=True)
    return (weight.float() * ((h - mean) * torch.rsqrt(h.var(-1, keepdim=True) + 1e-5))).to(x.dtype)


def weight_of_heads(x, weight):
    """As Cohere normalizes queries and keys."""
    return cohere(x, torch.stack((weight, 2 * weight, 3 * weight)))


def mean_returned(x, weight):
    h = x.float()
    mean = h.mean(-1, keepdim=True)
    h = (h - mean) * torch.rsqrt((h - mean).pow(2).mean(-1, keepdim=True) + 1e-5)
    return (weight.float() * h).to(x.dtype), mean


def mean_used(x, weight):
    h = x.float()
    mean = h.mean(-1, keepdim=True)
    h = (h - mean) * torch.rsqrt((h - mean).pow(2).mean(-1, keepdim=True) + 1e-5)
    return (weight.float() * h + mean.sin()).to(x.dtype)


def normalized_returned(x, weight):
    h = x.float()
    mean = h.mean(-1, keepdim=True)
    h = (h - mean) * torch.rsqrt((h - mean).pow(2).mean(-1, keepdim=True) + 1e-5)
    return (weight.float() * h).to(x.dtype), h


def mean_written_to(x, weight):
    h = x.float()
    mean = h.mean(-1, keepdim=True)
    variance = (h - mean).pow(2).mean(-1, keepdim=True)
    mean.add_(1.0)
    return (weight.float() * ((h - mean) * torch.rsqrt(variance + 1e-5))).to(x.dtype)


NEAR_MISSES = [
    turned_around,
    squares_of_x,
    not_centered,
    of_another_mean,
    over_another_dimension,
    half_the_mean,
    standard_deviation,
    unbiased,
    weight_of_heads,
    mean_returned,
    mean_used,
    normalized_returned,
    mean_written_to,
]


@pytest.mark.parametrize("function", NEAR_MISSES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_similar_code_is_not_fused(function, dtype):
    assert_not_fused(function, *arguments(dtype))


def mean_detached(x, weight):
    h = x.float()
    mean = h.mean(-1, keepdim=True).detach()
    return (weight.float() * ((h - mean) * torch.rsqrt((h - mean).pow(2).mean(-1, keepdim=True) + 1e-5))).to(x.dtype)


def variance_without_gradient(x, weight):
    h = x.float()
    mean = h.mean(-1, keepdim=True)
    with torch.no_grad():
        variance = (h - mean).pow(2).mean(-1, keepdim=True)
    return (weight.float() * ((h - mean) * torch.rsqrt(variance + 1e-5))).to(x.dtype)


@pytest.mark.parametrize("function", [mean_detached, variance_without_gradient])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_detached_parts_are_not_fused(function, dtype):
    assert_not_fused(function, *arguments(dtype), forward=True)


def away_used(x, weight):
    h = x.float()
    away = h - h.mean(-1, keepdim=True)
    h = away * torch.rsqrt(away.pow(2).mean(-1, keepdim=True) + 1e-5)
    return (weight.float() * h).to(x.dtype), away.sin()


def scaled_twice(x, weight):
    away = x - x.mean(-1, keepdim=True)
    h = away * torch.rsqrt(away.pow(2).mean(-1, keepdim=True) + 1e-5)
    return weight * h + weight.sin() * h


def test_centered_values_used_elsewhere_fuse_as_rms_norm():
    """A part of the chain is such a root mean square."""
    for given in (arguments(), arguments("bfloat16")):
        assert operators(away_used, *given) == {"jtbridge.rms_norm": 1}
        assert_matches_torch(away_used, *given, second=True)
    assert operators(scaled_twice, *arguments()) == {"jtbridge.unscaled_rms_norm": 1}
    assert_matches_torch(scaled_twice, *arguments(), second=True)
