"""Writing values to positions given by index tensors, alone or combined with what is there.

An index that is out of range, for which torch raises on a CPU, writes nothing. Where several values meet in one
position and are not combined, one of them stays; torch does not say which either.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._common import axis_of, opmath
from ._registry import lowers
from ._shape_common import box, cast, positions

Places = tuple[Any, ...]


def at_axis(index: jax.Array, axis: int) -> Places:
    """What selects by `index` along one axis."""
    return (*(slice(None),) * axis, index)


def _along(index: jax.Array, axis: int) -> Places:
    """Index arrays for each element of `index`, which replaces its own coordinate along an axis."""
    return tuple(index if i == axis else positions(index.shape, i) for i in range(index.ndim))


def write(x: jax.Array, places: Places, values: jax.Array, how: str, wrap: bool = True) -> jax.Array:
    """`x` with values written to places: ``set``, or combined by ``sum``, ``prod``, ``amax`` or ``amin``.

    Half precision is accumulated in single precision and rounded once.
    """
    dtype = x.dtype
    if how in ("sum", "prod"):
        if dtype.kind == "b":
            how = "amax" if how == "sum" else "amin"
        x, values = x.astype(opmath(dtype)), values.astype(opmath(dtype))
    target = x.at[places]
    operation = {
        "set": target.set,
        "sum": target.add,
        "prod": target.multiply,
        "amax": target.max,
        "amin": target.min,
    }[how]
    return operation(values, mode="drop", wrap_negative_indices=wrap).astype(dtype)


def _scatter(x: jax.Array, dim: int, index: jax.Array, src: Any, how: str) -> jax.Array:
    """Torch's scatter: `index` may be smaller than `x`, and `src` larger than `index`."""
    if index.size == 0:
        return x
    if x.ndim == 0 or index.ndim == 0:
        src = src if jnp.ndim(src) == 0 else jnp.reshape(src, -1)
        return _scatter(x.reshape(-1), 0, index.reshape(-1), src, how).reshape(x.shape)
    if jnp.ndim(src) == index.ndim:
        src = box(src, [0] * index.ndim, index.shape)
    axis = axis_of(dim, x.ndim)
    return write(x, _along(index, axis), jnp.asarray(src), how, wrap=False)


_OLD_NAMES = {"add": "sum", "multiply": "prod"}


@lowers("scatter.src")
def _scatter_src(x: jax.Array, dim: int, index: jax.Array, src: jax.Array) -> jax.Array:
    return _scatter(x, dim, index, src, "set")


@lowers("scatter.value")
def _scatter_value(x: jax.Array, dim: int, index: jax.Array, value: Any) -> jax.Array:
    return _scatter(x, dim, index, jnp.asarray(value, x.dtype), "set")


@lowers("scatter.reduce")
def _scatter_old_reduce(x: jax.Array, dim: int, index: jax.Array, src: jax.Array, *, reduce: str) -> jax.Array:
    return _scatter(x, dim, index, src, _OLD_NAMES[reduce])


@lowers("scatter.value_reduce")
def _scatter_value_reduce(x: jax.Array, dim: int, index: jax.Array, value: Any, *, reduce: str) -> jax.Array:
    return _scatter(x, dim, index, jnp.asarray(value, x.dtype), _OLD_NAMES[reduce])


@lowers("scatter_add")
def _scatter_add(x: jax.Array, dim: int, index: jax.Array, src: jax.Array) -> jax.Array:
    return _scatter(x, dim, index, src, "sum")


@lowers("scatter_reduce.two")
def _scatter_reduce(
    x: jax.Array, dim: int, index: jax.Array, src: jax.Array, reduce: str, *, include_self: bool = True
) -> jax.Array:
    if index.size == 0:
        return x
    if x.ndim == 0 or index.ndim == 0:
        flat = _scatter_reduce(x.reshape(-1), 0, index.reshape(-1), src.reshape(-1), reduce, include_self=include_self)
        return flat.reshape(x.shape)
    places = _along(index, axis_of(dim, x.ndim))
    return _reduced(x, places, box(src, [0] * index.ndim, index.shape), reduce, include_self)


