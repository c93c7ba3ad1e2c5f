"""A small torch function called under jit, whose time is the overhead of the call."""

from __future__ import annotations

import jax
import torch

from benchmarks._contestants import WRAPPERS
from benchmarks._results import DLPACK, TORCH2JAX

from ._rows import Goal, Options, Row
from ._turns import Contestant, attempt, milliseconds, wait


def _add(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a + b


def row(options: Options) -> Row:
    """Time calls, each with a wait for its result.

    The first import of wrap-torch2jax on a machine compiles C++, which takes most of a minute.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    example = torch.ones(16, device=device)
    x = jax.numpy.ones(16)

    def wrapped(name: str) -> Contestant:
        f = jax.jit(WRAPPERS[name](_add, example, example))

        def call() -> jax.Array:
            y = f(x, x)
            wait(y)
            return y

        return Contestant(call)

    def eager() -> Contestant:
        def call() -> torch.Tensor:
            y = _add(example, example)
            wait(y)
            return y

        return Contestant(call)

    contestants = {name: attempt(lambda name=name: wrapped(name)) for name in (DLPACK, TORCH2JAX)}
    contestants["torch"] = attempt(eager)
    cells = milliseconds(contestants, options, judge="torch")
    cells = {name: 1e3 * cell if isinstance(cell, float) else cell for name, cell in cells.items()}
    return Row("call", "jit(a + b) called, 16 floats", "us", cells, (Goal(DLPACK, 1.0, (TORCH2JAX,), at_most=True),))


ROWS = {"call": row}
