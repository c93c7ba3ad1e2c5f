"""A forward that returns the residuals of its gradient too, and the gradient from these residuals."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.core
import jax.numpy as jnp

from jtbridge.core.dtypes import is_differentiable

from ._jax_function import JaxFunction, Types, _conj, in_own_memory, record, types_of


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where the residuals of a gradient are: each is an argument, a result, a constant, or an additional result."""

    tree: Any  # the structure of JAX's pullback
    sources: tuple[tuple[str, Any], ...]  # ("argument" or "result" or "residual", its position) or ("constant", array)
    outs: tuple[int, ...]  # the positions of the results with gradients
    result_types: Types

    @property
    def kept(self) -> list[tuple[str, int]]:
        """The residuals that are not constants."""
        return [(kind, place) for kind, place in self.sources if kind != "constant"]


class ForwardWithResiduals(JaxFunction):
    """A function with the residuals of its gradient as additional results.

    Args:
        base: the function.
        wrt: the positions of the arguments whose gradients are asked for.
    """

    def __init__(self, base: JaxFunction, wrt: tuple[int, ...]):
        self._layouts: dict[Types, Layout | None] = {}
        self._base = base
        self._wrt = wrt
        super().__init__(base.name, self._with_residuals, base.x64)

    def layout(self, types: Types) -> Layout | None:
        """Return the layout for arguments of some types. None: torch cannot hold the residuals, and there are none."""
        if types not in self._layouts:
            structs = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in types]
            with self._with_x64():
                jax.eval_shape(lambda *arrays: self._with_residuals(*arrays), *structs)
        return self._layouts[types]

    def pullback(self, types: Types, outs: tuple[int, ...]) -> JaxFunction:
        """Return the function ``(*kept residuals, *cotangents of outs) -> gradients``."""
        layout = self.layout(types)
        assert layout is not None
        return self._derive(("pullback", types, outs), lambda: _pullback(layout, outs))

    def _with_residuals(self, *arrays: Any) -> list[Any]:
        def of(*active: Any) -> tuple[tuple, list[Any]]:
            given = list(arrays)
            for i, value in zip(self._wrt, active, strict=True):
                given[i] = value
            results = self._base.function(*given)
            return tuple(x for x in results if is_differentiable(x.dtype)), results

        found, pull, results = jax.vjp(of, *[arrays[i] for i in self._wrt], has_aux=True)
        outs = tuple(i for i, x in enumerate(results) if is_differentiable(x.dtype))
        for i, value in zip(outs, found, strict=True):
            results[i] = value
        leaves, tree = jax.tree.flatten(pull)
        residuals: list[Any] = []
        sources = tuple(_source(leaf, arrays, results, residuals) for leaf in leaves)
        usable = all(jnp.issubdtype(x.dtype, jnp.number) or x.dtype == bool for x in residuals)
        layout = Layout(tree, sources, outs, types_of(results)) if usable else None
        record(self._layouts, types_of(arrays), layout)
        return [*results, *in_own_memory(residuals)] if usable else results


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
    count = len(layout.kept)

    def gradients(*arrays: Any) -> list[Any]:
        kept = iter(arrays[:count])
        leaves = [value if kind == "constant" else next(kept) for kind, value in layout.sources]
        given = dict(zip(outs, arrays[count:], strict=True))
        cotangents = tuple(_conj(given[i]) if i in given else jnp.zeros(*layout.result_types[i]) for i in layout.outs)
        return in_own_memory([_conj(x) for x in jax.tree.unflatten(layout.tree, leaves)(cotangents)])

    return gradients
