"""Sums, products, means, variances, norms, counts and logical tests over dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from torch import fx

from jtbridge.lowerings._common import axes_of, convert, opmath, out_dtype, size_along, size_of
from jtbridge.lowerings._norm import norm_over
from jtbridge.lowerings._registry import register_lowering

Dims = Sequence[int] | int | None


@register_lowering("sum", "sum.dim_IntList", node=True)
def _sum(x: jax.Array, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None, node: fx.Node) -> jax.Array:
    del dtype
    result = out_dtype(node)
    return sum_over(convert(x, result), axes_of(dim, x.ndim), keepdim)


def sum_over(x: jax.Array, axes: tuple[int, ...], keepdim: bool = False) -> jax.Array:
    """Return the sum over `axes` in the dtype of `x`. Half precision is summed in float32; bools give a logical or."""
    if x.dtype == bool:
        return jnp.any(x, axis=axes, keepdims=keepdim)
    return jnp.sum(x, axis=axes, keepdims=keepdim, dtype=opmath(x.dtype)).astype(x.dtype)


@register_lowering("nansum", node=True)
def _nansum(x: jax.Array, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None, node: fx.Node) -> jax.Array:
    del dtype
    result = out_dtype(node)
    if jnp.issubdtype(x.dtype, np.inexact):
        # For a sum of integers, torch replaces infinities too.
        x = jnp.nan_to_num(x) if result.kind in "iu" else jnp.where(jnp.isnan(x), jnp.zeros((), x.dtype), x)
    return sum_over(convert(x, result), axes_of(dim, x.ndim), keepdim)


@register_lowering("mean", "mean.dim", node=True)
def _mean(x: jax.Array, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None, node: fx.Node) -> jax.Array:
    del dtype
    result = out_dtype(node)
    return mean_over(x.astype(opmath(result)), axes_of(dim, x.ndim), keepdim).astype(result)


def mean_over(x: jax.Array, axes: tuple[int, ...], keepdim: bool) -> jax.Array:
    """Return the mean over `axes` in the dtype of `x`; NaN if there are no elements."""
    total = jnp.sum(x, axis=axes, keepdims=keepdim, dtype=x.dtype)
    return total / jnp.asarray(size_along(x, axes), x.dtype)


@register_lowering("prod", "prod.dim_int", node=True)
def _prod(x: jax.Array, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None, node: fx.Node) -> jax.Array:
    del dtype
    result, axes = out_dtype(node), axes_of(dim, x.ndim)
    x = convert(x, result)
    if result == np.bool_:
        return jnp.all(x, axis=axes, keepdims=keepdim)
    return jnp.prod(x, axis=axes, keepdims=keepdim, dtype=opmath(result)).astype(result)


@register_lowering("any", "any.dim", "_is_any_true", node=True)
def _any(x: jax.Array, dim: Dims = None, keepdim: bool = False, *, node: fx.Node) -> jax.Array:
    return jnp.any(x != 0, axis=axes_of(dim, x.ndim), keepdims=keepdim).astype(out_dtype(node))


@register_lowering("all", "all.dim", "_is_all_true", node=True)
def _all(x: jax.Array, dim: Dims = None, keepdim: bool = False, *, node: fx.Node) -> jax.Array:
    return jnp.all(x != 0, axis=axes_of(dim, x.ndim), keepdims=keepdim).astype(out_dtype(node))


@register_lowering("any.dims", node=True)
def _any_dims(x: jax.Array, dim: Dims = None, keepdim: bool = False, *, node: fx.Node) -> jax.Array:
    return jnp.any(x != 0, axis=_listed_axes(dim, x.ndim), keepdims=keepdim).astype(out_dtype(node))


@register_lowering("all.dims", node=True)
def _all_dims(x: jax.Array, dim: Dims = None, keepdim: bool = False, *, node: fx.Node) -> jax.Array:
    return jnp.all(x != 0, axis=_listed_axes(dim, x.ndim), keepdims=keepdim).astype(out_dtype(node))


def _listed_axes(dim: Dims, ndim: int) -> tuple[int, ...]:
    # For `any.dims` and `all.dims`, an empty list means no dimension; for other reductions, it means all dimensions.
    return () if dim is not None and not isinstance(dim, int) and len(dim) == 0 else axes_of(dim, ndim)


@register_lowering("count_nonzero", "count_nonzero.dim_IntList")
def _count_nonzero(x: jax.Array, dim: Dims = None) -> jax.Array:
    return jnp.sum(x != 0, axis=axes_of(dim, x.ndim), dtype=np.int64)


@register_lowering("trace", node=True)
def _matrix_trace(x: jax.Array, *, node: fx.Node) -> jax.Array:
    return sum_over(jnp.diagonal(x).astype(out_dtype(node)), (0,))


@register_lowering("logsumexp", node=True)
def _logsumexp(x: jax.Array, dim: Dims, keepdim: bool = False, *, node: fx.Node) -> jax.Array:
    result, axes = out_dtype(node), axes_of(dim, x.ndim)
    x = x.astype(opmath(result))
    if size_of(x) == 0:
        return jnp.log(jnp.sum(jnp.exp(x), axis=axes, keepdims=keepdim)).astype(result)
    top = jnp.max(x.real, axis=axes, keepdims=True)
    top = jnp.where(jnp.isinf(top), jnp.zeros((), top.dtype), top)
    total = jnp.log(jnp.sum(jnp.exp(x - top), axis=axes, keepdims=True)) + top
    return (total if keepdim else jnp.squeeze(total, axes)).astype(result)


@register_lowering("hash_tensor")
def _hash_tensor(x: jax.Array, dim: Dims = (), *, keepdim: bool = False, mode: int = 0) -> jax.Array:
    del mode  # torch has one mode only
    if jnp.issubdtype(x.dtype, np.floating):
        bits = jax.lax.bitcast_convert_type(x.astype(np.float64), np.uint64)
    else:
        bits = x.astype(np.int64).astype(np.uint64)
    axes = axes_of(dim, x.ndim)
    folded = jax.lax.reduce(bits, np.uint64(0), jax.lax.bitwise_xor, axes)
    return jnp.expand_dims(folded, axes) if keepdim else folded


@register_lowering("var.correction", node=True)
def _var(x: jax.Array, dim: Dims = None, *, correction: Any = None, keepdim: bool = False, node: fx.Node) -> jax.Array:
    return _variance(x, dim, correction, keepdim).astype(out_dtype(node))


@register_lowering("std.correction", node=True)
def _std(x: jax.Array, dim: Dims = None, *, correction: Any = None, keepdim: bool = False, node: fx.Node) -> jax.Array:
    return jnp.sqrt(_variance(x, dim, correction, keepdim)).astype(out_dtype(node))


@register_lowering("var_mean.correction", node=True)
def _var_mean(
    x: jax.Array, dim: Dims = None, *, correction: Any = None, keepdim: bool = False, node: fx.Node
) -> tuple[jax.Array, jax.Array]:
    mean = mean_over(x.astype(opmath(x.dtype)), axes_of(dim, x.ndim), keepdim)
    return _variance(x, dim, correction, keepdim).astype(out_dtype(node)), mean.astype(x.dtype)


@register_lowering("std_mean.correction", node=True)
def _std_mean(
    x: jax.Array, dim: Dims = None, *, correction: Any = None, keepdim: bool = False, node: fx.Node
) -> tuple[jax.Array, jax.Array]:
    mean = mean_over(x.astype(opmath(x.dtype)), axes_of(dim, x.ndim), keepdim)
    return jnp.sqrt(_variance(x, dim, correction, keepdim)).astype(out_dtype(node)), mean.astype(x.dtype)


def _variance(x: jax.Array, dim: Dims, correction: Any, keepdim: bool) -> jax.Array:
    axes = axes_of(dim, x.ndim)
    x = x.astype(opmath(x.dtype))
    count = size_along(x, axes)
    if count != 0:
        # The first element is subtracted so that equal elements have a variance of exactly 0, as in torch.
        x = x - jax.lax.slice_in_dim(x, 0, 1, axis=axes[0]) if len(axes) == 1 else x - _first_along_axes(x, axes)
    spread = x - mean_over(x, axes, keepdim=True)
    squares = spread.real**2 + spread.imag**2 if jnp.iscomplexobj(x) else spread * spread
    correction = 1 if correction is None else correction
    if isinstance(count, int):
        divisor = jnp.asarray(max(count - correction, 0), squares.dtype)
    else:  # a symbolic size
        divisor = jnp.maximum(jnp.asarray(count, squares.dtype) - correction, 0)
    return jnp.sum(squares, axis=axes, keepdims=keepdim) / divisor


def _first_along_axes(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    return x[tuple(slice(0, 1) if axis in axes else slice(None) for axis in range(x.ndim))]


@register_lowering("linalg_vector_norm", node=True)
def _vector_norm(
    x: jax.Array, ord: Any = 2, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None, node: fx.Node
) -> jax.Array:
    del dtype
    return norm_over(x, ord, axes_of(dim, x.ndim), keepdim, out_dtype(node))


@register_lowering("norm.Scalar", "norm.ScalarOpt_dtype", node=True)
def _norm(x: jax.Array, p: Any = 2, *, dtype: Any = None, node: fx.Node) -> jax.Array:
    del dtype
    return norm_over(x, p, tuple(range(x.ndim)), False, out_dtype(node))


@register_lowering("norm.ScalarOpt_dim", "norm.ScalarOpt_dim_dtype", node=True)
def _norm_dim(x: jax.Array, p: Any, dim: Dims, keepdim: bool = False, *, dtype: Any = None, node: fx.Node) -> jax.Array:
    del dtype
    return norm_over(x, p, axes_of(dim, x.ndim), keepdim, out_dtype(node))


@register_lowering("dist", node=True)
def _dist(x: jax.Array, y: jax.Array, p: Any = 2, *, node: fx.Node) -> jax.Array:
    difference = x - y
    return norm_over(difference, p, tuple(range(difference.ndim)), False, out_dtype(node))
