"""Functions in programs of `jax.jit`: translated, called, with islands, with keys, in loops."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import torch

import jtbridge
from jtbridge.translate import forced_islands

from ._function import TIGHT, Function, floats
from ._torch_code import (
    add,
    around_doubled,
    complexes,
    energy,
    integers,
    ints,
    mlp,
    normalized,
    positive,
    slopes,
    softmax,
    spectrum,
    tree,
    trees,
    waves,
)


def functions() -> list[Function]:
    return [*_translated(), *_in_control_flow(), *_random(), *_called(), *_islands()]


def _translated() -> list[Function]:
    wrapped_energy, wrapped_waves, wrapped_softmax = map(jtbridge.wrap, (energy, waves, softmax))
    model = mlp()
    pair = floats(("n", 4), ("n", 4))
    norm = torch.nn.BatchNorm1d(4)
    net = jtbridge.module(norm)
    params, state = net.init()

    def train(x: jax.Array) -> tuple[jax.Array, dict[str, Any]]:
        return net(params, state, x, train=True)

    def train_reference(x: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
        fresh = torch.nn.BatchNorm1d(4)
        return fresh(x), dict(fresh.named_buffers())

    return [
        Function("jit add", "translated", 60, jax.jit(jtbridge.wrap(add)), add, pair),
        Function("jit layer norm", "translated", 20, jax.jit(jtbridge.wrap(normalized)), normalized, tolerance=TIGHT),
        Function("jit mlp", "translated", 20, jax.jit(jtbridge.wrap(model)), model, tolerance=TIGHT),
        Function("jit integers", "translated", 10, jax.jit(jtbridge.wrap(integers)), integers, ints),
        Function("jit fft", "translated", 5, jax.jit(jtbridge.wrap(spectrum)), spectrum, complexes, TIGHT),
        Function("jit tree", "translated", 5, jax.jit(jtbridge.wrap(tree), static_argnums=1), tree, trees, TIGHT),
        Function(
            "jit grad", "translated", 20, jax.jit(jax.grad(wrapped_energy)), torch.func.grad(energy), tolerance=TIGHT
        ),
        Function(
            "jit vmap of grad",
            "translated",
            10,
            jax.jit(jax.vmap(jax.grad(wrapped_energy))),
            torch.func.vmap(torch.func.grad(energy)),
            tolerance=TIGHT,
        ),
        Function("jit vmap", "translated", 10, jax.jit(jax.vmap(wrapped_softmax)), softmax, tolerance=TIGHT),
        Function(
            "jit jvp",
            "translated",
            10,
            jax.jit(lambda x, t: jax.jvp(wrapped_waves, (x,), (t,))),
            lambda x, t: torch.func.jvp(waves, (x,), (t,)),
            pair,
            TIGHT,
        ),
        Function(
            "jit hessian",
            "translated",
            4,
            jax.jit(jax.hessian(wrapped_energy)),
            lambda x: torch.autograd.functional.hessian(energy, x),
            floats(("n",)),
            TIGHT,
        ),
        Function("xla, eagerly", "translated", 1, jtbridge.wrap(waves, backend="xla"), waves, tolerance=TIGHT),
        # Torch refuses the statistics of a single row.
        Function(
            "jit module",
            "translated",
            4,
            jax.jit(train),
            train_reference,
            lambda random, n: floats(("n", 4))(random, n + 1),
            TIGHT,
        ),
    ]


def _in_control_flow() -> list[Function]:
    step = jtbridge.wrap(lambda carry, row: (torch.tanh(carry + row), carry * row))
    called = jtbridge.wrap(positive, backend="dlpack")
    wrapped_waves = jtbridge.wrap(waves)

    def scan_reference(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        carry, results = torch.zeros(4), []
        for row in rows:
            results.append(carry * row)
            carry = torch.tanh(carry + row)
        return carry, torch.stack(results)

    def loop_reference(x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = waves(x) + x
        return x

    return [
        Function(
            "jit scan",
            "translated",
            6,
            jax.jit(lambda rows: jax.lax.scan(step, jnp.zeros(4), rows)),
            scan_reference,
            tolerance=TIGHT,
        ),
        Function(
            "jit fori_loop",
            "translated",
            6,
            jax.jit(lambda x: jax.lax.fori_loop(0, 3, lambda i, x: wrapped_waves(x) + x, x)),
            loop_reference,
            tolerance=TIGHT,
        ),
        Function(
            "jit cond",
            "translated",
            6,
            jax.jit(lambda x: jax.lax.cond(x.sum() > 0, wrapped_waves, lambda x: x, x)),
            lambda x: waves(x) if x.sum() > 0 else x,
            tolerance=TIGHT,
        ),
        Function(
            "jit scan of called",
            "called",
            2,
            jax.jit(lambda rows: jax.lax.scan(lambda carry, row: (carry, called(row * row)), 0, rows)[1]),
            lambda rows: rows * rows * 2,
        ),
    ]


def _random() -> list[Function]:
    dropout = jtbridge.wrap(lambda x: torch.nn.functional.dropout(x, 0.5))
    same = jtbridge.wrap(lambda x: torch.nn.functional.dropout(x, 0.5), backend="dlpack")
    noise = jtbridge.wrap(lambda x: x + torch.randn_like(x))
    shape = floats(("n", 32))
    return [
        Function("jit dropout", "random", 6, jax.jit(lambda x: dropout(x, rng=jax.random.key(1))), None, shape),
        Function("jit noise", "random", 6, jax.jit(lambda x: noise(x, rng=jax.random.key(2))), None, shape, TIGHT),
        Function("jit called dropout", "random", 2, jax.jit(lambda x: same(x, rng=jax.random.key(5))), None, shape),
    ]


def _called() -> list[Function]:
    def by(backend: str) -> list[Function]:
        wrapped_waves = jtbridge.wrap(waves, backend=backend)
        wrapped_energy = jtbridge.wrap(energy, backend=backend)
        return [
            Function(f"jit {backend}", "called", 6, jax.jit(wrapped_waves), waves),
            Function(
                f"jit grad {backend}",
                "called",
                3,
                jax.jit(jax.grad(wrapped_energy)),
                torch.func.grad(energy),
                tolerance=TIGHT,
            ),
            Function(f"jit vmap {backend}", "called", 3, jax.jit(jax.vmap(wrapped_waves)), waves, tolerance=TIGHT),
            # XLA runs it while other threads trace derivatives in forward mode.
            Function(
                f"jit forward mode inside {backend}",
                "called",
                3,
                jax.jit(jtbridge.wrap(slopes, backend=backend)),
                slopes,
                tolerance=TIGHT,
            ),
        ]

    def through_numpy(x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(x.numpy() * 2)

    return [
        *by("dlpack"),
        *by("callback"),
        Function("jit untraceable", "called", 3, jax.jit(jtbridge.wrap(through_numpy)), lambda x: x * 2),
        Function(
            "jit tree dlpack",
            "called",
            3,
            jax.jit(jtbridge.wrap(tree, backend="dlpack"), static_argnums=1),
            tree,
            trees,
        ),
    ]


def _islands() -> list[Function]:
    wrapped = jtbridge.wrap(around_doubled, islands="needed")
    compiled = jax.jit(jtbridge.wrap(waves, islands="needed"))

    def forced(x: jax.Array) -> jax.Array:
        with forced_islands(lambda node: "sin" in str(node.target)):
            return compiled(x)

    return [
        Function("jit island", "islands", 4, jax.jit(wrapped), around_doubled, tolerance=TIGHT),
        Function(
            "jit grad of island",
            "islands",
            2,
            jax.jit(jax.grad(lambda x: wrapped(x).sum())),
            lambda x: torch.cos(2 * x * x) * 4 * x + 1,
            tolerance=TIGHT,
        ),
        Function("jit vmap of island", "islands", 1, jax.jit(jax.vmap(wrapped)), around_doubled, tolerance=TIGHT),
        Function("jit forced island", "islands", 3, forced, waves, tolerance=TIGHT),
    ]
