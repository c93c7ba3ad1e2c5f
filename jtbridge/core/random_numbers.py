"""Random operators as a pure function of a JAX key.

A call with a key draws from its own generator, which the key seeds: the same key gives the same draws, in the forward
and in the backward. Torch's default generators, one per device and process, are neither read nor written,
so other threads that draw from them are not affected.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from jtbridge._compat import (
    EarlierDraws,
    default_generator,
    draw_source,
    drawing_from,
    random_state_of,
    same_generator,
    states_on_gpus,
)
from jtbridge.errors import ArgumentError, RandomnessError

from .messages import kind_of

SEED_SHAPE = (2,)
_TRACING = threading.local()
_CPU = torch.device("cpu")


def check_key(key: Any, name: str = "rng") -> None:
    """Raise an error unless an argument is one JAX key, new-style or raw uint32 (a NumPy array too)."""
    is_array = isinstance(key, jax.Array | np.ndarray)
    is_typed = is_array and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    if not is_typed and not (is_array and key.dtype == jnp.uint32):
        found = f"{kind_of(key)} of dtype {key.dtype} and shape {key.shape}" if is_array else kind_of(key)
        raise ArgumentError(f"`{name}` must be a JAX key such as `jax.random.key(0)`, but it is {found}.")
    if key.ndim != (0 if is_typed else 1):
        raise ArgumentError(
            f"`{name}` must be one JAX key, but it is an array of shape {key.shape}. Pass one of several keys, such as "
            "those of `jax.random.split`, or use `jax.vmap` over them."
        )
    if not is_typed and key.shape not in _RAW_SHAPES.values():
        raise ArgumentError(
            f"`{name}` must be a JAX key such as `jax.random.key(0)`, but it is a uint32 array of shape {key.shape}; "
            "raw keys have 2 words, or 4 for the generators `rbg` and `unsafe_rbg`."
        )


_RAW_SHAPES = {"threefry2x32": (2,), "rbg": (4,)}


def seed_from_key(key: Any) -> jax.Array:
    """Return 64 random bits, as uint32[2], from a new-style or a raw uint32 JAX key (batched under vmap)."""
    check_key(key)
    is_raw = key.dtype == jnp.uint32
    if key.shape == _RAW_SHAPES["rbg"] or (not is_raw and str(jax.random.key_impl(key)) in ("rbg", "unsafe_rbg")):
        # Under vmap, the bits of such keys depend only on the key of the first row.
        words = jnp.asarray(key) if is_raw else jax.random.key_data(key)
        first = jax.random.wrap_key_data(words[:2], impl="threefry2x32")
        key = jax.random.fold_in(jax.random.fold_in(first, words[2]), words[3])
    elif is_raw:
        key = jax.random.wrap_key_data(jnp.asarray(key), impl="threefry2x32")
    return jax.random.bits(key, SEED_SHAPE, jnp.uint32)


def seeded(seed: torch.Tensor) -> contextlib.AbstractContextManager[None]:
    """Seed the draws of this thread inside the block by `seed` (uint32[2]); leave torch's own generators alone.

    To read a seed on a GPU, the call waits for the GPU. Inside :func:`counting_draws` nothing is seeded.
    """
    if is_counting_draws():
        return contextlib.nullcontext()
    low, high = seed.tolist()
    return seeded_by(low, high)


def seeded_again(seed: torch.Tensor) -> contextlib.AbstractContextManager[None]:
    """Seed the draws of a backward inside the block: other numbers than the forward drew from `seed` (uint32[2]).

    A ``torch.utils.checkpoint`` in the backward draws the numbers of the forward again. Inside :func:`counting_draws`
    nothing is seeded.

    Args:
        seed: the seed, or the seeds of several rows, as uint32[rows..., 2].

    Raises:
        RandomnessError: there are several rows, and the block drew numbers, which would belong to no row.
    """
    if is_counting_draws():
        return contextlib.nullcontext()
    if seed.shape != SEED_SHAPE:
        return _without_draws()
    low, high = seed.tolist()
    return seeded_by(low ^ 0xFFFFFFFF, high)


@contextlib.contextmanager
def _without_draws() -> Iterator[None]:
    """Raise after the block if it drew. A checkpoint may draw, because it restores the generator's state afterwards."""
    source = _Seeded(0)
    try:
        with drawing_from(source):
            yield
    finally:
        if source.has_drawn():
            raise RandomnessError(
                "A backward or a hook draws random numbers in the derivative of a batch whose rows have a key each "
                f"({source.operator}). Its numbers would belong to no row. Differentiate the rows, as in "
                "`jax.vmap(jax.grad(f))`, or use one key for the batch."
            )


def seeded_by(low: int, high: int) -> contextlib.AbstractContextManager[None]:
    """Seed the draws of this thread inside the block by the two words of a seed as Python ints; see :func:`seeded`."""
    return contextlib.nullcontext() if is_counting_draws() else drawing_from(_Seeded((high << 32) | low))


@contextlib.contextmanager
def drawing_again(state: torch.Tensor) -> Iterator[None]:
    """Draw inside the block from an earlier state of the CPU's generator, and leave the generator where the draws end.

    If nothing is drawn, the generator is left alone: another thread may have drawn from it since.
    """
    if draw_source() is not None:  # the state is set in the generator of this thread's source
        torch.set_rng_state(state)
        yield
        return
    source = EarlierDraws(state)
    try:
        with drawing_from(source):
            yield
    finally:
        left = source.generators[_CPU].get_state()
        if not torch.equal(left, state):
            torch.default_generator.set_state(left)


