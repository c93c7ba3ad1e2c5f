"""Telling the user that a new Python number in every call costs a new trace in every call."""

from __future__ import annotations

import warnings
from typing import Any

from .errors import RetracingWarning

_ENOUGH = 8  # signatures that differ in a number alone


class NumberWatch:
    """Counts the signatures of one function that differ in the value of a single Python number."""

    def __init__(self) -> None:
        self._seen: dict[Any, set[Any]] | None = {}  # the rest of a signature -> the numbers seen; None once told

    def see(self, name: str, argument: Any, tree: Any, keys: tuple[Any, ...], types: Any, statics: tuple) -> None:
        """Take note of a signature that is traced, and warn once when there are too many.

        Args:
            name: of the function.
            argument: from a position among the leaves to the name of the argument there.
            tree: of the arguments.
            keys: a hashable key of every leaf.
            types: of the arrays.
            statics: the leaves that are no arrays.
        """
        if self._seen is None:
            return
        for position, value in enumerate(statics):
            if type(value) not in (int, float, complex):
                continue
            rest = (position, type(value), tree, types, keys[:position], keys[position + 1 :])
            numbers = self._seen.setdefault(rest, set())
            numbers.add(repr(value))
            if len(numbers) >= _ENOUGH:
                self._seen = None
                self._tell(name, argument(position), value)
                return

    def _tell(self, name: str, argument: str, value: Any) -> None:
        warnings.warn(
            f"`{name}` was traced for {_ENOUGH} values of `{argument}`, a Python {type(value).__name__}: each new "
            f"value is a new trace and a new compiled program. Pass an array, `jnp.asarray({argument})`, which is "
            "traced once for all values. A number that decides about shapes or branches has to stay a Python number.",
            RetracingWarning,
            stacklevel=2,
        )
