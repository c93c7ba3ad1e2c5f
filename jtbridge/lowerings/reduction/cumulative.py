"""Running sums, products and extremes along a dimension."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from torch import fx

from jtbridge.lowerings._common import axis_of, convert, opmath, out_dtype
from jtbridge.lowerings._registry import register_lowering


@register_lowering("cumsum", node=True)
def _cumsum(x: jax.Array, dim: int, *, dtype: Any = None, node: fx.Node) -> jax.Array:
    del dtype
    return _scan_along_dim(jax.lax.cumsum, x, dim, out_dtype(node))


@register_lowering("cumprod", node=True)
def _cumprod(x: jax.Array, dim: int, *, dtype: Any = None, node: fx.Node) -> jax.Array:
    del dtype
    return _scan_along_dim(jax.lax.cumprod, x, dim, out_dtype(node))


@register_lowering("logcumsumexp", "_logcumsumexp", node=True)
def _logcumsumexp(x: jax.Array, dim: int, *, node: fx.Node) -> jax.Array:
    complex_scan = functools.partial(jax.lax.associative_scan, _complex_logaddexp)
    scan = complex_scan if jnp.iscomplexobj(x) else jax.lax.cumlogsumexp
    return _scan_along_dim(scan, x, dim, out_dtype(node))


def _scan_along_dim(scan: Callable[..., jax.Array], x: jax.Array, dim: int, dtype: np.dtype) -> jax.Array:
    x = convert(x, dtype)
    if x.ndim == 0:
        return x
    if dtype == np.bool_:
        return scan(x.astype(np.int64), axis=axis_of(dim, x.ndim)) != 0
    return scan(x.astype(opmath(dtype)), axis=axis_of(dim, x.ndim)).astype(dtype)


def _complex_logaddexp(a: jax.Array, b: jax.Array) -> jax.Array:
    """Return log(exp(a) + exp(b)) without overflow. If a real part is -inf, its imaginary part is ignored."""
    bigger = a.real >= b.real
    high, low = jnp.where(bigger, a, b), jnp.where(bigger, b, a)
    both_infinite = jnp.isinf(high.real) & (high.real == low.real)
    total = high + jnp.log1p(jnp.exp(low - high))
    total = jnp.where(both_infinite, jnp.where(high.real < 0, low, jnp.log(jnp.exp(low) + jnp.exp(high))), total)
    return jnp.where(jnp.isnan(a) | jnp.isnan(b), jnp.asarray(complex(np.nan, np.nan), a.dtype), total)


@register_lowering("cummax")
def _cummax(x: jax.Array, dim: int) -> tuple[jax.Array, jax.Array]:
    return _running_extreme(x, dim, jnp.greater_equal)


@register_lowering("cummin")
def _cummin(x: jax.Array, dim: int) -> tuple[jax.Array, jax.Array]:
    return _running_extreme(x, dim, jnp.less_equal)


def _running_extreme(x: jax.Array, dim: int, replaces: Callable[..., jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Return the running extremes and their indices: the last one of equal elements, and NaN from the first NaN on."""
    if x.ndim == 0:
        return x, jnp.zeros((), np.int64)

    def later(a: tuple[jax.Array, jax.Array], b: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        take = replaces(b[0], a[0])
        if jnp.issubdtype(x.dtype, np.floating):
            take = jnp.isnan(b[0]) | (take & ~jnp.isnan(a[0]))
        return jnp.where(take, b[0], a[0]), jnp.where(take, b[1], a[1])

    axis = axis_of(dim, x.ndim)
    index = jax.lax.broadcasted_iota(np.int64, x.shape, axis)
    values, places = jax.lax.associative_scan(later, (x, index), axis=axis)
    return values, places
