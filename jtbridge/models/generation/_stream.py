"""Tokens that are passed to a Python function as they come."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

Function = Callable[[np.ndarray], Any]


class Stream:
    """One use of a function, by a compiled program that knows its number alone.

    Args:
        function: gets the tokens of each step, of shape ``(batch,)``. It ends the generation by returning True.

    Attributes:
        number: what the program passes back, so that it serves every function.
        error: what the function raised.
    """

    def __init__(self, function: Function):
        self._function = function
        self.number = next(_NUMBERS)
        self.error: BaseException | None = None

    def __enter__(self) -> Stream:
        _OPEN[self.number] = self
        return self

    def __exit__(self, *exc: object) -> None:
        del _OPEN[self.number]

    def put(self, tokens: np.ndarray) -> bool:
        """Pass tokens on; return whether to stop."""
        try:
            return self._function(tokens) is True
        except BaseException as error:  # noqa: BLE001  (it is raised when the program has ended)
            self.error = error
            return True


_NUMBERS = itertools.count()
_OPEN: dict[int, Stream] = {}


def emit(number: jax.Array, tokens: jax.Array) -> jax.Array:
    """Pass tokens to the function of a stream, from within a program; return whether to stop."""
    return io_callback(_put, jax.ShapeDtypeStruct((), jnp.bool_), number, tokens, ordered=True)


def _put(number: Any, tokens: Any) -> np.ndarray:
    return np.array(_OPEN[int(number)].put(np.array(tokens)))


def emit_to(function: Function, tokens: jax.Array) -> jax.Array:
    """Pass tokens to a function, from within a program of the user; return whether to stop."""
    return io_callback(
        lambda tokens: np.array(function(np.array(tokens)) is True),
        jax.ShapeDtypeStruct((), jnp.bool_),
        tokens,
        ordered=True,
    )
