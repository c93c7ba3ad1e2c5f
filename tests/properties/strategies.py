"""Random shapes, arrays, trees and torch functions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import torch

LENGTHS = [0, 1, 2, 3, 5, 7]
FLOATS = ["float32", "float16", "bfloat16", "complex64"]
INTEGERS = ["int32", "uint8", "int8", "bool"]


def shapes(max_dims: int = 3) -> st.SearchStrategy[tuple[int, ...]]:
    """Draw shapes: 0-d, and with no, one or a prime number of elements."""
    return st.lists(st.sampled_from(LENGTHS), max_size=max_dims).map(tuple)


def arrays(dtype: str, shape: tuple[int, ...]) -> st.SearchStrategy[np.ndarray]:
    """Draw arrays of numbers of moderate size, so that no dtype overflows."""
    return st.integers(0, 2**32 - 1).map(lambda seed: _array(seed, dtype, shape))


def _array(seed: int, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    rng = np.random.default_rng(seed)
    if dtype == "bool":
        return np.asarray(rng.integers(0, 2, size=shape), bool)
    if dtype in INTEGERS:
        return np.asarray(rng.integers(0, 6, size=shape), dtype)
    values = rng.uniform(-2, 2, size=shape)
    if dtype.startswith("complex"):
        values = values + 1j * rng.uniform(-2, 2, size=shape)
    return np.asarray(values).astype(jnp.dtype(dtype))


@dataclasses.dataclass(frozen=True)
class Function:
    """A torch function of any number of tensors of one shape, and its name for reports."""

    name: str
    call: Callable[..., Any]

    def __repr__(self) -> str:
        return self.name


def _sum_of(xs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    total = xs[0]
    for x in xs[1:]:
        total = total + x
    return total


def _rolled(*xs: torch.Tensor) -> torch.Tensor:
    return torch.stack(xs).roll(1, 0).prod(0)


# Each function has derivatives everywhere, works for every shape, and is defined for real and complex numbers.
FUNCTIONS = [
    Function("sin_of_sum", lambda *xs: torch.sin(_sum_of(xs))),
    Function("product", lambda *xs: torch.stack(xs).prod(0)),
    Function("rolled", _rolled),
    Function("sum", lambda *xs: _sum_of(xs).sum()),
    Function("mean_free", lambda *xs: xs[0] - _sum_of(xs).sum() * 0.1),
    Function("flat", lambda *xs: torch.cat([x.reshape(-1) for x in xs]) ** 2),
    Function("many", lambda *xs: tuple(x * xs[0] for x in xs)),
    Function("tree", lambda *xs: {"a": xs[0].exp(), "b": [xs[-1] * 2, (xs[0].real > 0,)]}),
    Function("unused", lambda *xs: xs[0] * 3),
    Function("flipped", lambda *xs: _sum_of(xs).flip(tuple(range(xs[0].ndim))).mT if xs[0].ndim > 1 else xs[0] * 1),
    Function("in_place", lambda *xs: _sum_of(xs).clone().mul_(xs[0]).add_(1)),
]


@st.composite
def calls(draw: st.DrawFn, dtypes: list[str], max_dims: int = 3) -> tuple[Function, list[np.ndarray]]:
    """Draw a function and its arguments: one to three arrays of one shape and dtype."""
    function = draw(st.sampled_from(FUNCTIONS))
    shape, dtype = draw(shapes(max_dims)), draw(st.sampled_from(dtypes))
    count = draw(st.integers(1, 3))
    return function, [draw(arrays(dtype, shape)) for _ in range(count)]


def trees(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Draw nested tuples, lists and dicts, with None inside."""
    return st.recursive(
        leaves | st.none(),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.lists(inner, max_size=3).map(tuple)
            | st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
        ),
        max_leaves=6,
    )
