"""Small models, losses and batches for tests of `jtbridge.train_step`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn

X = np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32)
BATCH = {"x": X, "y": (X[:, :1] * X[:, 1:2]).astype(np.float32)}
KEY = jax.random.key(0)


def mlp(*extra: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), *extra, nn.Tanh(), nn.Linear(8, 1))


def loss(model: Any, batch: Any) -> Any:
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def torch_loss(model: nn.Module, rows: slice = slice(None)) -> torch.Tensor:
    x, y = (torch.from_numpy(BATCH[name][rows].copy()) for name in ("x", "y"))
    return ((model(x) - y) ** 2).mean()


def programs(step: Any) -> int:
    """Return how many programs a step compiled."""
    return sum(compiled._cache_size() for compiled in step._compiled.values())


def close(arrays: Any, model: nn.Module, **tolerances: Any) -> None:
    tensors = model.state_dict()
    assert arrays.keys() <= tensors.keys()
    for name, array in arrays.items():
        np.testing.assert_allclose(array, tensors[name], **{"rtol": 1e-5, "atol": 1e-6, **tolerances}, err_msg=name)


class Noise(nn.Module):
    """The mask of a dropout as the result."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))
        self.dropout = nn.Dropout(0.5)

    def forward(self) -> torch.Tensor:
        return self.dropout(self.weight)
