"""Root mean square normalization without a weight is one operator too, where it is no part of a longer chain."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F

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


def arguments(dtype="float32"):
    return (normal(2, 3, 8, dtype=dtype),)


def llama4(x):
    h = x.float()
    return (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)).type_as(x)


def gemma3n(x):
    h = x.float()
    mean_squared = h.pow(2).mean(-1, keepdim=True) + 1e-6
    return (h * torch.pow(mean_squared, -0.5)).type_as(x)


def other_order(x):
    h = x.to(torch.float32)
    return (torch.rsqrt(1e-5 + h.square().mean(dim=-1, keepdim=True)) * h).to(x.dtype)


def of_torch(x):
    return F.rms_norm(x, (8,), eps=1e-6)


def of_torch_without_eps(x):
    return torch.nn.RMSNorm(8, elementwise_affine=False)(x)


CHAINS = [llama4, gemma3n, other_order, of_torch, of_torch_without_eps]
chains = pytest.mark.parametrize("chain", CHAINS)


@chains
@dtypes
def test_chain_is_fused_and_matches_torch(chain, dtype):
    given = arguments(dtype)
    assert operators(chain, *given, ours=False) == {"jtbridge.unscaled_rms_norm": 1}
    both = {"jtbridge.unscaled_rms_norm": 1, "jtbridge.unscaled_rms_norm_backward": 1}
    assert gradient_operators(chain, *given) == both
    assert_matches_torch(chain, *given, second=True)


@chains
@dtypes
def test_fused_operator_matches_the_chain(chain, dtype):
    """To the bit, in torch itself; the gradient too where torch takes that of rsqrt."""
    (x,) = to_torch(arguments(dtype))
    x.requires_grad_()
    eps = {other_order: 1e-5, of_torch_without_eps: torch.finfo(torch.float32).eps}.get(chain, 1e-6)
    want, (ct,) = chain(x), to_torch([normal(2, 3, 8, dtype=dtype, seed=1)])
    y, rstd = FUNCTIONS["jtbridge::unscaled_rms_norm"](x.detach(), eps)
    assert torch.equal(y, want)
    grad = FUNCTIONS["jtbridge::unscaled_rms_norm_backward"](ct, x.detach(), rstd, eps)
    (wanted,) = torch.autograd.grad(want, x, ct)
    if chain in (llama4, other_order):
        assert torch.equal(grad, wanted)
    torch.testing.assert_close(grad, wanted)


@chains
def test_every_mode_of_differentiation(chain):
    f, (x,) = loss(jtbridge.wrap(chain, backend="xla")), arguments()
    want = torch.autograd.functional.hessian(torch_loss(chain), to_torch([x])[0])
    for derivative in (jax.hessian(f), jax.jacrev(jax.jacrev(f)), jax.jacfwd(jax.jacfwd(f))):
        assert_near([derivative(x)], [want], 8)
    xs = normal(4, 2, 3, 8)
    g = jtbridge.wrap(chain, backend="xla")
    assert_near([jax.vmap(g)(xs)], [torch.stack([chain(row) for row in to_torch([xs])[0]])])
    grads = jnp.stack([jax.grad(f)(x) for x in xs])
    np.testing.assert_allclose(jax.vmap(jax.grad(f))(xs), grads, rtol=0, atol=1e-6)


@dtypes
def test_chain_followed_by_a_weight_fuses_as_rms_norm(dtype):
    def f(x):
        weight = torch.arange(1.0, 9.0, dtype=x.dtype)
        return weight * llama4(x), llama4(x) * weight, llama4(x) * (1 + weight)

    given = arguments(dtype)
    assert operators(f, *given) == {"jtbridge.rms_norm": 3}
    assert set(gradient_operators(f, *given)) <= {"jtbridge.rms_norm", "jtbridge.rms_norm_backward"}
    assert_matches_torch(f, *given)


@dtypes
def test_result_with_other_uses_is_fused_without_the_weight(dtype):
    def f(x):
        weight, h = torch.arange(1.0, 9.0, dtype=x.dtype), llama4(x)
        return weight * h, h.sin()

    assert operators(f, *arguments(dtype)) == {"jtbridge.unscaled_rms_norm": 1}
    assert_matches_torch(f, *arguments(dtype), second=True)


@dtypes
def test_a_result_written_to(dtype):
    def f(x):
        h = llama4(x)
        h.mul_(2.0)
        return torch.arange(1.0, 9.0, dtype=x.dtype) * h

    assert operators(f, *arguments(dtype)) == {"jtbridge.unscaled_rms_norm": 1}
    assert_matches_torch(f, *arguments(dtype))


# Code that resembles the chain and computes something else.


def of_another(x):
    h = x.float()
    return (h.sin() * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def other_dimension(x):
    h = x.float()
    return (h * torch.rsqrt(h.pow(2).mean(1, keepdim=True) + 1e-6)).to(x.dtype)


def square_root(x):
    h = x.float()
    return (h * torch.pow(h.pow(2).mean(-1, keepdim=True) + 1e-6, 0.5)).to(x.dtype)


def cubes(x):
    h = x.float()
    return (h * torch.rsqrt(h.abs().pow(3).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def statistics_returned(x):
    h = x.float()
    rstd = torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
    return (h * rstd).to(x.dtype), rstd


def statistics_detached(x):
    h = x.float()
    return (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True).detach() + 1e-6)).to(x.dtype)


def in_float64(x):
    h = x.double()
    return (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def of_two_dimensions(x):
    return F.rms_norm(x, (3, 8), eps=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "function",
    [
        of_another,
        other_dimension,
        square_root,
        cubes,
        statistics_returned,
        statistics_detached,
        in_float64,
        of_two_dimensions,
    ],
)
def test_similar_code_is_not_fused(function, dtype):
    assert_not_fused(function, *arguments(dtype))


def stays_in_float32(x):
    h = x.float()
    return h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)


def in_its_own_precision(x):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


@pytest.mark.parametrize("function", [stays_in_float32, in_its_own_precision])
def test_half_precision_without_two_conversions_is_not_fused(function):
    assert_not_fused(function, *arguments("bfloat16"))