def drawing_apart() -> contextlib.AbstractContextManager[None]:
    """Draw inside the block the numbers that the default generators would give, without advancing them."""
    return drawing_from(EarlierDraws(torch.get_rng_state(), states_on_gpus()))


def first_operator_seeded() -> str | None:
    """Return the first random operator that ran inside the present :func:`seeded` block; None if none did."""
    source = draw_source()
    return source.operator if isinstance(source, _Seeded) else None


def is_seeded_generator(generator: torch.Generator) -> bool:
    """Return whether :func:`seeded` or :func:`drawing_apart` gave this generator to the draws of this thread."""
    source = draw_source()
    own = source.generators.values() if isinstance(source, _Seeded | EarlierDraws) else ()
    return any(same_generator(generator, each) for each in own)


class _Seeded:
    """Source of draws: generators with one seed, one on each device that is drawn on."""

    def __init__(self, seed: int):
        self._seed = seed
        self.generators: dict[torch.device, torch.Generator] = {}
        self.operator: str | None = None  # the first operator that drew
        self.has_new_seed = False

    def generator(self, device: torch.device, operator: str) -> torch.Generator:
        self.operator = self.operator or operator
        return self.state_generator(device)

    def state_generator(self, device: torch.device) -> torch.Generator:
        found = self.generators.get(device)
        if found is None:
            found = self.generators[device] = self._new(device)
        return found

    def has_drawn(self) -> bool:
        """Return whether a generator has left the state that its seed gives."""
        return any(not torch.equal(g.get_state(), self._new(d).get_state()) for d, g in self.generators.items())

    def _new(self, device: torch.device) -> torch.Generator:
        return torch.Generator(device).manual_seed(self._seed)

    def note_new_seed(self) -> None:
        """Record that the function set a new seed. As in torch, the next draws follow from the new seed."""
        self.has_new_seed = True


class _Numbered:
    """Source that counts the draws of a traced function: the seed of its generator is the number of the next draw.

    ``torch.utils.checkpoint`` saves and restores the state of this generator as it does that of the default generator,
    so a recomputation gets the same numbers as the forward.
    """

    def __init__(self) -> None:
        self.has_new_seed = False
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

    def note_new_seed(self) -> None:
        """Record that the function set a new seed. The trace is refused: the seeds here are numbers of draws."""
        self.has_new_seed = True


class _Refusing:
    """Source that refuses draws: a random operator raises before it has drawn."""

    def __init__(self, name: str, message: Callable[[str, str], str]):
        self._name = name
        self._message = message

    def generator(self, device: torch.device, operator: str) -> torch.Generator:
        del device
        raise RandomnessError(self._message(self._name, operator))

    def state_generator(self, device: torch.device) -> torch.Generator:
        return default_generator(device)

    def note_new_seed(self) -> None:
        """Raise because the function set a new seed."""
        raise RandomnessError(with_new_seed(self._name))


@contextlib.contextmanager
def counting_draws() -> Iterator[None]:
    """Count the draws inside the block from 0, for :func:`next_draw`, and make :func:`seeded` do nothing.

    While a graph is traced, seeds have no value yet, and nothing is drawn.
    """
    before = getattr(_TRACING, "draws", None)
    _TRACING.draws = _Numbered()
    try:
        with random_state_of(_TRACING.draws):
            yield
    finally:
        _TRACING.draws = before


def is_counting_draws() -> bool:
    """Return whether this thread is inside :func:`counting_draws`."""
    return getattr(_TRACING, "draws", None) is not None


def next_draw() -> int:
    """Return the number of the next draw of a trace. A recomputation gets the numbers of its forward."""
    return _TRACING.draws.next()


def has_new_seed() -> bool:
    """Return whether this thread has seeded the generator of its source, by ``torch.manual_seed`` or ``torch.seed``."""
    source = draw_source()
    return isinstance(source, _Numbered | _Seeded) and source.has_new_seed


def refused(name: str) -> contextlib.AbstractContextManager[None]:
    """Raise if the block draws from torch's generators: for functions that could not be traced beforehand."""
    return contextlib.nullcontext() if is_counting_draws() else drawing_from(_Refusing(name, without_key))


def undeclared_refused(name: str, custom_operator: str) -> contextlib.AbstractContextManager[None]:
    """Raise if the block draws from torch's generators: a custom operator draws without declaring that it does."""

    def message(name: str, operator: str) -> str:
        return (
            f"A custom operator of `{name}`, such as `{custom_operator}`, draws random numbers ({operator}), and its "
            "definition does not say so: they would not follow from the key that is passed as `rng=`. Define it with "
            "`tags=[torch.Tag.nondeterministic_seeded]`."
        )

    return drawing_from(_Refusing(name, message))


def without_key(name: str, operator: str) -> str:
    """Return the error message for a function that draws without a key."""
    return (
        f"`{name}` draws random numbers ({operator}) but was called without a key. Pass a JAX key as "
        "`rng=`, for example `f(x, rng=jax.random.key(0))`; the same key gives the same numbers. "
        "A module that should not draw needs `model.eval()`, or `train=False` if it is called by `jtbridge.module`."
    )


def with_new_seed(name: str) -> str:
    """Return the error message for a function that seeds torch's generator."""
    return (
        f"`{name}` seeds torch's generator (`torch.manual_seed` or `torch.seed`), which a JAX program does not have: "
        "its random numbers follow from the key that is passed as `rng=`. Remove the call. To draw the same numbers in "
        "each call, make a `torch.Generator` inside the function, seed it, and pass it to torch as `generator=`."
    )
