"""Writes of values to positions given by index tensors; the values replace the elements or are combined with them.

See :mod:`._out_of_range` for indices that torch refuses, and for the invalid value. Where several values are written to
one position and are not combined, one of the values stays; torch does not specify which one either.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from torch import fx

from jtbridge.lowerings._common import axis_of, convert, opmath
from jtbridge.lowerings._registry import register_lowering
from jtbridge.lowerings.shape._common import box

from ._out_of_range import invalid_if, is_outside
from ._places import Places, along, at_axis


def write_at(x: jax.Array, places: Places, values: jax.Array, how: str, wrap: bool = True) -> jax.Array:
    """Return `x` with values written to places: ``set``, or combined by ``sum``, ``prod``, ``amax`` or ``amin``.

    Half precision is accumulated in float32 and rounded once. Writes out of range are dropped.
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


def checked_write(
    x: jax.Array, places: Places, values: jax.Array, how: str, node: fx.Node | None, *, wrap: bool
) -> jax.Array:
    """Return the result of :func:`write_at`, with every element invalid if a place is out of range."""
    return _checked_result(write_at(x, places, values, how, wrap), places, node, wrap=wrap)


def _checked_result(result: jax.Array, places: Places, node: fx.Node | None, *, wrap: bool) -> jax.Array:
    """Return the result of a write to places, with every element invalid if a place is out of range.

    The places are not checked without a node, or in a backward, whose indices the forward has checked.
    """
    if node is None or (node.meta.get("custom") or {}).get("backward"):
        return result
    return invalid_if(is_outside(result.shape, places, wrap=wrap), result)


def _scatter(x: jax.Array, dim: int, index: jax.Array, src: Any, how: str, node: fx.Node) -> jax.Array:
    """Write or combine values as torch's scatter: `index` may be smaller than `x`, and `src` larger than `index`."""
    if index.size == 0:
        return x
    if x.ndim == 0 or index.ndim == 0:
        src = src if jnp.ndim(src) == 0 else jnp.reshape(src, -1)
        return _scatter(x.reshape(-1), 0, index.reshape(-1), src, how, node).reshape(x.shape)
    if jnp.ndim(src) == index.ndim:
        src = box(src, [0] * index.ndim, index.shape)
    places = along(index, axis_of(dim, x.ndim), x.shape, node.args[2])
    return checked_write(x, places, jnp.asarray(src), how, node, wrap=False)


_OLD_NAMES = {"add": "sum", "multiply": "prod"}


@register_lowering("scatter.src", node=True)
def _scatter_src(x: jax.Array, dim: int, index: jax.Array, src: jax.Array, *, node: fx.Node) -> jax.Array:
    return _scatter(x, dim, index, src, "set", node)


@register_lowering("scatter.value", node=True)
def _scatter_value(x: jax.Array, dim: int, index: jax.Array, value: Any, *, node: fx.Node) -> jax.Array:
    return _scatter(x, dim, index, jnp.asarray(value, x.dtype), "set", node)


@register_lowering("scatter.reduce", node=True)
def _scatter_old_reduce(
    x: jax.Array, dim: int, index: jax.Array, src: jax.Array, *, reduce: str, node: fx.Node
) -> jax.Array:
    return _scatter(x, dim, index, src, _OLD_NAMES[reduce], node)


@register_lowering("scatter.value_reduce", node=True)
def _scatter_value_reduce(
    x: jax.Array, dim: int, index: jax.Array, value: Any, *, reduce: str, node: fx.Node
) -> jax.Array:
    return _scatter(x, dim, index, jnp.asarray(value, x.dtype), _OLD_NAMES[reduce], node)


@register_lowering("scatter_add", node=True)
def _scatter_add(x: jax.Array, dim: int, index: jax.Array, src: jax.Array, *, node: fx.Node) -> jax.Array:
    return _scatter(x, dim, index, src, "sum", node)


@register_lowering("scatter_reduce.two", node=True)
def _scatter_reduce(
    x: jax.Array,
    dim: int,
    index: jax.Array,
    src: jax.Array,
    reduce: str,
    *,
    include_self: bool = True,
    node: fx.Node,
) -> jax.Array:
    if index.size == 0:
        return x
    if x.ndim == 0 or index.ndim == 0:
        flat = [a.reshape(-1) for a in (x, index, src)]
        result = _scatter_reduce(flat[0], 0, *flat[1:], reduce, include_self=include_self, node=node)
        return result.reshape(x.shape)
    places = along(index, axis_of(dim, x.ndim), x.shape, node.args[2])
    return _reduced(x, places, box(src, [0] * index.ndim, index.shape), reduce, include_self, node)