@lowers("index_reduce")
def _index_reduce(
    x: jax.Array, dim: int, index: jax.Array, source: jax.Array, reduce: str, *, include_self: bool = True
) -> jax.Array:
    if x.ndim == 0:
        flat = _index_reduce(x.reshape(1), 0, index, source.reshape(-1), reduce, include_self=include_self)
        return flat.reshape(())
    places = at_axis(index.reshape(-1), axis_of(dim, x.ndim))
    return _reduced(x, places, source.reshape(_selected_shape(x, dim, index)), reduce, include_self)


def _reduced(x: jax.Array, places: Places, values: jax.Array, reduce: str, include_self: bool) -> jax.Array:
    """`values` reduced into places of `x`; without `include_self`, what is there first is left out."""
    dtype = x.dtype
    how = "sum" if reduce == "mean" else reduce
    if reduce in ("sum", "mean", "prod"):
        x, values = x.astype(opmath(dtype)), values.astype(opmath(dtype))
    if not include_self:
        start = jnp.broadcast_to(_identity(how, x.dtype), values.shape)
        x = write(x, places, start, "set", wrap=False)
    result = write(x, places, values, how, wrap=False)
    if reduce == "mean":
        count = jnp.full(x.shape, include_self, jnp.int32)
        count = jnp.maximum(count.at[places].add(jnp.ones(values.shape, jnp.int32), mode="drop"), 1)
        count = count.astype(x.dtype)
        result = result // count if jnp.issubdtype(x.dtype, jnp.integer) else result / count
    return result.astype(dtype)


def _identity(how: str, dtype: np.dtype) -> jax.Array:
    """What a reduction starts from."""
    if how in ("sum", "prod"):
        return jnp.asarray(how == "prod", dtype)
    if dtype.kind == "b":
        return jnp.asarray(how == "amin")
    if jnp.issubdtype(dtype, jnp.integer):
        limits = jnp.iinfo(dtype)
        return jnp.asarray(limits.min if how == "amax" else limits.max, dtype)
    return jnp.asarray(-jnp.inf if how == "amax" else jnp.inf, dtype)


def _selected_shape(x: jax.Array, dim: int, index: jax.Array) -> Sequence[int]:
    axis = axis_of(dim, x.ndim)
    return (*x.shape[:axis], index.size, *x.shape[axis + 1 :])


@lowers("index_add")
def _index_add(x: jax.Array, dim: int, index: jax.Array, source: jax.Array, *, alpha: Any = 1) -> jax.Array:
    return _index_write(x, dim, index, _scaled(source, alpha), "sum")


def _scaled(source: jax.Array, alpha: Any) -> jax.Array:
    if alpha == 1:
        return source
    if source.dtype == bool:
        return source & bool(alpha)
    return source * jnp.asarray(alpha, source.dtype)


@lowers("index_copy")
def _index_copy(x: jax.Array, dim: int, index: jax.Array, source: jax.Array) -> jax.Array:
    return _index_write(x, dim, index, source, "set")


@lowers("index_fill.int_Scalar", "index_fill.int_Tensor")
def _index_fill(x: jax.Array, dim: int, index: jax.Array, value: Any) -> jax.Array:
    filler = cast(value, x.dtype) if isinstance(value, jax.Array) else jnp.asarray(value, x.dtype)
    shape = _selected_shape(x.reshape(1) if x.ndim == 0 else x, dim, index)
    return _index_write(x, dim, index, jnp.broadcast_to(filler, shape), "set", wrap=True)


def _index_write(
    x: jax.Array, dim: int, index: jax.Array, source: jax.Array, how: str, wrap: bool = False
) -> jax.Array:
    if x.ndim == 0:
        return _index_write(x.reshape(1), 0, index, source.reshape(-1), how, wrap).reshape(())
    places = at_axis(index.reshape(-1), axis_of(dim, x.ndim))
    return write(x, places, source.reshape(_selected_shape(x, dim, index)), how, wrap)
