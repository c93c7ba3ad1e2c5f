"""A forward that also returns the residuals of its gradient, and the gradient from these residuals."""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core

from jtbridge.core.dtypes import has_torch_dtype
from jtbridge.core.positions import replaced
from jtbridge.core.signals import raise_if_from_signal

from ._jax_function import JaxFunction, Types, conj_if_complex, in_own_memory, inexact_positions, types_of


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """Where the residuals of a gradient are: each is an argument, a result, a constant, or an additional result.

    A layout belongs to one trace of the forward, so it is compared by identity.
    """

    function: JaxFunction  # the traced program, with the values that were closed over then
    result_types: Types
    tree: Any = None  # the structure of JAX's linear map from tangents to tangents; None without residuals
    sources: tuple[tuple[str, Any], ...] = ()  # ("argument", "result" or "residual", position) or ("constant", value)
    wrt: Types = ()  # the types of the arguments that the map takes tangents of
    outs: tuple[int, ...] = ()  # the positions of the results that it returns tangents of
    pullbacks: dict[tuple[int, ...], JaxFunction] = dataclasses.field(default_factory=dict)

    @property
    def kept(self) -> list[tuple[str, int]]:
        """The sources of the residuals that are not constants."""
        return [(kind, place) for kind, place in self.sources if kind != "constant"]

    def pullback(self, outs: tuple[int, ...]) -> JaxFunction:
        """Return the function ``(*kept residuals, *cotangents of outs) -> gradients``."""
        found = self.pullbacks.get(outs)
        if found is None:
            made = JaxFunction(self.function.name, _pullback(self, outs), self.function.x64)
            found = self.pullbacks.setdefault(outs, made)
        return found


class _ForwardTrace:
    """One trace of a forward. The object exists as long as JAX's program of this trace."""


@jax.tree_util.register_pytree_node_class
class _Traced:
    """A pytree node without leaves that holds a trace, so that each compiled program returns its own trace."""

    def __init__(self, trace: _ForwardTrace):
        self.trace = trace

    def tree_flatten(self) -> tuple[tuple[()], _ForwardTrace]:
        return (), self.trace

    @classmethod
    def tree_unflatten(cls, trace: _ForwardTrace, _: Any) -> _Traced:
        return cls(trace)


class _Last(threading.local):
    """The layout of the last run on this thread."""

    layout: Layout | None = None


class NoPullbackError(Exception):
    """JAX cannot derive a gradient of the function, so that there are no residuals."""


class ForwardWithResiduals(JaxFunction):
    """A function with the residuals of its gradient as additional results.

    Args:
        base: the function.
        wrt: the positions of the arguments whose gradients are needed. If it is empty, there are no residuals.

    Attributes:
        refused: the types of arguments for which JAX cannot derive a gradient.
    """

    def __init__(self, base: JaxFunction, wrt: tuple[int, ...]):
        self._base = base
        self._wrt = wrt
        self._last = _Last()
        # JAX's caches refer to the traces, and must not refer to the layouts, which refer to this function.
        self._layouts: weakref.WeakKeyDictionary[_ForwardTrace, Layout] = weakref.WeakKeyDictionary()
        self.refused: set[Types] = set()
        super().__init__(base.name, self._with_residuals, base.x64)

    def last_layout(self) -> Layout:
        """Return and forget the layout of the last run on this thread."""
        layout, self._last.layout = self._last.layout, None
        assert layout is not None
        return layout

    def _run_jitted(self, operands: Sequence[Any]) -> list[jax.Array]:
        # A layout describes a trace, so there must be one.
        with jax.disable_jit(False):
            returned: Any = super()._run_jitted(operands)
        results, traced = returned
        self._last.layout = self._layouts[traced.trace]
        return results

    def _with_residuals(self, *arrays: Any) -> Any:
        function = JaxFunction(self.name, self._base.traced_program(types_of(arrays)), self.x64)
        if not self._wrt:
            results = function.jitted(*arrays)
            return results, self._trace_of(Layout(function, types_of(results)))

        def of(*active: Any) -> tuple[tuple, list[Any]]:
            results = function.jitted(*replaced(arrays, self._wrt, active))
            return tuple(results[i] for i in inexact_positions(types_of(results))), results

        active = [arrays[i] for i in self._wrt]
        try:
            found, linear, results = jax.linearize(of, *active, has_aux=True)
        except Exception as error:
            raise_if_from_signal(error)
            raise NoPullbackError from error
        types = types_of(results)
        outs = inexact_positions(types)
        results = replaced(results, outs, found)
        leaves, tree = jax.tree.flatten(linear)
        residuals: list[Any] = []
        sources = tuple(_residual_source(leaf, arrays, results, residuals) for leaf in leaves)
        if not all(has_torch_dtype(x.dtype) for x in residuals):
            return results, self._trace_of(Layout(function, types))
        layout = Layout(function, types, tree, sources, types_of(active), outs)
        return [*results, *in_own_memory(residuals)], self._trace_of(layout)

    def _trace_of(self, layout: Layout) -> _Traced:
        trace = _ForwardTrace()
        self._layouts[trace] = layout
        return _Traced(trace)


def with_residuals(base: JaxFunction, wrt: tuple[int, ...]) -> ForwardWithResiduals:
    """Return the forward of a function with the residuals of its gradient by `wrt`."""
    return base.derive(("forward", wrt), lambda: ForwardWithResiduals(base, wrt))


def _residual_source(leaf: Any, arrays: Any, results: list[Any], residuals: list[Any]) -> tuple[str, Any]:
    if not isinstance(leaf, jax.core.Tracer):
        return "constant", leaf
    for kind, values in (("argument", arrays), ("result", results), ("residual", residuals)):
        for i, value in enumerate(values):
            if leaf is value:
                return kind, i
    residuals.append(leaf)
    return "residual", len(residuals) - 1


def _pullback(layout: Layout, outs: tuple[int, ...]) -> Callable[..., list[Any]]:
    """Return the transpose of the linear map, restricted to the results `outs`.

    The other results are left out, because cotangents of zeros for them would give NaN for infinite derivatives, and
    would run the rule of a ``jax.custom_vjp``.
    """
    # The function must not refer to the layout, which refers to it.
    tree, sources, count = layout.tree, layout.sources, len(layout.kept)
    tangents = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in layout.wrt]
    chosen = [layout.outs.index(out) for out in outs]

    def gradients(*arrays: Any) -> list[Any]:
        kept = iter(arrays[:count])
        linear = jax.tree.unflatten(tree, [value if kind == "constant" else next(kept) for kind, value in sources])

        def to_chosen(*given: Any) -> tuple[Any, ...]:
            results = linear(*given)
            return tuple(results[i] for i in chosen)

        pull = jax.linear_transpose(to_chosen, *tangents)
        return in_own_memory([conj_if_complex(x) for x in pull(tuple(map(conj_if_complex, arrays[count:])))])

    return gradients
