"""Forward derivatives and second derivatives of attention, for which torch has only a gradient on a CPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import jtbridge

Q = jax.random.normal(jax.random.key(0), (1, 2, 5, 4))
ALLOWED = torch.tensor(np.random.default_rng(0).uniform(size=(5, 5)) > 0.3)
ALLOWED[2] = False  # nothing is allowed
ATTENTION = {
    "plain": lambda q: F.scaled_dot_product_attention(q, 2 * q, q + 1),
    "causal": lambda q: F.scaled_dot_product_attention(q, 2 * q, q + 1, is_causal=True, scale=0.3),
    "mask": lambda q: F.scaled_dot_product_attention(q, 2 * q, q + 1, ALLOWED),
    "added mask": lambda q: F.scaled_dot_product_attention(q, 2 * q, q + 1, ALLOWED.float()),
    "groups": lambda q: F.scaled_dot_product_attention(q, 2 * q[:, :1], q[:, :1] + 1, enable_gqa=True),
}


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("backend", ["auto", "xla", "dlpack"])
@pytest.mark.parametrize("name", ATTENTION)
def test_derivatives_of_attention(name, backend):
    def fn(q: torch.Tensor) -> torch.Tensor:
        return ATTENTION[name](q).sin().sum()

    f, tensor = jtbridge.wrap(fn, backend=backend), torch.tensor(np.asarray(Q))
    direction = jnp.cos(Q)
    with sdpa_kernel(SDPBackend.MATH):
        tangent = torch.func.jvp(fn, (tensor,), (torch.tensor(np.asarray(direction)),))[1]
        hessian = torch.func.hessian(fn)(tensor)
    for way in (lambda g: g, jax.jit):
        got = way(lambda q: jax.jvp(f, (q,), (direction,))[1])(Q)
        np.testing.assert_allclose(got, tangent, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(way(jax.hessian(f))(Q), hessian, rtol=1e-3, atol=1e-4)


def test_an_encoder_layer_has_a_translated_forward_derivative():
    torch.manual_seed(0)
    net = torch.nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0).eval()
    f = jtbridge.wrap(net, backend="xla")
    got = jax.jit(lambda x: jax.jvp(f, (x,), (x,))[1])(Q[0])
    with sdpa_kernel(SDPBackend.MATH):
        want = torch.func.jvp(net, (torch.tensor(np.asarray(Q[0])),), (torch.tensor(np.asarray(Q[0])),))[1]
    np.testing.assert_allclose(got, want.detach(), rtol=1e-4, atol=1e-5)
