"""Arrays for contestants in JAX and in torch, and calls of functions and of their gradients in each."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch

from ._turns import Contestant


def normal(*shape: int, seed: int, dtype: str = "bfloat16", scale: float = 1.0) -> jax.Array:
    """Return random numbers, the same in every run."""
    return (scale * jax.random.normal(jax.random.key(seed), shape)).astype(dtype)


def tensors(arrays: Sequence[jax.Array]) -> list[torch.Tensor]:
    """Copy arrays to torch tensors. Some kernels write to their arguments, so the memory is not shared."""
    return [torch.from_dlpack(x).clone() for x in arrays]


def angles(tokens: int, d: int) -> list[jax.Array]:
    """Return cos and sin [tokens, d] of a rotary embedding, in bfloat16."""
    frequencies = 10_000.0 ** (-jnp.arange(0, d, 2) / d)
    turns = jnp.tile(jnp.arange(tokens)[:, None] * frequencies, 2)
    return [jnp.cos(turns).astype("bfloat16"), jnp.sin(turns).astype("bfloat16")]


def in_jax(f: Callable[..., Any], arrays: Sequence[jax.Array], view: Callable[[Any], Any] = lambda y: y) -> Contestant:
    """Return a contestant that calls a function under jit."""
    compiled = jax.jit(f)
    return Contestant(lambda: compiled(*arrays), view)


def in_jax_with_gradients(
    f: Callable[..., Any],
    arrays: Sequence[jax.Array],
    cts: Sequence[jax.Array],
    count: int,
    view: Callable[[Any], Any] = lambda y: y,
) -> Contestant:
    """Return a contestant that computes results and gradients by the first `count` arrays under jit."""

    def both(cts: Sequence[jax.Array], *xs: jax.Array) -> Any:
        out, pull = jax.vjp(lambda *first: f(*first, *xs[count:]), *xs[:count])
        return out, pull(jax.tree.unflatten(jax.tree.structure(out), cts))

    compiled, given = jax.jit(both), list(cts)
    return Contestant(lambda: compiled(given, *arrays), view)


def in_torch(f: Callable[..., Any], arrays: Sequence[jax.Array]) -> Contestant:
    """Return a contestant that calls a torch function without recording gradients."""
    given = tensors(arrays)

    def call() -> Any:
        with torch.no_grad():
            return f(*given)

    return Contestant(call)


def in_torch_with_gradients(
    f: Callable[..., Any], arrays: Sequence[jax.Array], cts: Sequence[jax.Array], count: int
) -> Contestant:
    """Return a contestant that computes results and gradients by the first `count` tensors in torch."""
    given, their_cts = tensors(arrays), tensors(cts)
    leaves = [x.requires_grad_() for x in given[:count]]

    def call() -> Any:
        out = f(*leaves, *given[count:])
        several = isinstance(out, tuple | list)
        return out, torch.autograd.grad(out, leaves, their_cts if several else their_cts[0])

    return Contestant(call)


def bytes_of(*arrays: jax.Array) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in arrays)
