"""Elementwise choices between values: where, masks, clamps, minimum and maximum."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from torch import fx

from jtbridge.lowerings._common import convert, out_dtype
from jtbridge.lowerings._registry import register_lowering

from ._common import array_of, elementwise, number, operands


@register_lowering("where.self", "prims::where", node=True)
def _where(condition: jax.Array, x: Any, y: Any, *, node: fx.Node) -> jax.Array:
    dtype = out_dtype(node)
    return jnp.where(convert(condition, np.dtype(bool)), array_of(x, dtype), array_of(y, dtype))


@register_lowering("masked_fill.Scalar", "masked_fill.Tensor")
def _masked_fill(x: jax.Array, mask: jax.Array, value: Any) -> jax.Array:
    return jnp.where(mask, array_of(value, np.dtype(x.dtype)), x)


elementwise("maximum", "prims::maximum")(jnp.maximum)
elementwise("minimum", "prims::minimum")(jnp.minimum)
elementwise("fmax", "prims::fmax")(jnp.fmax)
elementwise("fmin", "prims::fmin")(jnp.fmin)


@register_lowering("clamp", "clamp.Tensor", node=True)
def _clamp(x: jax.Array, min: Any = None, max: Any = None, *, node: fx.Node) -> jax.Array:
    dtype = out_dtype(node)
    out = convert(x, dtype)
    if min is not None:
        out = jnp.maximum(out, array_of(min, dtype))
    return out if max is None else jnp.minimum(out, array_of(max, dtype))


@register_lowering("clamp_min", "clamp_min.Tensor", node=True)
def _clamp_min(x: jax.Array, min: Any, *, node: fx.Node) -> jax.Array:
    return _clamp(x, min, node=node)


@register_lowering("clamp_max", "clamp_max.Tensor", node=True)
def _clamp_max(x: jax.Array, max: Any, *, node: fx.Node) -> jax.Array:
    return _clamp(x, None, max, node=node)


@register_lowering("threshold", node=True)
def _threshold(x: jax.Array, threshold: Any, value: Any, *, node: fx.Node) -> jax.Array:
    wide, limit = operands(node, x, threshold, exact=True)
    return jnp.where(wide <= limit, number(value, np.dtype(x.dtype)), x)


@register_lowering("threshold_backward", node=True)
def _threshold_backward(grad: jax.Array, x: jax.Array, threshold: Any, *, node: fx.Node) -> jax.Array:
    wide, limit = operands(node, x, threshold, exact=True)
    return jnp.where(wide <= limit, jnp.zeros((), grad.dtype), grad)


@register_lowering("nan_to_num")
def _nan_to_num(
    x: jax.Array, nan: float | None = None, posinf: float | None = None, neginf: float | None = None
) -> jax.Array:
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return x
    return jnp.nan_to_num(x, nan=0.0 if nan is None else nan, posinf=posinf, neginf=neginf)


@elementwise("heaviside")
def _heaviside(x: jax.Array, at_zero: jax.Array) -> jax.Array:
    return jnp.where(x == 0, at_zero, (x > 0).astype(x.dtype))
