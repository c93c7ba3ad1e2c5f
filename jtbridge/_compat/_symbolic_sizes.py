"""Fake tensors with symbolic sizes, and the assumptions of a trace about these sizes.

Tried on torch 2.13. torch.export makes such tensors for whole modules only, and cannot return the graph of a function
after autograd. Symbolic sizes need sympy, whose import takes 0.3 s, so it is imported when a function first has them.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jax.core import max_dim, min_dim

from ._jax import InconclusiveDimensionOperation
from ._torch import FakeTensorMode

_MIN_SIZE = 2  # torch assumes that no symbol is 0 or 1
_MAX_SIZE = 2**62


def symbolic_tensors(
    shapes: Sequence[Sequence[tuple[int, bool]]], dtypes: Sequence[torch.dtype]
) -> tuple[list[torch.Tensor], Any]:
    """Return fake tensors with symbolic sizes, and the environment that collects the assumptions about the symbols.

    Each size is a pair: an example value, and whether the size is a symbol. Sizes with the same example share a symbol.

    Torch does not see the example values. Where it has an algorithm that is right for all sizes, as for a convolution,
    it uses this algorithm and does not choose one by the batch size. Where code compares sizes, as in
    ``if x.shape[0] > 3``, the trace assumes the answer for the example values.
    """
    environment = _example_environment_class()()
    mode = FakeTensorMode(shape_env=environment, allow_non_fake_inputs=True)
    symbols: dict[int, Any] = {}

    def symbol(example: int) -> Any:
        if example not in symbols:
            symbols[example] = environment.create_unbacked_symint()
            environment.constrain_symbol_range(symbols[example].node.expr, _MIN_SIZE, _MAX_SIZE)
            environment.examples[symbols[example].node.expr] = example
        return symbols[example]

    tensors = []
    for shape, dtype in zip(shapes, dtypes, strict=True):
        with environment.ignore_fresh_unbacked_symbols(), mode:
            sizes = [symbol(size) if symbolic else size for size, symbolic in shape]
            tensors.append(torch.empty(sizes, dtype=dtype))
    return tensors, environment


@functools.cache
def _example_environment_class() -> Any:
    import sympy
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv

    class ExampleShapeEnv(ShapeEnv):
        def __init__(self) -> None:
            super().__init__()
            self.examples: dict[Any, int] = {}  # by symbol
            self.assumed: list[Any] = []  # relations, and expressions with a truth value

        def evaluate_expr(self, orig_expr: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return super().evaluate_expr(orig_expr, *args, **kwargs)
            except GuardOnDataDependentSymNode:
                value = orig_expr.subs(self.examples)
                if not (value.is_number or value in (sympy.true, sympy.false)):
                    raise
                if value == sympy.true:
                    self.assumed.append(orig_expr)
                else:
                    self.assumed.append(
                        sympy.Not(orig_expr) if value == sympy.false else sympy.Eq(orig_expr, value, evaluate=False)
                    )
                return value

    return ExampleShapeEnv


def kernels_of_symbolic_sizes() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which operators run their Python kernels, which take symbols. C++ kernels take numbers."""
    from torch._dispatch.python import enable_python_dispatcher

    return enable_python_dispatcher()


def symbolic_shapes(value: Any, symbols: Mapping[Any, Any]) -> list[tuple[Any, ...] | None]:
    """Return the shapes of fake tensors in JAX's symbols. `symbols` maps JAX's symbols to torch's.

    Torch has no public access to the sympy expression of a size.
    """
    tensors = value if isinstance(value, list | tuple) else [value]
    return [
        tuple(in_symbols(size.node.expr, symbols) if isinstance(size, torch.SymInt) else size for size in t.shape)
        if isinstance(t, torch.Tensor)
        else None
        for t in tensors
    ]


def in_symbols(expression: Any, symbols: Mapping[Any, Any]) -> Any:
    """Translate an expression of torch's symbols to one of JAX's symbols."""
    import sympy

    atoms = {size.node.expr: symbol for symbol, size in symbols.items()}
    return sympy.lambdify(list(atoms), expression, modules=[_FUNCTIONS])(*atoms.values())


_FUNCTIONS = {
    "FloorDiv": operator.floordiv,
    "PythonMod": operator.mod,
    "Mod": operator.mod,
    "min": lambda *sizes: functools.reduce(min_dim, sizes),
    "max": lambda *sizes: functools.reduce(max_dim, sizes),
}


