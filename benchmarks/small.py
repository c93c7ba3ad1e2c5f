"""Small calls, whose time is the overhead of the call."""

from functools import partial

import jax
import jax.numpy as jnp
import torch

from benchmarks._contestants import to_jax, wrap_all
from benchmarks._measure import microseconds
from benchmarks._results import DLPACK, JNP, TORCH, TORCH2JAX, XLA, Options, Row, Target


def _add(a, b):
    return a + b


def _product(a, b):
    return (torch.sin(a) * b).sum()


def add(size: int, target: float, options: Options) -> Row:
    """Time a jitted `a + b`."""
    a, b = torch.randn(size), torch.randn(size)
    calls = wrap_all(_add, a, b) | {TORCH: lambda: a + b}
    title = f"jit(a + b), {size:,} floats"
    return Row(
        f"add-{size}", title, "us", microseconds(calls, options), TORCH2JAX, (Target(DLPACK, target, TORCH2JAX),)
    )


def gradient(options: Options) -> Row:
    """Time a jitted gradient. JAX compiles it once; torch records the forward and runs the backward each time."""
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


def many_arguments(count: int, options: Options) -> Row:
    """Time a jitted call with many small arrays, like the parameters of a model, beside the same in jnp."""
    parameters = {f"layer.{i}": torch.randn(8) for i in range(count)}
    arrays = {name: to_jax(tensor) for name, tensor in parameters.items()}

    def in_torch(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.stack(list(parameters.values())).sin().sum(0)

    def in_jnp(parameters: dict[str, jax.Array]) -> jax.Array:
        return jnp.sin(jnp.stack(list(parameters.values()))).sum(0)

    compiled = jax.jit(in_jnp)
    calls = wrap_all(in_torch, parameters)
    calls[JNP] = lambda: jax.block_until_ready(compiled(arrays))
    calls[TORCH] = lambda: in_torch(parameters)
    title = f"jit(f) of a dict of {count:,} arrays of 8 floats"
    return Row(f"arguments-{count}", title, "us", microseconds(calls, options), JNP, (Target(XLA, 1.05, JNP),))


ROWS = {
    "add-16": partial(add, 16, 0.9),
    "add-1M": partial(add, 1_000_000, 0.85),
    "grad-16": gradient,
    "arguments-1000": partial(many_arguments, 1000),
}
