"""Residuals of called functions: the backward gets each of them as the right argument."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

import jtbridge


class Layer(nn.Module):
    """A transformer layer whose head size equals the sequence length, so that residuals have the same shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(16), nn.LayerNorm(16)])
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.up, self.down = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(batch, length, 3, 4, -1).permute(2, 0, 3, 1, 4)
        attended = torch.softmax(q @ k.mT, -1) @ v
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(torch.tanh(self.up(self.norms[1](x))))


@pytest.mark.parametrize("backend", ["auto", "dlpack", "callback"])
@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("batch", [1, 2])
def test_transformer_gradient_matches_torch(backend: str, layers: int, batch: int):
    torch.manual_seed(0)
    model = nn.Sequential(*[Layer() for _ in range(layers)])
    x = torch.randn(batch, 4, 16)
    torch.sin(model(x)).sum().backward()
    net = jtbridge.module(model, backend=backend)
    params, state = net.init()
    gradients = jax.jit(jax.grad(lambda params, x: jnp.sin(net(params, state, x)[0]).sum()))(params, x.numpy())
    for name, parameter in model.named_parameters():
        np.testing.assert_allclose(gradients[name], parameter.grad, rtol=1e-4, atol=1e-5, err_msg=name)
