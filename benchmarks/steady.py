"""A translated function beside the same function written in jnp: a call may not run any code of torch."""

from functools import partial

import jax
import jax.numpy as jnp
import torch

from benchmarks._contestants import to_jax, wrap_all
from benchmarks._measure import microseconds
from benchmarks._results import JNP, TORCH, XLA, Options, Row, Target


def in_torch(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Compute a matrix product, and operators that XLA fuses with it."""
    y = torch.tanh(x @ w)
    return torch.softmax(y, -1) * torch.exp(-y * y)


def in_jnp(x: jax.Array, w: jax.Array) -> jax.Array:
    """Compute the same in jnp."""
    y = jnp.tanh(x @ w)
    return jax.nn.softmax(y, -1) * jnp.exp(-y * y)


def steady(size: int, options: Options) -> Row:
    """Time a jitted call."""
    torch.manual_seed(0)
    x, w = torch.randn(size, size), torch.randn(size, size) / size**0.5
    calls = wrap_all(in_torch, x, w)
    compiled, arrays = jax.jit(in_jnp), (to_jax(x), to_jax(w))
    calls[JNP] = lambda: jax.block_until_ready(compiled(*arrays))
    calls[TORCH] = lambda: in_torch(x, w)
    cells = microseconds(calls, options)
    title = f"jit(softmax and tanh of x @ w), {size} x {size}"
    return Row(f"steady-{size}", title, "us", cells, JNP, (Target(XLA, 1.05, JNP),))


ROWS = {f"steady-{size}": partial(steady, size) for size in (8, 256)}
