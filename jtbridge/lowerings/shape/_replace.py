"""Replacement of a slice of an array by values that may be computed from the array itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.interpreters import batching, mlir

from jtbridge._compat import Primitive, is_exported
from jtbridge.lowerings._row_major import constrain_to_row_major

_replace_p = Primitive("jtbridge_replace")


def replace_slice(x: jax.Array, part: jax.Array, first: int, axis: int) -> jax.Array:
    """Return `x` with `part` in place of its slice along `axis` from `first` on.

    XLA may write into the memory of `x` while it still computes the part from it: for ``x[1:] = x[:-1]``, it then
    copies the first row everywhere (jax 0.10.2, CPU, if `x` is the reshape of a result). So the part is computed
    completely before it is written, or the result is concatenated from three arrays.
    """
    return _replace_p.bind(x, part, first=first, axis=axis)


def _updated(x: jax.Array, part: jax.Array, first: int, axis: int) -> jax.Array:
    return lax.dynamic_update_slice_in_dim(x, part, first, axis)


def _updated_by_whole_part(x: jax.Array, part: jax.Array, first: int, axis: int) -> jax.Array:
    return _updated(x, constrain_to_row_major(part), first, axis)


def _concatenated(x: jax.Array, part: jax.Array, first: int, axis: int) -> jax.Array:
    before = lax.slice_in_dim(x, 0, first, axis=axis)
    after = lax.slice_in_dim(x, first + part.shape[axis], None, axis=axis)
    return lax.concatenate([before, part, after], axis)


def _lower(ctx: mlir.LoweringRuleContext, *args: Any, **params: Any) -> Any:
    on_cpu = _concatenated if is_exported(ctx) else _updated_by_whole_part
    return mlir.lower_fun(on_cpu, multiple_results=False)(ctx, *args, **params)


def _batch(args: Sequence[Any], dims: Sequence[Any], *, first: int, axis: int) -> tuple[jax.Array, int]:
    size = next(a.shape[d] for a, d in zip(args, dims, strict=True) if d is not None)
    x, part = (batching.bdim_at_front(a, d, size) for a, d in zip(args, dims, strict=True))
    return replace_slice(x, part, first, axis + 1), 0


_replace_p.def_impl(_updated)
_replace_p.def_abstract_eval(lambda x, part, **params: x)
mlir.register_lowering(_replace_p, mlir.lower_fun(_concatenated, multiple_results=False))
mlir.register_lowering(_replace_p, _lower, platform="cpu")
batching.primitive_batchers[_replace_p] = _batch
