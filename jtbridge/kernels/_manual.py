"""Primitives inside `shard_map`, where types say over which mesh axes values vary.

A result varies over the axes that an argument varies over, and every argument is made to vary over all of them first:
the gradient of one that did not is then summed over the shards. What a primitive is lowered to is code of one shard,
and has no such types, nor the kernels in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jtbridge._compat import call_aval, unify_varying_axes


def bind(primitive: Primitive, *arrays: Any, **params: Any) -> Any:
    """As the method of a primitive, with arguments that all vary over the same axes."""
    return primitive.bind(*unify_varying_axes(arrays), **params)


def as_varying(function: Callable[..., Sequence[Any]], arrays: Sequence[Any]) -> list[Any]:
    """The types of a function's results, of arguments that were bound."""
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
    return [call_aval(y.shape, y.dtype, arrays) for y in jax.eval_shape(function, *shapes)]


def lower_plainly(function: Callable[..., Sequence[Any]]) -> Callable[..., Any]:
    """A lowering rule that is what a function of arrays is lowered to."""
    lower = mlir.lower_fun(function, multiple_results=True)

    def rule(ctx: mlir.LoweringRuleContext, *operands: Any, **params: Any) -> Any:
        return lower(ctx.replace(avals_in=_plain(ctx.avals_in), avals_out=_plain(ctx.avals_out)), *operands, **params)

    return rule


def _plain(avals: Sequence[Any]) -> list[ShapedArray]:
    return [ShapedArray(x.shape, x.dtype) for x in avals]