def broken_assumption(environment: Any, symbols: Mapping[Any, Any]) -> tuple[str, str | None] | None:
    """Return an assumption of a trace that does not hold for all sizes, and a constraint that implies it.

    Torch has no public access to guards. An assumption is accepted if it holds for a sample of the sizes of 2 or
    more that the constraints allow, or if the constraints imply it.

    Args:
        environment: the environment of the trace.
        symbols: torch's symbol for each symbol of JAX. The symbols of JAX may have constraints.

    Returns:
        The assumption and the constraint as texts, or None if every assumption holds. The constraint is None if no
        bound of a single symbol implies the assumption.
    """
    import sympy

    named: dict[Any, Any] = {}
    for symbol, size in symbols.items():
        known = environment.simplify(size.node.expr)
        if not known.is_Symbol or known in named:
            return f"{symbol} == {named.get(known, known)}", None
        named[known] = symbol
    names = {expression: sympy.Symbol(str(symbol)) for expression, symbol in named.items()}
    deferred = [check.expr for checks in environment.deferred_runtime_asserts.values() for check in checks]
    for all_assumed in [*(guard.expr for guard in environment.guards), *environment.assumed, *deferred]:
        for assumed in sympy.And.make_args(all_assumed):
            if _holds(assumed, named) or _is_implied(assumed, symbols):
                continue
            assumed = assumed.subs(names)
            is_relation = isinstance(assumed, sympy.Rel)
            text = f"{assumed.lhs} {assumed.rel_op} {assumed.rhs}" if is_relation else str(assumed)  # type: ignore[attr-defined]
            return text, _constraint(assumed) if assumed.free_symbols <= {*names.values()} else None
    return None


_SPREAD = (2, 3, 4, 5, 7, 8, 16, 31, 100, 1024, 4097)


def _holds(assumed: Any, named: Mapping[Any, Any]) -> bool:
    """Return whether an assumption holds for a sample of sizes. `named` has JAX's symbol for each symbol of torch."""
    free = sorted(assumed.free_symbols, key=str)
    spread = [[n for n in _SPREAD if s not in named or may_equal(named[s], n)] for s in free]
    if not all(spread):
        return False
    for step in range(64):
        values = {s: sizes[step * (i + 1) % len(sizes)] for i, (s, sizes) in enumerate(zip(free, spread, strict=True))}
        if assumed.subs(values) != True:  # noqa: E712  (a sympy relation)
            return False
    return True


def _constraint(assumed: Any) -> str | None:
    """Return a bound of a symbol, as a text, that implies an assumption; None if there is none.

    The bound is exact for sizes up to some thousands. There is none for an assumption about several symbols.
    """
    if len(assumed.free_symbols) != 1:
        return None
    (symbol,) = assumed.free_symbols
    sizes = range(_MIN_SIZE, _SPREAD[-1] + 1)
    holds = [n for n in sizes if assumed.subs(symbol, n) == True]  # noqa: E712  (a sympy relation)
    if not holds or len(holds) != holds[-1] - holds[0] + 1:
        return None
    if holds[-1] == sizes[-1]:
        return f"{symbol} >= {holds[0]}"
    return f"{symbol} <= {holds[-1]}" if holds[0] == sizes[0] else None


def may_equal(symbol: Any, number: int) -> bool:
    """Return whether a symbol of JAX may have a value: false if its constraints exclude the value."""
    for compare in (operator.lt, operator.gt):
        try:
            if compare(symbol, number):
                return False
        except InconclusiveDimensionOperation:
            continue
    return True


def _is_implied(relation: Any, symbols: Mapping[Any, Any]) -> bool:
    """Return whether a relation follows from the constraints of JAX's symbols."""
    import sympy

    known = {size.node.expr for size in symbols.values()}
    if not isinstance(relation, sympy.Rel) or not relation.free_symbols <= known:  # torch 2.11 makes symbols for slices
        return False
    left, right = (in_symbols(side, symbols) for side in (relation.lhs, relation.rhs))
    try:
        match relation:
            case sympy.Ge():
                return bool(left >= right)
            case sympy.Gt():
                return bool(left > right)
            case sympy.Le():
                return bool(left <= right)
            case sympy.Lt():
                return bool(left < right)
            case sympy.Ne():
                return bool(left > right) or bool(left < right)
    except InconclusiveDimensionOperation:
        return False
    return bool(left == right)
