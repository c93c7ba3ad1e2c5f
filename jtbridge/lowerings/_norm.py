"""The p-norm, which lowerings of several folders compute."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jtbridge.lowerings._common import opmath, size_along, size_of


def norm_over(x: jax.Array, p: Any, axes: tuple[int, ...], keepdim: bool, dtype: np.dtype) -> jax.Array:
    """Return the `p`-norm over `axes` in the real dtype `dtype`; half precision is computed in float32."""
    order = 2.0 if p is None else float(p)
    complex_type = jnp.iscomplexobj(x)
    size = x if complex_type else x.astype(opmath(dtype))
    if order == 2.0:
        squares = size.real**2 + size.imag**2 if complex_type else size * size
        norm = jnp.sqrt(jnp.sum(squares, axis=axes, keepdims=keepdim))
        return norm.astype(dtype)
    size = jnp.abs(size)
    if order == 0.0:
        return jnp.sum(size != 0, axis=axes, keepdims=keepdim).astype(dtype)
    if np.isinf(order):
        extreme = jnp.max if order > 0 else jnp.min
        if size_of(size) == 0 and size_along(size, axes) == 0:
            return jnp.zeros(jnp.sum(size, axis=axes, keepdims=keepdim).shape, dtype)
        return extreme(size, axis=axes, keepdims=keepdim).astype(dtype)
    if order == 1.0:
        return jnp.sum(size, axis=axes, keepdims=keepdim).astype(dtype)
    total = jnp.sum(size ** jnp.asarray(order, size.dtype), axis=axes, keepdims=keepdim)
    return (total ** jnp.asarray(1.0 / order, total.dtype)).astype(dtype)
