"""Torch code that functions of several kinds share."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.nn.functional import gelu, layer_norm


def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x + y


def energy(x: torch.Tensor) -> torch.Tensor:
    return (gelu(x) * x).sum()


def softmax(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, -1)


def normalized(x: torch.Tensor) -> torch.Tensor:
    return layer_norm(x, x.shape[-1:])


def waves(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x) * torch.exp(-x * x)


def slopes(x: torch.Tensor) -> torch.Tensor:
    """Use torch's forward mode, whose level is shared by all threads of a process."""
    return torch.func.jvp(waves, (x,), (torch.ones_like(x),))[1]


def integers(i: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (i * 3 + 1) // 2, i.cumsum(-1), (i > 0) & (i % 2 == 0)


def spectrum(z: torch.Tensor) -> torch.Tensor:
    return torch.fft.fft(z) * z.conj()


def tree(batch: dict[str, Any], scale: float) -> dict[str, Any]:
    return {"sum": batch["x"] + batch["pair"][0], "rest": (batch["pair"][1] * scale, [batch["x"].abs()])}


def positive(x: torch.Tensor) -> torch.Tensor:
    """Raise for a sum that is negative: a function that cannot be translated."""
    if float(x.detach().sum()) < 0:
        raise LookupError("the sum is negative")
    return x * 2


def mlp() -> torch.nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.LayerNorm(8), torch.nn.Linear(8, 1)
    return torch.nn.Sequential(*layers).requires_grad_(False)


@torch.library.custom_op("soak::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    """An operator without a lowering, which becomes an island. It raises where `positive` does."""
    return positive(x)


@doubled.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


doubled.register_autograd(lambda ctx, gradient: gradient * 2)


def around_doubled(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(doubled(x * x)) + x


def ints(random: np.random.Generator, n: int) -> tuple:
    return (random.integers(-9, 9, (n, 4)).astype(np.int32),)


def complexes(random: np.random.Generator, n: int) -> tuple:
    return ((random.uniform(-1, 1, (n, 4)) + 1j * random.uniform(-1, 1, (n, 4))).astype(np.complex64),)


def trees(random: np.random.Generator, n: int) -> tuple:
    x, y, z = random.uniform(-2, 2, (3, n, 4)).astype(np.float32)
    return {"x": x, "pair": (y, z)}, 2.5
