"""Functions whose rows are independent, so that each device can call torch on its rows alone."""

from __future__ import annotations

import dataclasses

from jtbridge.core.array_types import ArrayType
from jtbridge.core.functions import TorchFunction, TracedFunction

from ._jvp import Jvp
from ._vjp import Vjp
from ._vmap import Vmap


@dataclasses.dataclass(frozen=True)
class RowAxes:
    """The axis of the rows in each input and in each result of a function.

    None stands for an input that all rows share, and for a result that is a sum over the rows, such as the gradient of
    such an input.
    """

    inputs: tuple[int | None, ...]
    results: tuple[int | None, ...]


def row_axes(fn: TorchFunction) -> RowAxes | None:
    """Return the axes of the rows of a function; None if its rows are not known to be independent.

    They are independent if the function was wrapped with ``batched=`` and draws no random numbers: the numbers of a row
    depend on its position.
    """
    if fn.base.seeded:
        return None
    if isinstance(fn, TracedFunction):
        if not fn.batched:
            return None
        inputs = tuple(0 if i in fn.batched else None for i in range(len(fn.in_types)))
        return RowAxes(inputs, (0,) * len(fn.out_types))
    if isinstance(fn, Vmap):
        return _of_vmap(fn)
    if isinstance(fn, Jvp | Vjp):
        inner = row_axes(fn.fn)
        if inner is None:
            return None
        chosen_inputs = tuple(inner.inputs[i] for i in fn.wrt)
        chosen_results = tuple(inner.results[o] for o in fn.outs)
        if isinstance(fn, Jvp):
            return RowAxes(inner.inputs + chosen_inputs, chosen_results)
        return RowAxes(inner.inputs + chosen_results, chosen_inputs)
    return None


def _of_vmap(fn: Vmap) -> RowAxes | None:
    inner = row_axes(fn.fn)
    if inner is None or any(dim not in (None, 0) for dim in fn.dims):
        return None
    inputs = tuple(
        None if axis is None else axis + (dim is not None) for axis, dim in zip(inner.inputs, fn.dims, strict=True)
    )
    results = tuple(None if axis is None else axis + (i not in fn.summed) for i, axis in enumerate(inner.results))
    return RowAxes(inputs, results)


def with_rows(fn: TorchFunction, count: int) -> TorchFunction:
    """Return the function for another number of rows."""
    if isinstance(fn, TracedFunction):
        types = [
            tuple(
                ArrayType((count, *type_.shape[1:]), type_.dtype) if axis == 0 else type_
                for type_, axis in zip(of, axes, strict=True)
            )
            for of, axes in ((fn.in_types, _axes(fn).inputs), (fn.out_types, _axes(fn).results))
        ]
        new = dataclasses.replace(fn, in_types=types[0], out_types=types[1], graph=None)
        for name in ("reads_graph", "once_differentiable", "differentiable_statistics"):
            setattr(new.cache, name, getattr(fn.cache, name))
        return new
    assert isinstance(fn, Vmap | Jvp | Vjp)
    new = dataclasses.replace(fn, fn=with_rows(fn.fn, count))
    for known in ("sequential", "double_reverse"):  # facts about the function, which hold for any number of rows
        if fn in getattr(fn.base.cache, known):
            getattr(new.base.cache, known).add(new)
    return new


def _axes(fn: TorchFunction) -> RowAxes:
    axes = row_axes(fn)
    assert axes is not None
    return axes
