"""Fake tensors whose sizes may depend on data: unbacked symbolic sizes, as in torch.export.

Tried on torch 2.13. `ShapeEnv` has no public way to choose the value of a guard on a size that depends on data. It also
needs sympy, whose import takes 0.3 s, so both are imported when a function first needs them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ._torch import FakeTensorMode

# A function (type of the value, least value or None, greatest value or None) -> the value.
Answer = Callable[[type, int | None, int | None], Any]


def unbacked_fake_mode(answer: Answer, created: Callable[[], str]) -> FakeTensorMode:
    """Return a fake mode with symbols for the sizes and numbers that depend on data.

    Args:
        answer: called where Python needs the value of an expression in such symbols, as ``if x[mask].numel() > 2`` and
            ``range(int(n))`` do. The rest of the trace assumes the answer.
        created: called when a symbol is made; returns the place in the code, for messages (see :func:`known_size`).
    """
    environment = _answering_environment_class()(allow_dynamic_output_shape_ops=True, allow_scalar_outputs=True)
    environment.answer, environment.created = answer, created
    # Closed-over tensors have numbers as sizes, not symbols.
    return FakeTensorMode(shape_env=environment, allow_non_fake_inputs=True, static_shapes=True)


def known_size(mode: FakeTensorMode, size: Any) -> int | str:
    """Return a size as a number; if the size depends on data, the place in the code that made it."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    environment: Any = mode.shape_env
    expression = environment.simplify(size.node.expr)
    if expression.is_number:
        return int(expression)
    places = [environment.places.get(symbol, "") for symbol in sorted(expression.free_symbols, key=str)]
    return next(filter(None, places), "an unknown place")


@functools.cache
def _answering_environment_class() -> Any:
    import sympy
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv
    from torch.utils._sympy.value_ranges import bound_sympy

    class AnsweringShapeEnv(ShapeEnv):
        answer: Answer
        created: Callable[[], str]

        def __init__(self, **options: Any):
            super().__init__(**options)
            self.places: dict[Any, str] = {}  # by symbol
            self.answers: dict[Any, Any] = {}  # by expression

        def evaluate_expr(self, orig_expr: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return super().evaluate_expr(orig_expr, *args, **kwargs)
            except GuardOnDataDependentSymNode:
                if orig_expr not in self.answers:
                    self._ask(orig_expr)
                return self.answers[orig_expr]

        def _ask(self, expression: Any) -> None:
            if isinstance(expression, sympy.Rel | sympy.logic.boolalg.BooleanFunction):
                holds = self.answer(bool, None, None)
                self.answers[expression] = sympy.true if holds else sympy.false
                self.answers[sympy.Not(expression)] = sympy.false if holds else sympy.true
                self._assume(expression if holds else sympy.Not(expression))
            elif expression.is_integer:
                bounds = bound_sympy(expression, self.var_to_range)
                low, high = (int(x) if x.is_Integer else None for x in (bounds.lower, bounds.upper))
                self.answers[expression] = sympy.Integer(self.answer(int, low, high))
                self._assume(sympy.Eq(expression, self.answers[expression]))
            else:
                self.answers[expression] = sympy.Float(self.answer(float, None, None))

        def _assume(self, relation: Any) -> None:
            """Narrow the ranges of the symbols in an inequality, or replace the symbol in an equation by its value."""
            if isinstance(relation, sympy.Rel):
                self._maybe_guard_rel(relation)

        def create_unbacked_symint(self, *args: Any, **kwargs: Any) -> Any:
            size = super().create_unbacked_symint(*args, **kwargs)
            self.places[size.node.expr] = self.created()
            return size

    return AnsweringShapeEnv
