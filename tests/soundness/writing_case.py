"""A case that writes to state, and functions that build one from the kind of object that is written."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch


class Case:
    """A function that writes to state. `state()` returns the present state, as a value to compare."""

    def __init__(self, name: str, fn: Callable[..., Any], state: Callable[[], Any], written: str):
        self.name, self.fn, self.state, self.written = name, fn, state, written


def memory(make: Callable[[], Any], name: str) -> Callable[[], Case]:
    def case() -> Case:
        numbers = make()

        def f(x):
            numbers[0] += 1
            return x * numbers[0]

        return Case(name, f, lambda: numbers[0], "`numbers`")

    return case


def iterator(make: Callable[[], Iterator[Any]], name: str) -> Callable[[], Case]:
    def case() -> Case:
        numbers = make()

        def rest() -> Any:
            nonlocal numbers
            taken = [*itertools.islice(numbers, 2)]
            numbers = itertools.chain(taken, numbers)
            return taken

        return Case(name, lambda x: x * next(numbers), rest, "`numbers`")

    return case


def own_generator(make: Callable[[], Any], draw: Callable[[Any], float], name: str) -> Callable[[], Case]:
    def case() -> Case:
        source = make()
        state = (
            (lambda: source.getstate())
            if name == "random.Random"
            else (lambda: str(getattr(source, "bit_generator", source).state))
        )
        return Case(name, lambda x: x * draw(source), state, "`source`")

    return case


def array_of(length: int) -> Callable[[], Case]:
    """Return a function that writes to a tensor through NumPy: torch does not count the write."""

    def case() -> Case:
        numbers = torch.zeros(length)

        def f(x):
            numbers.numpy()[0] += 1
            return x * 2

        return Case(f"NumPy's array of {length} numbers", f, lambda: numbers[:3].tolist(), "`numbers`")

    return case


def sparse(make: Callable[[], Any], written: str) -> Callable[[], Case]:
    def case() -> Case:
        matrix = make()

        def f(x):
            matrix[0, 0] += 1
            return x * 2

        return Case(type(matrix).__name__, f, lambda: matrix.toarray().tolist(), written)

    return case
