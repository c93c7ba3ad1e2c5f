"""Helpers for the rules of all primitives: symbolic zeros, positions of arguments, batch axes, names for messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad
from jax.sharding import NamedSharding, PartitionSpec

from jtbridge._compat import Primitive

from .array_types import ArrayType
from .functions import TorchFunction
from .positions import replaced


def primitive_of_several_results(name: str) -> Primitive:
    """Return a new primitive with several results."""
    primitive = Primitive(name)
    primitive.multiple_results = True
    return primitive


def describe(fn: TorchFunction) -> str:
    """Return a description of a function for messages: the name of the user's function, or "a derivative of" it."""
    return f"`{fn.base.name}`" if fn.order == 0 else f"a derivative of `{fn.base.name}`"


def zero_tangents(results: Sequence[Any]) -> list[Any]:
    """Return symbolic zeros as tangents of results (float0 for integers and bools)."""
    return [ad.Zero(jax.typeof(y).to_tangent_aval()) for y in results]


def tangents_by(
    differential: Callable[[tuple[int, ...], list[Any]], Sequence[Any]],
    fn: TorchFunction,
    results: Sequence[Any],
    tangents: Sequence[Any],
) -> list[Any]:
    """Return the tangents of all results: symbolic zeros for results that are neither float nor complex.

    Args:
        differential: returns the tangents of the other results. Its arguments are the positions of the inputs that have
            a tangent, and these tangents.
        fn: the function.
        results: its results.
        tangents: the tangents of its inputs, of which some are symbolic zeros.
    """
    out = zero_tangents(results)
    wrt = nonzero_inputs(fn.in_types, [type(t) is not ad.Zero for t in tangents])
    outs = differentiable(fn.out_types)
    if not wrt or not outs:
        return out
    derivatives = differential(wrt, [tangents[i] for i in wrt])
    return replaced(out, outs, list(map(sharded_like, derivatives, [jax.typeof(results[o]) for o in outs])))


def sharded_like(value: Any, aval: Any) -> Any:
    """Return an array with the sharding of `aval`. On a mesh with explicit axes, a type has a sharding."""
    wanted = aval.sharding
    return value if wanted.mesh.empty or jax.typeof(value).sharding == wanted else jax.sharding.reshard(value, wanted)


def with_sharded_rows(results: Sequence[Any], args: Sequence[Any], dims: Sequence[int | None]) -> list[Any]:
    """Return batched results whose batch axis, the first one, is sharded like the batch axis of an argument.

    On a mesh with explicit axes, JAX expects this sharding.
    """
    for arg, dim in zip(args, dims, strict=True):
        sharding = jax.typeof(arg).sharding
        if dim is not None and not sharding.mesh.empty and (axis := sharding.spec[dim]) is not None:
            mesh = sharding.mesh
            rows = [NamedSharding(mesh, PartitionSpec(axis, *[None] * (y.ndim - 1))) for y in results]
            return list(map(jax.sharding.reshard, results, rows))
    return list(results)


def nonzero_inputs(types: Sequence[ArrayType], nonzeros: Sequence[bool]) -> tuple[int, ...]:
    """Return the positions of the float and complex inputs whose tangent is not symbolically zero."""
    return tuple(i for i, (type_, nz) in enumerate(zip(types, nonzeros, strict=True)) if nz and type_.differentiable)


def differentiable(types: Sequence[ArrayType]) -> tuple[int, ...]:
    """Return the positions of the float and complex types."""
    return tuple(i for i, type_ in enumerate(types) if type_.differentiable)


def batch_size(args: Sequence[Any], dims: Sequence[int | None]) -> int:
    """Return the length of the batch axis."""
    return next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)


def batch_first(args: Sequence[Any], dims: Sequence[int | None]) -> tuple[list[Any], tuple[int | None, ...]]:
    """Return the arrays with their batch axes first, and the new batch axes.

    In torch, every row is then as contiguous as an argument without a batch axis.
    """
    moved = [x if not d else jnp.moveaxis(x, d, 0) for x, d in zip(args, dims, strict=True)]
    return moved, tuple(None if d is None else 0 for d in dims)


def to_front(x: Any, dim: int | None, size: int) -> Any:
    """Return the array with its batch axis first; an array without a batch axis is repeated along a new one."""
    if dim is None:
        return jnp.broadcast_to(x, (size, *jnp.shape(x)))
    return jnp.moveaxis(x, dim, 0) if dim else x
