"""SwiGLU and GeGLU as models write them become one operator, also in the gradient; code like them does not."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
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
)


def arguments(dtype="float32"):
    return 2 * normal(2, 3, 8, dtype=dtype), normal(2, 3, 8, dtype=dtype, seed=1)


def swiglu(gate, up):
    return F.silu(gate) * up


def geglu(gate, up):
    return up * F.gelu(gate)


def geglu_tanh(gate, up):
    return torch.nn.GELU(approximate="tanh")(gate) * up


def in_halves(gate, up):
    gate, up = torch.cat((gate, up), -1).chunk(2, dim=-1)
    return torch.mul(torch.nn.SiLU()(gate), up)


chains = pytest.mark.parametrize("chain", [swiglu, geglu, geglu_tanh, in_halves])


@chains
@pytest.mark.parametrize("dtype", DTYPES)
def test_chain_is_fused_and_matches_torch(chain, dtype):
    given = arguments(dtype)
    assert operators(chain, *given) == {"jtbridge.gated": 1}
    gradient = gradient_operators(chain, *given)
    assert gradient["jtbridge.gated_backward"] == 1
    assert_matches_torch(chain, *given, second=True, factor=4)


@pytest.mark.parametrize("chain", [swiglu, geglu, geglu_tanh, in_halves, lambda *given: geglu_new(*given)])
def test_every_mode_of_differentiation(chain):
    f, given = loss(jtbridge.wrap(chain, backend="xla")), arguments()
    reverse = jax.jacrev(jax.jacrev(f, (0, 1)), (0, 1))(*given)
    forward = jax.jacfwd(jax.jacfwd(f, (0, 1)), (0, 1))(*given)
    for a, b in zip(jax.tree.leaves(reverse), jax.tree.leaves(forward), strict=True):
        assert jnp.allclose(a, b, atol=1e-5)
    rows = jnp.stack(given), jnp.stack(given[::-1])
    y = jax.vmap(jtbridge.wrap(chain, backend="xla"))(*rows)
    assert_near([y], [torch.stack([chain(a, b) for a, b in zip(*to_torch(rows), strict=True)])])


def gelu_new(x):
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def geglu_new(gate, up):
    """As T5 has it."""
    return gelu_new(gate) * up


def geglu_new_otherwise(gate, up):
    cubes = gate**3 * 0.044715
    return up * (((cubes + gate) * math.sqrt(2 / math.pi)).tanh().add(1) * (gate * 0.5))


written_out = pytest.mark.parametrize("chain", [geglu_new, geglu_new_otherwise])


@written_out
def test_explicit_gelu_is_fused_and_matches_torch(chain):
    given = arguments()
    assert operators(chain, *given, ours=False) == {"jtbridge.gated": 1}
    assert gradient_operators(chain, *given)["jtbridge.gated_backward"] == 1
    assert_matches_torch(chain, *given, second=True)


@written_out
def test_fused_operator_matches_the_chain(chain):
    """They are equal to the bit in torch itself."""
    gate, up = to_torch((2 * normal(64, 33), normal(64, 33, seed=1)))
    assert torch.equal(FUNCTIONS["jtbridge::gated"](gate, up, "gelu_new"), chain(gate, up))


@written_out
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_explicit_gelu_in_half_precision_is_not_fused(chain, dtype):
    """It is rounded at each of its steps."""
    given = arguments(dtype)
    assert operators(chain, *given) == gradient_operators(chain, *given) == {}


def other_factor(gate, up):
    return 0.5 * gate * (1.0 + torch.tanh(0.8 * (gate + 0.044715 * torch.pow(gate, 3.0)))) * up


def other_power(gate, up):
    cubes = 0.044715 * torch.pow(gate, 2.0)
    return 0.5 * gate * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (gate + cubes))) * up


def other_half(gate, up):
    return 0.25 * gate * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (gate + 0.044715 * torch.pow(gate, 3.0)))) * up


def of_another(gate, up):
    other = gate + 1
    return 0.5 * gate * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (gate + 0.044715 * torch.pow(other, 3.0)))) * up


def of_another_half(gate, up):
    return 0.5 * up * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (gate + 0.044715 * torch.pow(gate, 3.0)))) * up


def tanh_is_used(gate, up):
    tanh = torch.tanh(math.sqrt(2.0 / math.pi) * (gate + 0.044715 * torch.pow(gate, 3.0)))
    return 0.5 * gate * (1.0 + tanh) * up, tanh


def tanh_is_detached(gate, up):
    tanh = torch.tanh(math.sqrt(2.0 / math.pi) * (gate + 0.044715 * torch.pow(gate, 3.0))).detach()
    return 0.5 * gate * (1.0 + tanh) * up


def without_a_gate(gate, up):
    return gelu_new(gate) + up


@pytest.mark.parametrize(
    "function",
    [
        other_factor,
        other_power,
        other_half,
        of_another,
        of_another_half,
        tanh_is_used,
        tanh_is_detached,
        without_a_gate,
    ],
)
def test_code_similar_to_gelu_is_not_fused(function):
    assert_not_fused(function, *arguments())


def activated_returned(gate, up):
    gate = F.silu(gate)
    return gate * up, gate


def by_itself(gate, up):
    gate = F.silu(gate)
    return gate * gate + up


def in_place(gate, up):
    return F.silu(gate + 0, inplace=True) * up


def broadcast(gate, up):
    return F.silu(gate) * up[:1]


def of_another_dtype(gate, up):
    return F.silu(gate.float()) * up.half()


def by_a_number(gate, up):
    return F.silu(gate) * 2.0 + up


def of_sigmoid(gate, up):
    return torch.sigmoid(gate) * up


def detached(gate, up):
    return F.silu(gate).detach() * up


def without_gradient(gate, up):
    with torch.no_grad():
        gate = F.gelu(gate)
    return gate * up


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "function",
    [activated_returned, by_itself, in_place, broadcast, of_another_dtype, by_a_number, of_sigmoid, detached],
)
def test_similar_code_is_not_fused(function, dtype):
    assert_not_fused(function, *arguments(dtype))


def test_activation_without_gradient_is_not_fused():
    assert_not_fused(without_gradient, *arguments(), forward=True)


def test_in_float64():
    with jax.enable_x64(True):
        f = jtbridge.wrap(swiglu, backend="xla")
        given = [x.astype(jnp.float64) for x in arguments()]
        assert "jtbridge.gated.default" not in jtbridge.explain(f, *given).operators
