"""One function of the load test: how it is called, what it must return or raise, and its cases."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from tests.compare import as_numpy

SIZES = (1, 2, 5, 8)
INPUTS_OF_EACH_SIZE = 2
EXACT = 0.0
# For float32, relative to the largest value or to 1: XLA sums in another order than torch.
TIGHT = 5e-6

Inputs = Callable[[np.random.Generator, int], tuple]


def floats(*shapes: tuple[int | str, ...]) -> Inputs:
    """Return a maker of float32 arrays; "n" in a shape is the size of the case."""

    def make(random: np.random.Generator, n: int) -> tuple:
        return tuple(
            random.uniform(-2, 2, [n if size == "n" else int(size) for size in shape]).astype(np.float32)
            for shape in shapes
        )

    return make


ROWS_OF_FOUR = floats(("n", 4))


@dataclasses.dataclass(frozen=True)
class Failure:
    """A call that must raise; `call` gets the arguments of the case."""

    call: Callable[..., Any]
    error: type[BaseException] | tuple[type[BaseException], ...]
    text: str


@dataclasses.dataclass(frozen=True)
class Function:
    """A function that the threads call.

    `call` gets JAX arrays and `reference` torch tensors of the same values; with ``from_torch`` it is the other way
    round. Without a reference the results are those of a first call, while no other thread runs.
    """

    name: str
    kind: str
    weight: float
    call: Callable[..., Any]
    reference: Callable[..., Any] | None
    inputs: Inputs = ROWS_OF_FOUR
    tolerance: float = EXACT
    from_torch: bool = False
    failure: Failure | None = None

    def cases(self, seed: int) -> list[Case]:
        """Return the function with arguments of each size, and the results that it must have for them."""
        random = np.random.default_rng([seed, *self.name.encode()])
        return [self._case(self.inputs(random, n)) for n in SIZES for _ in range(INPUTS_OF_EACH_SIZE)]

    def _case(self, arrays: tuple) -> Case:
        in_jax, in_torch = jax.tree.map(_for_jax, arrays), jax.tree.map(_for_torch, arrays)
        arguments, others = (in_torch, in_jax) if self.from_torch else (in_jax, in_torch)
        expected = self.reference(*others) if self.reference else self.call(*arguments)
        leaves, structure = jax.tree.flatten(expected)
        results = [_as_jax_would(leaf) for leaf in leaves]
        return Case(self, arguments, structure, results, [_allowed(x, self.tolerance) for x in results])


@dataclasses.dataclass(frozen=True)
class Case:
    """A function, arguments, and the leaves of the result, each with the largest difference that is allowed."""

    function: Function
    arguments: tuple
    structure: Any
    results: list[np.ndarray]
    allowed: list[float]

    def run(self) -> str | None:
        """Make the call, and before it the one that must raise; return how the outcome differs, or None."""
        if self.function.failure is not None:
            problem = self._fail(self.function.failure)
            if problem is not None:
                return problem
        return self._difference(self.function.call(*self.arguments))

    def _fail(self, failure: Failure) -> str | None:
        try:
            jax.block_until_ready(failure.call(*self.arguments))
        except failure.error as error:
            text = str(error)
            return None if failure.text in text else f"raised {type(error).__name__} without {failure.text!r}: {text}"
        return "raised nothing"

    def _difference(self, result: Any) -> str | None:
        leaves, structure = jax.tree.flatten(result)
        if structure != self.structure:
            return f"returned {structure}, expected {self.structure}"
        for leaf, expected, allowed in zip(leaves, self.results, self.allowed, strict=True):
            found = np.asarray(leaf)
            if found.dtype != expected.dtype or found.shape != expected.shape:
                return f"returned {found.dtype}{found.shape}, expected {expected.dtype}{expected.shape}"
            if allowed == 0.0:
                same = np.array_equal(found, expected)
            else:
                same = found.size == 0 or np.abs(found - expected).max() <= allowed  # False for NaN
            if not same:
                return f"returned {found.tolist()}, expected {expected.tolist()}"
        return None


def _for_jax(x: Any) -> Any:
    return jnp.asarray(x) if isinstance(x, np.ndarray) else x


def _for_torch(x: Any) -> Any:
    if not isinstance(x, np.ndarray):
        return x
    tensor = torch.tensor(x)
    return tensor.long() if tensor.dtype is torch.int32 else tensor


def _as_jax_would(leaf: Any) -> np.ndarray:
    """Return the values in the dtype that a JAX array of them has while x64 is off."""
    values = as_numpy(leaf) if isinstance(leaf, torch.Tensor) else np.asarray(leaf)
    return np.array(values, dtype=jax.dtypes.canonicalize_dtype(values.dtype))


def _allowed(expected: np.ndarray, tolerance: float) -> float:
    if expected.dtype.kind not in "fc":
        return EXACT
    return tolerance * max(1.0, float(np.abs(expected).max(initial=0.0)))
