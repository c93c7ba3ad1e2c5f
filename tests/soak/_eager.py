"""Functions that torch runs itself: plain calls, gradients, batches, forward mode and per-thread state."""

from __future__ import annotations

import threading
from typing import Any

import jax
import jax.numpy as jnp
import torch

import jtbridge

from ._function import TIGHT, Function, floats
from ._torch_code import (
    add,
    complexes,
    energy,
    integers,
    ints,
    mlp,
    normalized,
    softmax,
    spectrum,
    tree,
    trees,
    waves,
)


def functions() -> list[Function]:
    return [*_plain(), *_transformed(), *_with_state()]


def _plain() -> list[Function]:
    pair = floats(("n", 4), ("n", 4))
    model = mlp()

    def written(x: torch.Tensor) -> torch.Tensor:
        return x.add_(1).mul_(2)

    def mutated_reference(x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return (x + 1) * 2, {"x": (x + 1) * 2}

    def clamped(x: torch.Tensor) -> torch.Tensor:
        return torch.where(x > 0, x, -0.5 * x)

    def product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x @ y

    def ordered(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, places = x.sort(-1)
        return values, places

    def selected(x: torch.Tensor) -> torch.Tensor:
        return x[x > 0]

    def dropout(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(x, 0.5)

    keyed = jtbridge.wrap(dropout)
    plain = [
        ("add", 60, add, pair),
        ("scale", 30, lambda x: x * 2.5 + 1, floats(("n", 4))),
        ("softmax", 12, softmax, floats(("n", 4))),
        ("layer norm", 6, normalized, floats(("n", 4))),
        ("where", 8, clamped, floats(("n", 4))),
        ("integers", 6, integers, ints),
        ("fft", 4, spectrum, complexes),
        ("sort", 6, ordered, floats(("n", 4))),
        ("x[x > 0]", 6, selected, floats(("n", 4))),
        ("tree", 4, tree, trees),
    ]
    return [
        *(Function(name, "eager", weight, jtbridge.wrap(fn), fn, inputs) for name, weight, fn, inputs in plain),
        Function("matmul", "eager", 8, jtbridge.wrap(product), product, floats(("n", 4), (4, "n")), TIGHT),
        Function("mlp", "eager", 4, jtbridge.wrap(model), model, tolerance=TIGHT),
        Function("in place", "eager", 6, jtbridge.wrap(written), lambda x: (x + 1) * 2),
        Function("mutated", "eager", 3, jtbridge.wrap(written, return_mutated=True), mutated_reference),
        Function("dropout", "eager random", 2, lambda x: keyed(x, rng=jax.random.key(3)), None, floats(("n", 32))),
    ]


def _transformed() -> list[Function]:
    wrapped_energy, wrapped_waves, wrapped_softmax = map(jtbridge.wrap, (energy, waves, softmax))
    model, wrapped_tree = mlp(), jtbridge.wrap(tree)
    wrapped_model = jtbridge.wrap(model)

    def tree_total(batch: dict[str, Any], scale: float) -> jax.Array:
        return sum(jnp.sum(x * x) for x in jax.tree.leaves(wrapped_tree(batch, scale)))  # type: ignore[return-value]

    def tree_gradient(batch: dict[str, Any], scale: float) -> dict[str, Any]:
        x, (y, z) = batch["x"], batch["pair"]
        return {"x": 2 * (x + y) + 2 * x, "pair": (2 * (x + y), 2 * z * scale**2)}

    def hessian(x: torch.Tensor) -> torch.Tensor:
        return torch.autograd.functional.hessian(energy, x)

    def value_and_gradient(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return model(x).sum(), torch.func.grad(lambda x: model(x).sum())(x)

    return [
        Function("grad", "eager grad", 4, jax.grad(wrapped_energy), torch.func.grad(energy), tolerance=TIGHT),
        Function(
            "value_and_grad of mlp",
            "eager grad",
            2,
            jax.value_and_grad(lambda x: wrapped_model(x).sum()),
            value_and_gradient,
            tolerance=TIGHT,
        ),
        Function(
            "vjp",
            "eager grad",
            2,
            lambda x, y: jax.vjp(wrapped_waves, x)[1](y)[0],
            lambda x, y: torch.func.vjp(waves, x)[1](y)[0],
            floats(("n", 4), ("n", 4)),
            TIGHT,
        ),
        Function("grad of tree", "eager grad", 1, jax.grad(tree_total), tree_gradient, trees, TIGHT),
        Function("vmap", "eager vmap", 4, jax.vmap(wrapped_softmax), torch.func.vmap(softmax), tolerance=TIGHT),
        Function(
            "vmap of grad",
            "eager vmap",
            2,
            jax.vmap(jax.grad(wrapped_energy)),
            torch.func.vmap(torch.func.grad(energy)),
            tolerance=TIGHT,
        ),
        Function(
            "jvp",
            "eager jvp",
            2,
            lambda x, t: jax.jvp(wrapped_waves, (x,), (t,)),
            lambda x, t: torch.func.jvp(waves, (x,), (t,)),
            floats(("n", 4), ("n", 4)),
            TIGHT,
        ),
        Function("hessian", "eager jvp", 0.3, jax.hessian(wrapped_energy), hessian, floats(("n",)), TIGHT),
    ]


class _Running(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.total = torch.zeros(4)
        self.factor = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total += x.sum(0)
        return self.total * self.factor


def _with_state() -> list[Function]:
    own = threading.local()

    def of_this_thread() -> tuple[_Running, Any]:
        if not hasattr(own, "pair"):
            module = _Running()
            own.pair = module, jtbridge.wrap(module)
        return own.pair

    def buffers(x: jax.Array) -> list[jax.Array]:
        """Make three calls, each of which reads the values that the call before wrote."""
        module, wrapped = of_this_thread()
        module.total, module.factor = torch.zeros(4), 1
        return [wrapped(x) for _ in range(3)]

    def buffers_reference(x: torch.Tensor) -> list[torch.Tensor]:
        module = _Running()
        return [module(x).clone() for _ in range(3)]

    def attributes(x: jax.Array) -> list[jax.Array]:
        module, wrapped = of_this_thread()
        results = []
        for factor in (2, 3):
            module.total, module.factor = torch.zeros(4), factor
            results.append(wrapped(x))
        return results

    return [
        Function("buffer", "state", 3, buffers, buffers_reference),
        Function("attribute", "state", 3, attributes, lambda x: [x.sum(0) * 2, x.sum(0) * 3]),
    ]
