"""Random operators as a pure function of a JAX key.

A call with a key draws from a generator of its own, which the key seeds: the same key gives the same draws, in the
forward and in the backward alike. Torch's default generators, one per device and process, are neither read nor written,
so other threads that draw from them see nothing of it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import torch

from ._compat import EarlierDraws, draw_source, drawing_from, random_state_of, same_generator
from .errors import ArgumentError, RandomnessError

SEED_SHAPE = (2,)
_TRACING = threading.local()
_CPU = torch.device("cpu")


def seed_from_key(key: Any) -> jax.Array:
    """64 random bits, as uint32[2], from a new-style or a raw uint32 JAX key (batched under vmap)."""
    if not isinstance(key, jax.Array) or not (
        jnp.issubdtype(key.dtype, jax.dtypes.prng_key) or key.dtype == jnp.uint32
    ):
        raise ArgumentError(f"`rng` must be a JAX key such as `jax.random.key(0)`, but it is a {type(key).__name__}.")
    return jax.random.bits(key, SEED_SHAPE, jnp.uint32)


def seeded(seed: torch.Tensor) -> contextlib.AbstractContextManager[None]:
    """Run with the draws of this thread seeded by `seed` (uint32[2]); torch's own generators are not touched.

    A seed on a GPU is waited for.
    """
    if is_tracing():
        return contextlib.nullcontext()
    low, high = seed.tolist()
    return seeded_by(low, high)


def seeded_by(low: int, high: int) -> contextlib.AbstractContextManager[None]:
    """The same for the two words of a seed as Python ints."""
    return contextlib.nullcontext() if is_tracing() else drawing_from(_Seeded((high << 32) | low))


@contextlib.contextmanager
def drawing_again(state: torch.Tensor) -> Iterator[None]:
    """Draw from an earlier state of the CPU's generator on, and leave the generator where the draws end.

    If nothing is drawn it is left alone: another thread may have drawn from it since.
    """
    if draw_source() is not None:  # of this thread alone
        torch.set_rng_state(state)
        yield
        return
    source = EarlierDraws(state)
    try:
        with drawing_from(source):
            yield
    finally:
        if not torch.equal(source.cpu.get_state(), state):
            torch.default_generator.set_state(source.cpu.get_state())


def drawing_apart() -> contextlib.AbstractContextManager[None]:
    """Draw the numbers that the CPU's default generator would give, without advancing it."""
    return drawing_from(EarlierDraws(torch.get_rng_state()))


def first_operator_seeded() -> str | None:
    """The first random operator of torch that ran inside :func:`seeded`; None if none did."""
    source = draw_source()
    return source.operator if isinstance(source, _Seeded) else None


def is_seeded_generator(generator: torch.Generator) -> bool:
    """Whether a generator is the one that this thread's draws were given by :func:`seeded` or :func:`drawing_apart`."""
    source = draw_source()
    own = [*source.generators.values()] if isinstance(source, _Seeded) else []
    own += [source.cpu] if isinstance(source, EarlierDraws) else []
    return any(same_generator(generator, each) for each in own)


class _Seeded:
    """Generators with one seed, one on each device that is drawn on."""

    def __init__(self, seed: int):
        self._seed = seed
        self.generators: dict[torch.device, torch.Generator] = {}
        self.operator: str | None = None  # the first that drew

    def generator(self, device: torch.device, operator: str) -> torch.Generator:
        self.operator = self.operator or operator
        return self.state_generator(device)

    def state_generator(self, device: torch.device) -> torch.Generator:
        found = self.generators.get(device)
        if found is None:
            found = self.generators[device] = torch.Generator(device).manual_seed(self._seed)
        return found


class _Numbered:
    """Draws that are counted while a function is traced: the seed of the generator is the number of the next one.

    Its state is saved and put back by ``torch.utils.checkpoint`` as that of the default generator would be, so a
    recomputation has the numbers of the forward again.
    """

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(0)

    def next(self) -> int:
        number = self._generator.initial_seed()
        self._generator.manual_seed(number + 1)
        return number

    def generator(self, device: torch.device, operator: str) -> torch.Generator:
        del device, operator
        return self._generator

    def state_generator(self, device: torch.device) -> torch.Generator:
        del device
        return self._generator


class _Refusing:
    """No draws: a random operator raises before it has drawn."""

    def __init__(self, name: str):
        self._name = name

    def generator(self, device: torch.device, operator: str) -> torch.Generator:
        del device
        raise RandomnessError(without_key(self._name, operator))

    def state_generator(self, device: torch.device) -> torch.Generator:
        del device
        return torch.default_generator


@contextlib.contextmanager
def tracing() -> Iterator[None]:
    """While a graph is traced seeds have no value yet, and nothing is drawn: :func:`seeded` does nothing.

    Draws are counted from 0 by :func:`next_draw`.
    """
    before = getattr(_TRACING, "draws", None)
    _TRACING.draws = _Numbered()
    try:
        with random_state_of(_TRACING.draws):
            yield
    finally:
        _TRACING.draws = before


def is_tracing() -> bool:
    """Whether this thread is inside :func:`tracing`."""
    return getattr(_TRACING, "draws", None) is not None


def next_draw() -> int:
    """The number of the next draw inside :func:`tracing`; a recomputation gets those that the forward got."""
    return _TRACING.draws.next()


def refused(name: str) -> contextlib.AbstractContextManager[None]:
    """Raise if the body draws from torch's generators: for functions that could not be traced beforehand."""
    return contextlib.nullcontext() if is_tracing() else drawing_from(_Refusing(name))


def without_key(name: str, operator: str) -> str:
    """The message for a function that draws without a key."""
    return (
        f"`{name}` draws random numbers ({operator}) but was called without a key. Pass a JAX key as "
        "`rng=`, for example `f(x, rng=jax.random.key(0))`; the same key gives the same numbers. "
        "For a module that should not draw, call `.eval()` on it first."
    )
