"""Calls on several devices under plain ``jit``: each device calls torch on its rows of the batch.

XLA does not know what a call computes, so it gathers the inputs on every device, unless
`jax.experimental.custom_partitioning` says how the call may be divided: along the rows, with all other axes whole. A
result that is a sum over the rows is summed over the devices afterwards.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.core import ShapedArray
from jax.experimental.custom_partitioning import custom_partitioning
from jax.interpreters import mlir
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jtbridge._compat import add_host_callback, buffer_call_by_index, spans_devices
from jtbridge.core.functions import TorchFunction
from jtbridge.core.primitive_rules import primitive_of_several_results
from jtbridge.transforms import RowAxes, row_axes, with_rows

Callback = Callable[..., Any]

# The primitive that calls a host callback by its index in the enclosing program, which holds the callback. The program
# of one device, which `custom_partitioning` asks for, is lowered by itself and cannot hold callbacks.
_indexed_call_p = primitive_of_several_results("torch_indexed_call")


@_indexed_call_p.def_abstract_eval
def _(*_: Any, types: Any, index: int, gpu: bool) -> list[Any]:
    del index, gpu
    return [ShapedArray(type_.shape, type_.dtype) for type_ in types]


def _lower_indexed_call(ctx: mlir.LoweringRuleContext, *operands: Any, types: Any, index: int, gpu: bool) -> Any:
    del types
    return buffer_call_by_index(ctx, index, operands, gpu=gpu)


mlir.register_lowering(_indexed_call_p, _lower_indexed_call)


def lower_divided(
    ctx: mlir.LoweringRuleContext,
    fn: TorchFunction,
    operands: Sequence[Any],
    callback_of: Callable[[TorchFunction], Callback],
    *,
    gpu: bool,
) -> Sequence[Any] | None:
    """Emit a call that XLA may divide by rows; return None if it cannot be divided, or the program has one device.

    Args:
        ctx: the context of the lowering.
        fn: the function.
        operands: its inputs.
        callback_of: returns the function that XLA calls for a torch function.
        gpu: whether the program is for a GPU.
    """
    axes = row_axes(fn)
    if axes is None or not spans_devices(ctx) or all(axis is None for axis in axes.inputs):
        return None
    index = add_host_callback(ctx, _callback_by_rows(fn, axes, callback_of))

    def call(rows: int, *arrays: jax.Array) -> list[jax.Array]:
        types = tuple(with_rows(fn, rows).out_types)
        return _indexed_call_p.bind(*arrays, types=types, index=index, gpu=gpu)

    whole = custom_partitioning(functools.partial(call, _row_count(axes, fn.in_types)))
    rule, whole_factors = _sharding_rule(fn, axes)
    partition = functools.partial(_program_of_device, axes, call)
    whole.def_partition(partition=partition, sharding_rule=rule, need_replication_factors=whole_factors)
    return mlir.lower_fun(whole, multiple_results=True)(ctx, *operands)


def _callback_by_rows(fn: TorchFunction, axes: RowAxes, callback_of: Callable[[TorchFunction], Callback]) -> Callback:
    """Return the callback for any number of rows."""
    position, axis = next((i, axis) for i, axis in enumerate(axes.inputs) if axis is not None)
    known: dict[int, Callback] = {}

    def callback(context: Any, *buffers: Any) -> Any:
        rows = buffers[position].shape[axis]
        if rows not in known:
            known[rows] = callback_of(with_rows(fn, rows))
        return known[rows](context, *buffers)

    return callback


def _program_of_device(axes: RowAxes, call: Callable[..., Any], mesh: Mesh, arguments: Any, results: Any) -> Any:
    """Return the program of one device, and the shardings of its results and arguments."""
    del results
    batched = [(x, axis) for x, axis in zip(arguments, axes.inputs, strict=True) if axis is not None]
    over = next((x.sharding.spec[axis] for x, axis in batched if x.sharding.spec[axis] is not None), None)

    def local(*arrays: jax.Array) -> list[jax.Array]:
        found = call(_row_count(axes, arrays), *arrays)
        return [
            jax.lax.psum(x, over) if axis is None and over is not None else x
            for x, axis in zip(found, axes.results, strict=True)
        ]

    def sharding(axis: int | None) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, over))

    return mesh, local, list(map(sharding, axes.results)), tuple(map(sharding, axes.inputs))


def _row_count(axes: RowAxes, arrays: Sequence[Any]) -> int:
    return next(x.shape[axis] for x, axis in zip(arrays, axes.inputs, strict=True) if axis is not None)


def _sharding_rule(fn: TorchFunction, axes: RowAxes) -> tuple[str, tuple[str, ...]]:
    """Return the rule in the notation of `custom_partitioning`, and its factors that must be replicated."""
    whole: list[str] = []

    def term(kind: str, position: int, shape: Sequence[int], axis: int | None) -> str:
        names = [f"{kind}{position}_{i}" for i in range(len(shape))]
        whole.extend(name for i, name in enumerate(names) if i != axis)
        return " ".join("rows" if i == axis else name for i, name in enumerate(names))

    sides = [
        ", ".join(term(kind, i, type_.shape, axis) for i, (type_, axis) in enumerate(zip(types, of, strict=True)))
        for kind, types, of in (("x", fn.in_types, axes.inputs), ("y", fn.out_types, axes.results))
    ]
    return " -> ".join(sides), tuple(whole)
