"""The operators of random programs.

Each is a function of a :class:`~tests.fuzz.programs.Writer` that writes one statement, or raises `NoChoice`. Torch
itself decides whether a statement is valid: one that torch refuses is dropped, so an operator may try anything.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.fuzz.programs import Writer

from . import binary, indexing, linalg, mixed, statements, unary, writes

# An operator and its weight. The order and the weights determine the program of each number: do not change them.
_TABLE: list[tuple[Callable[[Writer], None], float]] = [
    (unary.unary, 30),
    (binary.binary, 18),
    (mixed.mixed, 12),
    (mixed.of_complex, 6),
    (linalg.linear_algebra, 5),
    (linalg.square_matrix, 4),
    (linalg.of_square_matrix, 4),
    (writes.in_place, 16),
    (writes.in_place_of_others, 3),
    (writes.view_then_write, 4),
    (statements.gradient_inside, 4),
    (statements.without_recording, 2),
    (statements.python, 4),
    (indexing.indexed, 4),
    (statements.several, 3),
]
OPERATORS = [operator for operator, _ in _TABLE]
WEIGHTS = [weight for _, weight in _TABLE]
