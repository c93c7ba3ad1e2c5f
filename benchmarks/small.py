"""Small calls, where what counts is the way in and out."""

from functools import partial

import jax
import torch

from benchmarks._contestants import wrap_all
from benchmarks._measure import microseconds
from benchmarks._results import DLPACK, TORCH, TORCH2JAX, Options, Row, Target


def _add(a, b):
    return a + b


def _product(a, b):
    return (torch.sin(a) * b).sum()


def add(size: int, target: float, options: Options) -> Row:
    """A jitted `a + b`."""
    a, b = torch.randn(size), torch.randn(size)
    calls = wrap_all(_add, a, b) | {TORCH: lambda: a + b}
    title = f"jit(a + b), {size:,} floats"
    return Row(
        f"add-{size}", title, "us", microseconds(calls, options), TORCH2JAX, (Target(DLPACK, target, TORCH2JAX),)
    )


def gradient(options: Options) -> Row:
    """A jitted gradient. JAX compiles it once; torch records and runs it backward each time."""
    a, b = torch.randn(16), torch.randn(16)
    leaf = a.clone().requires_grad_()
    calls = wrap_all(_product, a, b, then=lambda f: jax.jit(jax.grad(f)))
    calls[TORCH] = lambda: torch.autograd.grad(_product(leaf, b), leaf)
    return Row(
        "grad-16",
        "jit(grad(sum(sin(a) * b))), 16 floats",
        "us",
        microseconds(calls, options),
        TORCH2JAX,
        (Target(DLPACK, 0.8, TORCH2JAX),),
    )


ROWS = {
    "add-16": partial(add, 16, 0.9),
    "add-1M": partial(add, 1_000_000, 0.85),
    "grad-16": gradient,
}
