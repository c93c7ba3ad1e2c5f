"""Reinterpretation of an array's bits as another dtype."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax
from torch import fx

from jtbridge.lowerings._common import jax_dtype, out_shape
from jtbridge.lowerings._registry import register_lowering


@register_lowering("view.dtype", "view_copy.dtype", node=True)
def _view_dtype(x: jax.Array, dtype: torch.dtype, *, node: fx.Node) -> jax.Array:
    wanted = jax_dtype(dtype)
    if x.dtype == wanted:
        return x
    complex_out, bool_out = wanted.kind == "c", wanted.kind == "b"
    plain = np.dtype(f"float{4 * wanted.itemsize}") if complex_out else np.dtype(np.uint8) if bool_out else wanted
    bits = _recast(_reinterpretable(jnp.atleast_1d(x)), plain)
    if complex_out:
        bits = lax.complex(bits[..., 0::2], bits[..., 1::2])
    elif bool_out:
        bits = bits != 0
    return bits.reshape(out_shape(node))


def _reinterpretable(x: jax.Array) -> jax.Array:
    """Return the same bytes in a dtype that can be reinterpreted; complex numbers become pairs along the last axis."""
    if x.dtype.kind == "c":
        return jnp.stack([lax.real(x), lax.imag(x)], axis=-1).reshape(*x.shape[:-1], 2 * x.shape[-1])
    return x.astype(jnp.uint8) if x.dtype.kind == "b" else x


def _recast(x: jax.Array, dtype: np.dtype) -> jax.Array:
    """Reinterpret bytes as another dtype, with more or fewer elements along the last axis.

    The conversion is a single step, because XLA merges several steps.
    """
    if dtype.itemsize > x.dtype.itemsize:
        ratio = dtype.itemsize // x.dtype.itemsize
        return lax.bitcast_convert_type(x.reshape(*x.shape[:-1], x.shape[-1] // ratio, ratio), dtype)
    return lax.bitcast_convert_type(x, dtype).reshape(*x.shape[:-1], x.shape[-1] * x.dtype.itemsize // dtype.itemsize)
