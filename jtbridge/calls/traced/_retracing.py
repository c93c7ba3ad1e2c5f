"""Warning for a function that is traced again for each new value of a Python number."""

from __future__ import annotations

from typing import Any

from jtbridge.core.messages import warn_user
from jtbridge.errors import RetracingWarning

_ENOUGH = 8  # signatures that differ in one number only


class NumberWatch:
    """Counter of the signatures of one function that differ only in the value of a single Python number."""

    def __init__(self) -> None:
        # The values of a number, by the signature without this number; None after the warning.
        self._seen: dict[Any, set[Any]] | None = {}

    def see(self, name: str, argument: Any, tree: Any, keys: tuple[Any, ...], types: Any, statics: tuple) -> None:
        """Record the signature of a trace, and warn once if too many signatures differ in one number only.

        Args:
            name: the name of the function.
            argument: returns the name of the argument at a position among the leaves.
            tree: the pytree of the arguments.
            keys: a hashable key of every leaf.
            types: the types of the arrays.
            statics: the leaves, with a marker in place of each array.
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
                self._warn(name, argument(position), value)
                return

    def _warn(self, name: str, argument: str, value: Any) -> None:
        warn_user(
            f"`{name}` was traced for {_ENOUGH} values of `{argument}`, a Python {type(value).__name__}: each new "
            f"value is a new trace and a new compiled program. Pass an array, `jnp.asarray({argument})`, which is "
            "traced once for all values. A number that decides about shapes or branches has to stay a Python number.",
            RetracingWarning,
        )
