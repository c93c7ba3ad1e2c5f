"""Normalization by the moments of a layer or of a group of channels, and by norms.

Statistics of half-precision inputs are computed in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from torch import fx

from jtbridge.lowerings._common import axis_of, opmath, out_dtype
from jtbridge.lowerings._norm import norm_over
from jtbridge.lowerings._registry import register_lowering

from ._moments import Maybe, affine, as_computed, centred, moments, selected_gradients

# Layer and RMS normalization: over the last dimensions.


@register_lowering("native_layer_norm", node=True)
def _layer_norm(
    x: jax.Array, normalized_shape: Sequence[int], weight: Maybe, bias: Maybe, eps: float, *, node: fx.Node
) -> tuple[jax.Array, jax.Array, jax.Array]:
    axes = tuple(range(x.ndim - len(normalized_shape), x.ndim))
    wide, w, b = as_computed(x, weight, bias)
    mean, variance = moments(wide, axes)
    rstd = lax.rsqrt(variance + eps)
    y = affine((wide - mean) * rstd, w, b).astype(x.dtype)
    return y, mean.astype(out_dtype(node, 1)), rstd.astype(out_dtype(node, 2))


@register_lowering("native_layer_norm_backward")
def _layer_norm_backward(
    grad_out: jax.Array,
    x: jax.Array,
    normalized_shape: Sequence[int],
    mean: jax.Array,
    rstd: jax.Array,
    weight: Maybe,
    bias: Maybe,
    output_mask: Sequence[bool],
) -> tuple[Maybe, ...]:
    outer = x.ndim - len(normalized_shape)
    inner, rows = tuple(range(outer, x.ndim)), tuple(range(outer))
    grad, wide, w, mean, rstd = as_computed(grad_out, x, weight, mean, rstd)
    unit = (wide - mean) * rstd
    scaled = grad if w is None else grad * w
    by_x = centred(scaled, unit, inner) * rstd
    found = by_x, jnp.sum(grad * unit, rows), jnp.sum(grad, rows)
    # Torch returns the gradient of an absent bias if requested, in the dtype of the weight.
    return selected_gradients(found, (x, weight, weight if bias is None else bias), output_mask)


@register_lowering("_fused_rms_norm", node=True)
def _rms_norm(
    x: jax.Array, normalized_shape: Sequence[int], weight: Maybe, eps: float | None, *, node: fx.Node
) -> tuple[jax.Array, jax.Array]:
    axes = tuple(range(x.ndim - len(normalized_shape), x.ndim))
    wide, w = as_computed(x, weight)
    least = float(jnp.finfo(wide.dtype).eps) if eps is None else eps
    rstd = lax.rsqrt(jnp.mean(jnp.square(wide), axes, keepdims=True) + least)
    return affine(wide * rstd, w, None).astype(out_dtype(node)), rstd.astype(out_dtype(node, 1))


@register_lowering("_fused_rms_norm_backward")
def _rms_norm_backward(
    grad_out: jax.Array,
    x: jax.Array,
    normalized_shape: Sequence[int],
    rstd: jax.Array,
    weight: Maybe,
    output_mask: Sequence[bool],
) -> tuple[Maybe, ...]:
    outer = x.ndim - len(normalized_shape)
    grad, wide, w, rstd = as_computed(grad_out, x, weight, rstd)
    unit = wide * rstd
    scaled = grad if w is None else grad * w
    along = jnp.mean(scaled * unit, tuple(range(outer, x.ndim)), keepdims=True)
    by_weight = jnp.sum(grad * unit, tuple(range(outer)))
    return selected_gradients(((scaled - unit * along) * rstd, by_weight), (x, weight), output_mask)


# Group normalization: over some channels and all positions of a sample.


@register_lowering("native_group_norm", node=True)
def _group_norm(
    x: jax.Array,
    weight: Maybe,
    bias: Maybe,
    N: int,
    C: int,
    HxW: int,
    group: int,
    eps: float,
    *,
    node: fx.Node,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    shape = (N, group, C // group, HxW)
    wide, w, b = as_computed(x.reshape(shape), *_channels(group, weight, bias))
    mean, variance = moments(wide, (2, 3))
    rstd = lax.rsqrt(variance + eps)
    y = affine((wide - mean) * rstd, w, b).astype(x.dtype)
    dtypes = out_dtype(node, 1), out_dtype(node, 2)
    return y.reshape(x.shape), mean.reshape(N, group).astype(dtypes[0]), rstd.reshape(N, group).astype(dtypes[1])


def _channels(group: int, *arrays: Maybe) -> list[Maybe]:
    """Return per-channel values, shaped to broadcast with (sample, group, channel of the group, position)."""
    return [None if x is None else x.reshape(1, group, -1, 1) for x in arrays]


@register_lowering("native_group_norm_backward")
def _group_norm_backward(
    grad_out: jax.Array,
    x: jax.Array,
    mean: jax.Array,
    rstd: jax.Array,
    weight: Maybe,
    N: int,
    C: int,
    HxW: int,
    group: int,
    output_mask: Sequence[bool],
) -> tuple[Maybe, ...]:
    shape = (N, group, C // group, HxW)
    grad, wide, w = as_computed(grad_out.reshape(shape), x.reshape(shape), *_channels(group, weight))
    mean, rstd = as_computed(mean.reshape(N, group, 1, 1), rstd.reshape(N, group, 1, 1))
    unit = (wide - mean) * rstd
    scaled = grad if w is None else grad * w
    by_x = (centred(scaled, unit, (2, 3)) * rstd).reshape(x.shape)
    found = by_x, jnp.sum(grad * unit, (0, 3)).reshape(C), jnp.sum(grad, (0, 3)).reshape(C)
    parameter = x if weight is None else weight
    return selected_gradients(found, (x, parameter, parameter), output_mask)


# Normalization by the norms of slices.


@register_lowering("_weight_norm_interface", node=True)
def _weight_norm(v: jax.Array, g: jax.Array, dim: int = 0, *, node: fx.Node) -> tuple[jax.Array, jax.Array]:
    wide, scale = as_computed(v, g)
    axes = tuple(axis for axis in range(v.ndim) if axis != axis_of(dim, v.ndim))
    norms = jnp.sqrt(jnp.sum(jnp.square(wide), axes, keepdims=True))
    return (wide * (scale / norms)).astype(v.dtype), norms.astype(out_dtype(node, 1))


@register_lowering("_weight_norm_interface_backward")
def _weight_norm_backward(
    grad_w: jax.Array, saved_v: jax.Array, saved_g: jax.Array, saved_norms: jax.Array, dim: int
) -> tuple[jax.Array, jax.Array]:
    grad, v, g, norms = as_computed(grad_w, saved_v, saved_g, saved_norms)
    axes = tuple(a for a in range(v.ndim) if a != axis_of(dim, v.ndim))
    unit = v / norms
    along = jnp.sum(grad * unit, axes, keepdims=True)
    return (g / norms * (grad - unit * along)).astype(saved_v.dtype), along.astype(saved_g.dtype)


@register_lowering("renorm")
def _renorm(x: jax.Array, p: Any, dim: int, maxnorm: Any) -> jax.Array:
    axes = tuple(a for a in range(x.ndim) if a != axis_of(dim, x.ndim))
    norms = norm_over(x, p, axes, True, opmath(x.real.dtype))
    factor = jnp.where(norms > maxnorm, maxnorm / (norms + 1e-7), 1)
    return (x * factor).astype(x.dtype)
