"""Replacement of values, and restriction of functions to some inputs and outputs, by position."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any


def replaced(values: Iterable[Any], positions: Iterable[int], new: Iterable[Any]) -> list[Any]:
    """Return a copy of the list `values` that has ``new[i]`` at ``positions[i]``."""
    found = list(values)
    for position, value in zip(positions, new, strict=True):
        found[position] = value
    return found


def of_differentiated(
    fn: Callable[..., Sequence[Any]], wrt: Sequence[int], outs: Sequence[int], inputs: Sequence[Any]
) -> Callable[..., tuple[Any, ...]]:
    """Return the function from the inputs `wrt` of `fn` to its outputs `outs`, with the other inputs fixed."""

    def of_wrt(*differentiated: Any) -> tuple[Any, ...]:
        results = fn(*replaced(inputs, wrt, differentiated))
        return tuple(results[o] for o in outs)

    return of_wrt
