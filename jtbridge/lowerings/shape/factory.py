"""New tensors from sizes and numbers, and triangles of matrices."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from torch import fx

from jtbridge.errors import TranslationError
from jtbridge.lowerings._common import out_dtype, out_shape
from jtbridge.lowerings._registry import register_lowering


def _filled_result(value: Any, node: fx.Node) -> jax.Array:
    """Return an array of the node's shape and dtype filled with `value`; numbers wrap and truncate as in torch."""
    dtype = out_dtype(node)
    number = value.astype(dtype) if isinstance(value, jax.Array) else np.asarray(value).astype(dtype)
    return jnp.full(out_shape(node), number, dtype)


@register_lowering(
    "zeros", "zeros_like", "new_zeros", "_efficientzerotensor", "_new_zeros_with_same_feature_meta",
    "empty.memory_format", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided",
    node=True,
)  # fmt: skip
def _zeros(*args: Any, node: fx.Node, **kwargs: Any) -> jax.Array:
    del args, kwargs
    return _filled_result(0, node)


@register_lowering("ones", "ones_like", "new_ones", node=True)
def _ones(*args: Any, node: fx.Node, **kwargs: Any) -> jax.Array:
    del args, kwargs
    return _filled_result(1, node)


@register_lowering("full", "full_like", "new_full", node=True)
def _full(*args: Any, node: fx.Node, **kwargs: Any) -> jax.Array:
    given = [*args, *([kwargs["fill_value"]] if "fill_value" in kwargs else [])]
    return _filled_result(given[-1], node)


@register_lowering("scalar_tensor", node=True)
def _scalar_tensor(s: Any, *, node: fx.Node, **kwargs: Any) -> jax.Array:
    del kwargs
    return _filled_result(s, node)


@register_lowering("arange", node=True)
def _arange(end: Any, *, node: fx.Node, **kwargs: Any) -> jax.Array:
    del kwargs
    return _steps(0, 1, node)


@register_lowering("arange.start", "arange.start_step", node=True)
def _arange_from(start: Any, end: Any, step: Any = 1, *, node: fx.Node, **kwargs: Any) -> jax.Array:
    del end, kwargs
    return _steps(start, step, node)


def _steps(start: Any, step: Any, node: fx.Node) -> jax.Array:
    dtype = out_dtype(node)
    if isinstance(start, jax.Array) or isinstance(step, jax.Array):
        raise TranslationError("the numbers of `arange` must be Python numbers, because its size depends on them")
    # torch computes float ranges in double precision, and truncates the start and step of integer ranges.
    counting = np.dtype(np.float64) if jnp.issubdtype(dtype, np.floating) else np.dtype(np.int64)
    index = jax.lax.iota(counting, out_shape(node)[0])
    whole = int if counting == np.int64 else float
    return (counting.type(whole(start)) + index * counting.type(whole(step))).astype(dtype)


@register_lowering("linspace", "linspace.Tensor_Tensor", "linspace.Tensor_Scalar", "linspace.Scalar_Tensor", node=True)
def _linspace(start: Any, end: Any, steps: int, *, node: fx.Node, **kwargs: Any) -> jax.Array:
    del kwargs
    return _linspace_in_double(start, end, steps, out_dtype(node)).astype(out_dtype(node))


@register_lowering("logspace", "logspace.Tensor_Tensor", "logspace.Tensor_Scalar", "logspace.Scalar_Tensor", node=True)
def _logspace(start: Any, end: Any, steps: int, base: float = 10.0, *, node: fx.Node, **kwargs: Any) -> jax.Array:
    del kwargs
    dtype = out_dtype(node)
    exponents = _linspace_in_double(start, end, steps, dtype)
    return jnp.power(jnp.asarray(base, exponents.dtype), exponents).astype(dtype)


def _linspace_in_double(start: Any, end: Any, steps: int, dtype: np.dtype) -> jax.Array:
    """Return evenly spaced numbers in double precision, counted from the nearer end so that both ends are exact."""
    wide = np.dtype(np.complex128 if jnp.issubdtype(dtype, np.complexfloating) else np.float64)
    first, last = (_scalar_in_dtype(x, dtype).astype(wide) for x in (start, end))
    index = jax.lax.iota(np.int64, steps)
    if steps == 1:
        return first.reshape(1)
    gap = (last - first) / max(steps - 1, 1)
    return jnp.where(index < steps // 2, first + gap * index, last - gap * (steps - 1 - index))


def _scalar_in_dtype(value: Any, dtype: np.dtype) -> jax.Array:
    return value.astype(dtype) if isinstance(value, jax.Array) else jnp.asarray(np.asarray(value).astype(dtype))


@register_lowering("eye", "eye.m", node=True)
def _eye(n: int, m: int | None = None, *, node: fx.Node, **kwargs: Any) -> jax.Array:
    del kwargs
    return jnp.eye(n, n if m is None else m, dtype=out_dtype(node))


@register_lowering("tril")
def _tril(x: jax.Array, diagonal: int = 0) -> jax.Array:
    return jnp.where(_below(x.shape[-2], x.shape[-1], diagonal), x, jnp.zeros((), x.dtype))


@register_lowering("triu")
def _triu(x: jax.Array, diagonal: int = 0) -> jax.Array:
    return jnp.where(_below(x.shape[-2], x.shape[-1], diagonal - 1), jnp.zeros((), x.dtype), x)


@register_lowering("tril_indices", node=True)
def _tril_indices(row: int, col: int, offset: int = 0, *, node: fx.Node, **kwargs: Any) -> jax.Array:
    del kwargs
    return _nonzero_positions(_below(row, col, offset), node)


@register_lowering("triu_indices", node=True)
def _triu_indices(row: int, col: int, offset: int = 0, *, node: fx.Node, **kwargs: Any) -> jax.Array:
    del kwargs
    return _nonzero_positions(~_below(row, col, offset - 1), node)


def _below(rows: int, columns: int, diagonal: int) -> jax.Array:
    """Return a mask of the elements of a matrix that are on or below a diagonal."""
    shape = (rows, columns)
    row, column = jax.lax.broadcasted_iota(np.int64, shape, 0), jax.lax.broadcasted_iota(np.int64, shape, 1)
    return column - row <= diagonal


def _nonzero_positions(mask: jax.Array, node: fx.Node) -> jax.Array:
    found = jnp.nonzero(mask, size=out_shape(node)[1])
    return jnp.stack(found).astype(out_dtype(node))
