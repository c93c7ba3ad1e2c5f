"""Torch modules that together use every feature of modules, each with its arguments."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.utils.prune
from torch import nn


class Tied(nn.Module):
    """An embedding whose weight is also the output layer's weight."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.inner = nn.Linear(4, 4)
        self.out = nn.Linear(4, 7, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.inner(self.embed(ids))))

    def encode(self, ids: torch.Tensor) -> torch.Tensor:
        return self.inner(self.embed(ids))


class PlainAttributes(nn.Module):
    """Tensors in plain attributes and containers, and a module that is not registered."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.scale = torch.full((3,), 2.0)
        self.shifts = [torch.ones(3), {"a.b": torch.full((3,), 0.5)}]
        self.teacher = [nn.Linear(3, 3)]
        self.register_buffer("mask", torch.tensor([1.0, 0.0, 1.0]), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x) * self.scale + self.shifts[0] + self.shifts[1]["a.b"]
        return y * self.mask + self.teacher[0](x)


class RunningCache(nn.Module):
    """State in every form: a buffer written in place, one that is assigned, and an attribute that starts as None."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("total", torch.zeros(3))
        self.register_buffer("last", torch.zeros(3))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int32))
        self.cache: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        self.total += y.detach().sum(0)
        self.last = y.detach()[0] * 1
        self.steps += 1
        self.cache = y.detach() if self.cache is None else torch.cat([self.cache, y.detach()])
        return y + self.total + self.cache.mean(0)


class Hooked(nn.Module):
    """Hooks of every kind: a closure over a submodule, a bound method, a partial, and one that changes the input."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        gate = nn.Linear(3, 3)
        self.gate = gate
        self.first.register_forward_hook(lambda module, args, out: out * torch.sigmoid(gate(args[0])))
        self.second.register_forward_pre_hook(self._before)
        self.second.register_forward_hook(functools.partial(self._after, self))
        self.reference = weakref.ref(self.gate)
        self.call_gate = self.gate.forward

    def _before(self, module: nn.Module, args: tuple) -> tuple:
        return (args[0] + self.gate.bias,)

    @staticmethod
    def _after(self, module: nn.Module, args: tuple, out: torch.Tensor) -> torch.Tensor:
        return out - self.gate.weight.sum()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = self.reference()
        assert gate is not None
        return self.second(self.first(x)) * gate.bias + self.call_gate(x)


class Helper:
    """A plain object that holds a module."""

    def __init__(self, owner: nn.Linear):
        self.owner = owner

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.owner.weight.T


class WithHelper(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.helper = Helper(self.linear)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + self.helper(x)


class Clipped(nn.Linear):
    """A module whose weight is a function of a raw weight (a parametrization)."""

    def __init__(self):
        super().__init__(3, 3)
        nn.utils.parametrize.register_parametrization(self, "weight", Symmetric())


class Symmetric(nn.Module):
    def forward(self, w: torch.Tensor) -> torch.Tensor:
        return w.triu() + w.triu(1).transpose(-1, -2)


class PartlyFrozen(nn.Module):
    """A module of which half does not train, and whose batch norm stays in evaluation mode."""

    def __init__(self):
        super().__init__()
        self.base = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).requires_grad_(False)
        self.head = nn.Linear(4, 2)

    def train(self, mode: bool = True) -> PartlyFrozen:
        super().train(mode)
        self.base.eval()
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.base(x))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(3, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rnn(x[None])[0]


def pruned() -> nn.Module:
    return nn.utils.prune.random_unstructured(nn.Linear(3, 3), "weight", amount=0.5)


def _x(*shape: int) -> tuple[torch.Tensor, ...]:
    return (torch.randn(*(shape or (4, 3))),)


MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Any, ...]]]] = {
    "linear": (lambda: nn.Linear(3, 2), _x),
    "batch norm": (lambda: nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1)), _x),
    "convolutions": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.SiLU(), nn.Conv2d(4, 2, 3)),
        lambda: _x(2, 3, 6, 6),
    ),
    "tied": (Tied, lambda: (torch.tensor([[1, 2, 3]]),)),
    "plain attributes": (PlainAttributes, _x),
    "hooks": (Hooked, _x),
    "helper object": (WithHelper, _x),
    "parametrization": (Clipped, _x),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)), _x),
    "spectral norm": (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)), _x),
    "weight norm by a hook": (lambda: nn.utils.weight_norm(nn.Linear(3, 3)), _x),
    "spectral norm by a hook": (lambda: nn.utils.spectral_norm(nn.Linear(3, 3)), _x),
    "pruned": (pruned, _x),
    "partly frozen": (PartlyFrozen, _x),
    "recurrent": (Recurrent, _x),
    "shared module": (lambda: nn.Sequential(*[nn.Linear(3, 3)] * 2), _x),
    "transformer": (lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True), lambda: _x(2, 3, 4)),
}


def make(name: str) -> tuple[nn.Module, tuple[Any, ...]]:
    """Return a module of the table and its arguments, the same in every call."""
    torch.manual_seed(0)
    module, args = MODULES[name]
    return module(), args()
