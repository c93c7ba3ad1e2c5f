"""Largest and smallest elements, and the index of the first one. NaN counts as the largest and as the smallest."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jtbridge.core.extreme_positions import first_largest, first_smallest
from jtbridge.lowerings._common import axes_of, axis_of
from jtbridge.lowerings._registry import register_lowering

Dims = Sequence[int] | int | None


@register_lowering("amax")
def _amax(x: jax.Array, dim: Dims = (), keepdim: bool = False) -> jax.Array:
    return jnp.max(x, axis=axes_of(dim, x.ndim), keepdims=keepdim)


@register_lowering("amin")
def _amin(x: jax.Array, dim: Dims = (), keepdim: bool = False) -> jax.Array:
    return jnp.min(x, axis=axes_of(dim, x.ndim), keepdims=keepdim)


@register_lowering("max")
def _max(x: jax.Array) -> jax.Array:
    return jnp.max(x)


@register_lowering("min")
def _min(x: jax.Array) -> jax.Array:
    return jnp.min(x)


@register_lowering("aminmax")
def _aminmax(x: jax.Array, *, dim: int | None = None, keepdim: bool = False) -> tuple[jax.Array, jax.Array]:
    return _amin(x, dim, keepdim), _amax(x, dim, keepdim)


@register_lowering("_aminmax")
def _aminmax_of_all(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jnp.min(x), jnp.max(x)


@register_lowering("_aminmax.dim")
def _aminmax_of_dim(x: jax.Array, dim: int, keepdim: bool = False) -> tuple[jax.Array, jax.Array]:
    return _amin(x, dim, keepdim), _amax(x, dim, keepdim)


@register_lowering("argmax")
def _argmax(x: jax.Array, dim: int | None = None, keepdim: bool = False) -> jax.Array:
    return _position(x, dim, keepdim, largest=True)


@register_lowering("argmin")
def _argmin(x: jax.Array, dim: int | None = None, keepdim: bool = False) -> jax.Array:
    return _position(x, dim, keepdim, largest=False)


@register_lowering("max.dim")
def _max_dim(x: jax.Array, dim: int, keepdim: bool = False) -> tuple[jax.Array, jax.Array]:
    return _amax(x, dim, keepdim), _position(x, dim, keepdim, largest=True)


@register_lowering("min.dim")
def _min_dim(x: jax.Array, dim: int, keepdim: bool = False) -> tuple[jax.Array, jax.Array]:
    return _amin(x, dim, keepdim), _position(x, dim, keepdim, largest=False)


def _position(x: jax.Array, dim: int | None, keepdim: bool, *, largest: bool) -> jax.Array:
    """Return the index of the first extreme element, or of the first NaN if there is one."""
    if x.ndim == 0:
        return jnp.zeros((), np.int64)
    first = first_largest if largest else first_smallest
    flat, axis = (x.reshape(-1), 0) if dim is None else (x, axis_of(dim, x.ndim))
    index = first(flat, axis, np.int64)
    if not keepdim:
        return index
    return index.reshape((1,) * x.ndim) if dim is None else jnp.expand_dims(index, axis)
