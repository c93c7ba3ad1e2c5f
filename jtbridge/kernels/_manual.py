"""Primitives inside `shard_map`, where the type of a value names the mesh axes over which the value varies.

A result varies over every mesh axis that an argument varies over. Before a primitive is bound, each argument is made to
vary over all these axes. So the gradient of an argument that is the same on all shards is summed over the shards. A
primitive is lowered to the code of one shard, in which types and kernels have no mesh axes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jtbridge._compat import call_aval, unify_varying_axes


def bind(primitive: Primitive, /, *arrays: Any, **params: Any) -> Any:
    """Bind a primitive to arrays, after making each array vary over the mesh axes of all of them."""
    return primitive.bind(*unify_varying_axes(arrays), **params)


def as_varying(function: Callable[..., Sequence[Any]], arrays: Sequence[Any]) -> list[Any]:
    """Return the types of a function's results. They vary over the mesh axes over which its arguments vary."""
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
    return [call_aval(y.shape, y.dtype, arrays) for y in jax.eval_shape(function, *shapes)]


def lower_plainly(function: Callable[..., Sequence[Any]]) -> Callable[..., Any]:
    """Return a lowering rule that lowers a function of arrays, with types that name no mesh axes."""
    lower = mlir.lower_fun(function, multiple_results=True)

    def rule(ctx: mlir.LoweringRuleContext, *operands: Any, **params: Any) -> Any:
        return lower(
            ctx.replace(avals_in=_without_mesh_axes(ctx.avals_in), avals_out=_without_mesh_axes(ctx.avals_out)),
            *operands,
            **params,
        )

    return rule


def _without_mesh_axes(avals: Sequence[Any]) -> list[ShapedArray]:
    return [ShapedArray(x.shape, x.dtype) for x in avals]
