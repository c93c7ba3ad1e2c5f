"""Calls of a ``functools.partial``: its JAX arrays are arguments, and its other values belong to the function.

Torch code cannot compute with JAX arrays, so they reach the function as tensors, like the arguments of a call. Every
other value reaches the function as the object that it is, as in torch: the function may read it, keep it and write to
it, like a value that it closes over.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jtbridge._compat import unwrap_compiled

from .signature import Fixed, flattened_arguments, parameters_of

_PLACEHOLDER = getattr(functools, "Placeholder", Fixed)  # from Python 3.14 on: marks the place of a call's argument


class PartialCall:
    """A ``functools.partial`` as a function of the values of all its arguments, some of which are :class:`Fixed`.

    Args:
        partial: the partial, which may wrap another partial. It is read again in each call, because its keywords can
            change.
        unwrapped: returns the torch function under a wrapped function, and other functions unchanged.
    """

    def __init__(self, partial: functools.partial, unwrapped: Callable[[Any], Any]):
        self._partial = partial
        self._unwrapped = unwrapped
        parameters = parameters_of(self.function)
        if parameters is not None:
            self.__signature__ = inspect.Signature(list(parameters.values()))

    @property
    def function(self) -> Callable[..., Any]:
        """Return the function whose arguments the partial fixes."""
        return self.parts()[0]

    def arguments(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of the function: those that the partial fixes, and those of the call.

        A fixed argument with JAX arrays stays as it is. Any other fixed argument is :class:`Fixed`.
        """
        _, fixed, keywords = self.parts()
        positional = [value if value is _PLACEHOLDER else _fixed(value) for value in fixed]
        named = {name: _fixed(value) for name, value in keywords.items()}
        return _filled_arguments(positional, args), {**named, **kwargs}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        function, fixed, keywords = self.parts()
        positional = (fixed[i] if isinstance(value, Fixed) else value for i, value in enumerate(args))
        named = {name: keywords[name] if isinstance(value, Fixed) else value for name, value in kwargs.items()}
        return function(*positional, **named)

    def objects_of_the_user(self) -> list[tuple[str, Any]]:
        """Return the partial, for a walk over the state that the function reaches."""
        return [("", self._partial)]

    def parts(self) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        """Return the function, and the positional and keyword arguments that are fixed now."""
        fn: Any = self._partial
        args: tuple[Any, ...] = ()
        keywords: dict[str, Any] = {}
        while isinstance(fn, functools.partial):
            args, keywords = _filled_arguments(fn.args, args), {**fn.keywords, **keywords}
            fn = self._unwrapped(fn.func)
        return unwrap_compiled(fn), args, keywords


def _fixed(value: Any) -> Any:
    """Return a value unchanged if it has JAX arrays, as an argument; wrap any other value in :class:`Fixed`."""
    leaves = flattened_arguments((value,), {})[2]
    return value if any(isinstance(leaf, jax.Array | jax.Ref) for leaf in leaves) else Fixed(value)


def _filled_arguments(fixed: Sequence[Any], args: Sequence[Any]) -> tuple[Any, ...]:
    """Return the fixed arguments, with arguments of `args` in place of the placeholders, then the rest of `args`."""
    rest = iter(args)
    first = [next(rest, value) if value is _PLACEHOLDER else value for value in fixed]
    return *first, *rest
