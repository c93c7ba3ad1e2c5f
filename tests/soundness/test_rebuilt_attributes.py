"""Modules that compute an attribute from constants in each call, as pruning does, under every transformation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.nn.utils import prune

import jtbridge
from jtbridge.errors import MutationError

X = jnp.asarray([0.5, -1.0, 2.0])


class Rebuilding(torch.nn.Module):
    """Computes ``sin(x * w)``, where ``w`` is computed again from a parameter in each call, and stored."""

    def __init__(self, weight: Callable[[torch.nn.Module, torch.Tensor], torch.Tensor]):
        super().__init__()
        self.original = torch.nn.Parameter(torch.tensor([1.0, -2.0, 0.5]))
        self.register_buffer("mask", torch.tensor([1.0, 0.0, 1.0]))
        self.weight = None
        self.compute = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight = self.compute(self, x)
        return torch.sin(x * self.weight)


def pruned() -> torch.nn.Module:
    layer = torch.nn.Linear(3, 3, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.diag(torch.tensor([1.0, -2.0, 0.5])))
    prune.custom_from_mask(layer, "weight", torch.diag(torch.tensor([1.0, 0.0, 1.0])))
    return torch.nn.Sequential(layer, Sine())


class Sine(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x)


MODULES: dict[str, tuple[Callable[[], torch.nn.Module], list[float]]] = {
    "pruned": (pruned, [1.0, 0.0, 0.5]),
    "product": (lambda: Rebuilding(lambda self, x: self.original * 2), [2.0, -4.0, 1.0]),
    "masked": (lambda: Rebuilding(lambda self, x: self.original * self.mask), [1.0, 0.0, 0.5]),
    "detached": (lambda: Rebuilding(lambda self, x: self.original.detach() + 1), [2.0, -1.0, 1.5]),
}
TRANSFORMS: dict[str, Callable[[Any], Any]] = {
    "value": lambda f: f(X),
    "grad": lambda f: jax.grad(lambda x: f(x).sum())(X),
    "jvp": lambda f: jax.jvp(f, (X,), (X,)),
    "vmap": lambda f: jax.vmap(f)(jnp.stack([X, -X])),
    "vmap of jvp": lambda f: jax.vmap(lambda x: jax.jvp(f, (x,), (x,))[1])(jnp.stack([X, -X])),
    "vmap of grad": lambda f: jax.vmap(jax.grad(lambda x: f(x).sum()))(jnp.stack([X, -X])),
    "hessian": lambda f: jax.hessian(lambda x: f(x).sum())(X),
    "grad of grad": lambda f: jax.grad(lambda x: jax.grad(lambda x: f(x).sum())(x).sum())(X),
}


@pytest.mark.filterwarnings("ignore::jtbridge.errors.SequentialVmapWarning")
@pytest.mark.parametrize("backend", ["auto", "xla", "dlpack"])
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("module", MODULES)
def test_an_attribute_that_each_call_computes_from_constants(module: str, transform: str, backend: str):
    make, weight = MODULES[module]
    run = TRANSFORMS[transform]
    want = run(lambda x: jnp.sin(x * jnp.asarray(weight)))
    net = jtbridge.wrap(make(), backend=backend)
    got = jax.jit(lambda: run(net))()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, want)


@pytest.mark.parametrize("backend", ["auto", "xla", "dlpack"])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_an_attribute_computed_from_an_argument_is_refused(transform: str, backend: str):
    net = jtbridge.wrap(Rebuilding(lambda self, x: x * 2), backend=backend)
    with pytest.raises(MutationError, match=r"writes to `self\.weight`"):
        jax.jit(lambda: TRANSFORMS[transform](net))()


@pytest.mark.parametrize("transform", ["grad", "hessian"])
def test_attribute_computed_from_an_argument_only_in_derivatives_is_refused(transform: str):
    net = jtbridge.wrap(Rebuilding(lambda self, x: x * 2 if x.requires_grad else self.mask))
    jax.jit(net)(X)
    with pytest.raises(MutationError, match=r"writes to `self\.weight`"):
        jax.jit(lambda: TRANSFORMS[transform](net))()
