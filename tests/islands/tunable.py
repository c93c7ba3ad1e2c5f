"""Two functions with an operator that tuning may give to torch, and arguments of the first."""

import jax.numpy as jnp
import torch
from torch.nn import functional

_GENERATOR = torch.Generator().manual_seed(0)
IMAGE = torch.randn(2, 32, 56, 56, generator=_GENERATOR)
KERNEL = torch.randn(32, 4, 3, 3, generator=_GENERATOR) / 6
X, W = jnp.asarray(IMAGE.numpy()), jnp.asarray(KERNEL.numpy())


def grouped(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return functional.conv2d(x.sin(), w, padding=1, groups=len(w) // 4).tanh()


def product(x: torch.Tensor) -> torch.Tensor:
    return (x @ x).sin()
