"""Tokens that are passed to a Python function as they are generated."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from jtbridge.errors import ArgumentError

Function = Callable[[np.ndarray], Any]


class Stream:
    """One use of a function by a compiled program, which refers to the function only by a number.

    Args:
        function: gets the tokens of each step, of shape ``(batch,)``. It ends the generation by returning True.

    Attributes:
        number: identifies the stream. It is an argument of the program, so that one program can call any function.
        error: the exception that the function raised, or None.
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
        """Pass tokens to the function; return whether to stop."""
        try:
            return _stops(self._function(tokens))
        except BaseException as error:  # noqa: BLE001  (it is raised when the program has ended)
            self.error = error
            return True


_NUMBERS = itertools.count()
_OPEN: dict[int, Stream] = {}


def emit(number: jax.Array, tokens: jax.Array) -> jax.Array:
    """Pass tokens to the function of a stream, from within a program; return whether to stop."""
    return _asked(lambda number, tokens: _OPEN[int(number)].put(tokens), number, tokens)


def emit_to(function: Function, tokens: jax.Array) -> jax.Array:
    """Pass tokens to a function, from within a user's program; return whether to stop."""
    return _asked(lambda tokens: _stops(function(tokens)), tokens)


def _stops(answer: Any) -> bool:
    """Return whether the answer of a stream's function is True, also as a scalar of NumPy, JAX or torch.

    Another value, such as the number of characters that `write` returns, does not end the generation.
    """
    if isinstance(answer, bool):
        return answer
    if not hasattr(answer, "dtype"):
        return False
    answer = np.asarray(answer)
    if answer.dtype == bool and answer.ndim:
        raise ArgumentError(
            "`stream` must return one bool, True to end the generation, but it returned an array of shape "
            f"{answer.shape}. To end it when all sequences agree: `return (tokens == token).all()`."
        )
    return answer.dtype == bool and bool(answer)


def _asked(question: Callable[..., bool], *args: jax.Array) -> jax.Array:
    """Return the answer of a Python function that the program calls when it runs."""
    return io_callback(
        lambda *values: np.array(question(*map(np.array, values))),
        jax.ShapeDtypeStruct((), jnp.bool_),
        *args,
        ordered=True,
    )