@register_lowering("index_reduce", node=True)
def _index_reduce(
    x: jax.Array,
    dim: int,
    index: jax.Array,
    source: jax.Array,
    reduce: str,
    *,
    include_self: bool = True,
    node: fx.Node,
) -> jax.Array:
    if x.ndim == 0:
        flat = _index_reduce(x.reshape(1), 0, index, source.reshape(-1), reduce, include_self=include_self, node=node)
        return flat.reshape(())
    places = at_axis(index.reshape(-1), axis_of(dim, x.ndim))
    return _reduced(x, places, source.reshape(_selected_shape(x, dim, index)), reduce, include_self, node)


def _reduced(
    x: jax.Array, places: Places, values: jax.Array, reduce: str, include_self: bool, node: fx.Node
) -> jax.Array:
    """Return `x` with `values` reduced into places; without `include_self`, the old elements there are left out."""
    dtype = x.dtype
    how = "sum" if reduce == "mean" else reduce
    if reduce in ("sum", "mean", "prod"):
        x, values = x.astype(opmath(dtype)), values.astype(opmath(dtype))
    # The shape of masks and counts, which are equal along the axes that are not indexed.
    indexed = [i < len(places) and not isinstance(places[i], slice) for i in range(x.ndim)]
    shape = [n if is_indexed else 1 for n, is_indexed in zip(x.shape, indexed, strict=True)]
    if not include_self:
        is_reached = jnp.zeros(shape, bool).at[places].set(True, mode="drop", wrap_negative_indices=False)
        x = jnp.where(is_reached, _identity_element(how, x.dtype), x)
    result = write_at(x, places, values, how, wrap=False)
    if reduce == "mean":
        count = jnp.full(shape, include_self, jnp.int32)
        count = jnp.maximum(count.at[places].add(1, mode="drop", wrap_negative_indices=False), 1).astype(x.dtype)
        result = result // count if jnp.issubdtype(x.dtype, jnp.integer) else result / count
    return _checked_result(result.astype(dtype), places, node, wrap=False)


def _identity_element(how: str, dtype: np.dtype) -> jax.Array:
    """Return the identity element of a reduction."""
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


@register_lowering("index_add", node=True)
def _index_add(
    x: jax.Array, dim: int, index: jax.Array, source: jax.Array, *, alpha: Any = 1, node: fx.Node
) -> jax.Array:
    return _index_write(x, dim, index, _times_alpha(source, alpha), "sum", node)


def _times_alpha(source: jax.Array, alpha: Any) -> jax.Array:
    if alpha == 1:
        return source
    if source.dtype == bool:
        return source & bool(alpha)
    return source * jnp.asarray(alpha, source.dtype)


@register_lowering("index_copy", node=True)
def _index_copy(x: jax.Array, dim: int, index: jax.Array, source: jax.Array, *, node: fx.Node) -> jax.Array:
    return _index_write(x, dim, index, source, "set", node)


@register_lowering("index_fill.int_Scalar", "index_fill.int_Tensor", node=True)
def _index_fill(x: jax.Array, dim: int, index: jax.Array, value: Any, *, node: fx.Node) -> jax.Array:
    filler = convert(value, np.dtype(x.dtype)) if isinstance(value, jax.Array) else jnp.asarray(value, x.dtype)
    shape = _selected_shape(x.reshape(1) if x.ndim == 0 else x, dim, index)
    return _index_write(x, dim, index, jnp.broadcast_to(filler, shape), "set", node, wrap=True)


def _index_write(
    x: jax.Array, dim: int, index: jax.Array, source: jax.Array, how: str, node: fx.Node, wrap: bool = False
) -> jax.Array:
    if x.ndim == 0:
        return _index_write(x.reshape(1), 0, index, source.reshape(-1), how, node, wrap).reshape(())
    places = at_axis(index.reshape(-1), axis_of(dim, x.ndim))
    return checked_write(x, places, source.reshape(_selected_shape(x, dim, index)), how, node, wrap=wrap)
