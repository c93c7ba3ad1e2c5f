"""Random operators as a pure function of a JAX key.

Torch draws from one generator per process. A call with a key seeds it, runs and puts the user's state back, under
a lock, so the same key gives the same draws, in the forward and in the backward alike.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import torch

from .errors import ArgumentError, RandomnessError

SEED_SHAPE = (2,)
_LOCK = threading.RLock()
_TRACING = threading.local()
_CPU = torch.device("cpu")


def seed_from_key(key: Any) -> jax.Array:
    """64 random bits, as uint32[2], from a new-style or a raw uint32 JAX key (batched under vmap)."""
    if not isinstance(key, jax.Array) or not (
        jnp.issubdtype(key.dtype, jax.dtypes.prng_key) or key.dtype == jnp.uint32
    ):
        raise ArgumentError(f"`rng` must be a JAX key such as `jax.random.key(0)`, but it is a {type(key).__name__}.")
    return jax.random.bits(key, SEED_SHAPE, jnp.uint32)


@contextlib.contextmanager
def seeded(seed: torch.Tensor) -> Iterator[None]:
    """Run with torch's generators seeded by `seed` (uint32[2]); the user's generator states are untouched.

    Those are the CPU's, and that of the GPU that `seed` lies on, which is waited for.
    """
    if getattr(_TRACING, "on", False):
        yield
        return
    low, high = seed.tolist()
    with preserved_state(seed.device):
        for generator in _generators(seed.device):
            generator.manual_seed((high << 32) | low)
        yield


def _generators(device: torch.device) -> list[torch.Generator]:
    on_gpu = [torch.cuda.default_generators[device.index or 0]] if device.type == "cuda" else []
    return [torch.default_generator, *on_gpu]


def _states(device: torch.device) -> list[tuple[torch.Generator, torch.Tensor]]:
    return [(generator, generator.get_state()) for generator in _generators(device)]


@contextlib.contextmanager
def tracing() -> Iterator[None]:
    """While a graph is traced seeds have no value yet, and nothing is drawn: :func:`seeded` does nothing."""
    before = getattr(_TRACING, "on", False)
    _TRACING.on = True
    try:
        yield
    finally:
        _TRACING.on = before


@contextlib.contextmanager
def preserved_state(device: torch.device = _CPU) -> Iterator[None]:
    """Put torch's generators, those that a device uses, back as they were, whatever runs inside."""
    with _LOCK:
        before = _states(device)
        try:
            yield
        finally:
            for generator, state in before:
                generator.set_state(state)


@contextlib.contextmanager
def refused(name: str, device: torch.device) -> Iterator[None]:
    """Raise if the body draws from torch's generators: for functions that could not be traced beforehand."""
    with _LOCK:
        before = _states(device)
        yield
        drawn_from = [(g, state) for g, state in before if not torch.equal(state, g.get_state())]
        for generator, state in drawn_from:
            generator.set_state(state)
        if drawn_from:
            raise RandomnessError(without_key(name, "a random operator"))


def without_key(name: str, operator: str) -> str:
    """The message for a function that draws without a key."""
    return (
        f"`{name}` draws random numbers ({operator}) but was called without a key. Pass a JAX key as "
        "`rng=`, for example `f(x, rng=jax.random.key(0))`; the same key gives the same numbers. "
        "For a module that should not draw, call `.eval()` on it first."
    )
