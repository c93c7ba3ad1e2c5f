"""Complex numbers: parts, conjugates, and views of complex numbers as pairs of real numbers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from torch import fx

from jtbridge.lowerings._common import convert, out_dtype
from jtbridge.lowerings._registry import register_lowering


@register_lowering("complex")
def _complex(real: jax.Array, imag: jax.Array) -> jax.Array:
    dtype = jnp.promote_types(real.dtype, imag.dtype)  # torch's forward mode makes float64 tangents of float32 numbers
    return lax.complex(*jnp.broadcast_arrays(real.astype(dtype), imag.astype(dtype)))


@register_lowering("polar")
def _polar(size: jax.Array, angle: jax.Array) -> jax.Array:
    return lax.complex(*jnp.broadcast_arrays(size * jnp.cos(angle), size * jnp.sin(angle)))


@register_lowering("view_as_real", "view_as_real_copy")
def _view_as_real(x: jax.Array) -> jax.Array:
    return jnp.stack([jnp.real(x), jnp.imag(x)], axis=-1)


@register_lowering("view_as_complex", "view_as_complex_copy")
def _view_as_complex(x: jax.Array) -> jax.Array:
    return lax.complex(x[..., 0], x[..., 1])


@register_lowering("_conj", "_conj_copy", "_conj_physical", "prims::conj", "prims::conj_physical")
def _conj(x: jax.Array) -> jax.Array:
    return lax.conj(x) if jnp.iscomplexobj(x) else x


@register_lowering("_neg_view", "_neg_view_copy")
def _neg_view(x: jax.Array) -> jax.Array:
    return -x


@register_lowering("prims::real")
def _real(x: jax.Array) -> jax.Array:
    return jnp.real(x)


@register_lowering("prims::imag")
def _imag(x: jax.Array) -> jax.Array:
    return jnp.imag(x)


@register_lowering("angle", node=True)
def _angle(x: jax.Array, *, node: fx.Node) -> jax.Array:
    if jnp.iscomplexobj(x):
        return jnp.arctan2(jnp.imag(x), jnp.real(x))
    x = convert(x, out_dtype(node))
    pi = jnp.where(x < 0, jnp.asarray(jnp.pi, x.dtype), jnp.zeros((), x.dtype))
    return jnp.where(jnp.isnan(x), x, pi)
