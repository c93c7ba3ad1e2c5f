"""A forward that returns the residuals of its gradient too, and the gradient from these residuals."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp

from jtbridge.core.dtypes import has_torch_dtype, is_differentiable
from jtbridge.core.positions import replaced

from ._jax_function import JaxFunction, Types, _conj, in_own_memory, types_of


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """Where the residuals of a gradient are: each is an argument, a result, a constant, or an additional result.

    A layout belongs to one trace of the forward, so it is compared by identity.
    """

    tree: Any  # the structure of JAX's pullback
    sources: tuple[tuple[str, Any], ...]  # ("argument" or "result" or "residual", its position) or ("constant", array)
    outs: tuple[int, ...]  # the positions of the results with gradients
    result_types: Types
    pullbacks: dict[tuple[int, ...], JaxFunction] = dataclasses.field(default_factory=dict)

    @property
    def kept(self) -> list[tuple[str, int]]:
        """The residuals that are not constants."""
        return [(kind, place) for kind, place in self.sources if kind != "constant"]


@jax.tree_util.register_pytree_node_class
class _Static:
    """A pytree node without leaves that holds a number: a compiled program returns the number of its own trace."""

    def __init__(self, number: int):
        self.number = number

    def tree_flatten(self) -> tuple[tuple[()], int]:
        return (), self.number

    @classmethod
    def tree_unflatten(cls, number: int, _: Any) -> _Static:
        return cls(number)


_LOCK = threading.Lock()


class _Last(threading.local):
    """The layout of the last run on this thread."""

    layout: Layout | None = None


class ForwardWithResiduals(JaxFunction):
    """A function with the residuals of its gradient as additional results.

    Args:
        base: the function.
        wrt: the positions of the arguments whose gradients are asked for.
    """

    def __init__(self, base: JaxFunction, wrt: tuple[int, ...]):
        self._base = base
        self._wrt = wrt
        self._last = _Last()
        self._layouts: list[Layout | None] = []  # one for each trace; JAX's caches must not refer to them
        super().__init__(base.name, self._with_residuals, base.x64)

    def last_layout(self) -> Layout | None:
        """Return the layout of the last run on this thread. None: torch cannot hold the residuals; there are none."""
        layout, self._last.layout = self._last.layout, None
        return layout

    def pullback(self, layout: Layout, outs: tuple[int, ...]) -> JaxFunction:
        """Return the function ``(*kept residuals, *cotangents of outs) -> gradients``."""
        found = layout.pullbacks.get(outs)
        if found is None:
            made = JaxFunction(self.name, _pullback(layout, outs), self.x64)
            found = layout.pullbacks.setdefault(outs, made)
        return found

    def _run_jitted(self, operands: Sequence[Any]) -> list[jax.Array]:
        # A layout describes a trace, so there must be one.
        with jax.disable_jit(False):
            returned: Any = super()._run_jitted(operands)
        results, trace = returned
        self._last.layout = self._layouts[trace.number]
        return results

    def _with_residuals(self, *arrays: Any) -> Any:
        def of(*active: Any) -> tuple[tuple, list[Any]]:
            results = self._base.jitted(*replaced(arrays, self._wrt, active))
            return tuple(x for x in results if is_differentiable(x.dtype)), results

        found, pull, results = jax.vjp(of, *[arrays[i] for i in self._wrt], has_aux=True)
        outs = tuple(i for i, x in enumerate(results) if is_differentiable(x.dtype))
        results = replaced(results, outs, found)
        leaves, tree = jax.tree.flatten(pull)
        residuals: list[Any] = []
        sources = tuple(_source(leaf, arrays, results, residuals) for leaf in leaves)
        if not all(has_torch_dtype(x.dtype) for x in residuals):
            return results, self._trace_of(None)
        layout = Layout(tree, sources, outs, types_of(results))
        return [*results, *in_own_memory(residuals)], self._trace_of(layout)

    def _trace_of(self, layout: Layout | None) -> _Static:
        with _LOCK:
            self._layouts.append(layout)
            return _Static(len(self._layouts) - 1)


def with_residuals(base: JaxFunction, wrt: tuple[int, ...]) -> ForwardWithResiduals:
    """Return the forward of a function with the residuals of its gradient by `wrt`."""
    return base.derive(("forward", wrt), lambda: ForwardWithResiduals(base, wrt))


def _source(leaf: Any, arrays: Any, results: list[Any], residuals: list[Any]) -> tuple[str, Any]:
    if not isinstance(leaf, jax.core.Tracer):
        return "constant", leaf
    for kind, values in (("argument", arrays), ("result", results), ("residual", residuals)):
        for i, value in enumerate(values):
            if leaf is value:
                return kind, i
    residuals.append(leaf)
    return "residual", len(residuals) - 1


def _pullback(layout: Layout, outs: tuple[int, ...]) -> Any:
    # The function must not refer to the layout, which refers to it.
    tree, sources, differentiable, types = layout.tree, layout.sources, layout.outs, layout.result_types
    count = len(layout.kept)

    def gradients(*arrays: Any) -> list[Any]:
        kept = iter(arrays[:count])
        leaves = [value if kind == "constant" else next(kept) for kind, value in sources]
        given = dict(zip(outs, arrays[count:], strict=True))
        cotangents = tuple(_conj(given[i]) if i in given else jnp.zeros(*types[i]) for i in differentiable)
        return in_own_memory([_conj(x) for x in jax.tree.unflatten(tree, leaves)(cotangents)])

    return gradients
