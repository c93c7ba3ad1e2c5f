"""Fake quantization, which rounds values to integers times a scale, and its gradients by scale and zero point.

Depending on the operator, torch's CPU kernels compute in float32 or float64. Each conversion to an integer affects the
result: NaN becomes the least quantized value, in one kernel because of ``fmax``, in others because x86 converts NaN to
the least integer. Where torch raises for a zero point that is out of range, the result is NaN.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from torch import fx

from jtbridge.lowerings._common import convert, opmath, out_dtype
from jtbridge.lowerings._registry import register_lowering

from ._common import number, round_to_even

_FLOAT = np.dtype(np.float32)
_DOUBLE = np.dtype(np.float64)
_LONG = np.dtype(np.int64)


def _of_tensor(x: jax.Array, scale: Any, zero_point: Any, low: int, high: int) -> tuple[jax.Array, jax.Array]:
    """Return quantized values, and the mask of values in range, for one scale (float32) and one zero point (int64)."""
    wide = opmath(np.dtype(x.dtype))
    steps = zero_point.astype(wide) + round_to_even(convert(x, wide) * (1 / scale).astype(wide))
    inside = (steps >= number(low, wide)) & (steps <= number(high, wide))
    bounded = jnp.clip(jnp.where(jnp.isnan(steps), float(low), steps.astype(_DOUBLE)), float(low), float(high))
    y = (bounded.astype(_LONG) - zero_point).astype(_FLOAT) * scale
    return convert(y, np.dtype(x.dtype)), inside


@register_lowering("fake_quantize_per_tensor_affine_cachemask")
def _per_tensor(x: jax.Array, scale: float, zero_point: int, quant_min: int, quant_max: int) -> Any:
    return _of_tensor(x, number(scale, _FLOAT), number(zero_point, _LONG), quant_min, quant_max)


@register_lowering("_fake_quantize_per_tensor_affine_cachemask_tensor_qparams")
def _per_tensor_of_tensors(
    x: jax.Array, scale: jax.Array, zero_point: jax.Array, enabled: jax.Array, quant_min: int, quant_max: int
) -> Any:
    scale, zero_point, on = (value.reshape(()) for value in (scale, zero_point, enabled))
    whole = convert(convert(zero_point, np.dtype(np.int32)), _LONG)
    y, inside = _of_tensor(x, convert(scale, _FLOAT), whole, quant_min, quant_max)
    on = convert(on, np.dtype(np.int32)) != 0
    return jnp.where(on, y, x), inside | ~on


@register_lowering("_fake_quantize_learnable_per_tensor_affine")
def _learnable_per_tensor(
    x: jax.Array, scale: jax.Array, zero_point: jax.Array, quant_min: int, quant_max: int, grad_factor: float = 1.0
) -> jax.Array:
    del grad_factor
    whole = _whole_zero_point(zero_point, quant_min, quant_max, 0)
    y = _of_tensor(x, convert(scale.reshape(-1)[0], _FLOAT), whole, quant_min, quant_max)[0]
    return jnp.where(jnp.isnan(zero_point.reshape(-1)[0]), number(np.nan, np.dtype(y.dtype)), y)


def _whole_zero_point(zero_point: jax.Array, low: int, high: int, added: float) -> jax.Array:
    """Round and clip a zero point; with `added` (one half), add it and drop the fraction, as torch's backward does."""
    value = convert(zero_point.reshape(-1)[0], _FLOAT)
    value = value + number(added, _FLOAT) if added else round_to_even(value)
    return jnp.clip(value, number(low, _FLOAT), number(high, _FLOAT)).astype(_LONG)


@register_lowering("fake_quantize_per_channel_affine_cachemask")
def _per_channel(
    x: jax.Array, scale: jax.Array, zero_point: jax.Array, axis: int, quant_min: int, quant_max: int
) -> Any:
    return _of_channels(x, scale, zero_point, axis, quant_min, quant_max)


def _of_channels(x: jax.Array, scale: Any, zero_point: Any, axis: int, low: int, high: int) -> Any:
    scale, zero_point = (_aligned_to_axis(value, axis, x.ndim) for value in (scale, zero_point))
    wide = opmath(np.dtype(x.dtype))
    scaled = convert(x, wide) * (1 / scale).astype(wide)
    is_whole = zero_point.dtype.kind == "i"
    if is_whole:
        steps = zero_point.astype(wide) + round_to_even(scaled)
    else:
        wide = np.dtype(jnp.result_type(wide, opmath(np.dtype(zero_point.dtype))))
        steps = round_to_even((zero_point.astype(wide) + scaled.astype(wide)).astype(_FLOAT))
    steps = convert(steps, _LONG)
    inside = (steps >= low) & (steps <= high)
    y = (jnp.clip(steps, low, high).astype(_DOUBLE) - zero_point.astype(_DOUBLE)) * scale.astype(_DOUBLE)
    if is_whole:
        y = jnp.where((zero_point >= low) & (zero_point <= high), y, jnp.nan)
    return convert(y, np.dtype(x.dtype)), inside


def _aligned_to_axis(values: jax.Array, axis: int, ndim: int) -> jax.Array:
    """Reshape an array with one value for each channel so that it broadcasts along the other axes."""
    return values.reshape([-1 if i == axis else 1 for i in range(ndim)])


@register_lowering("_fake_quantize_learnable_per_channel_affine")
def _learnable_per_channel(
    x: jax.Array,
    scale: jax.Array,
    zero_point: jax.Array,
    axis: int,
    quant_min: int,
    quant_max: int,
    grad_factor: float = 1.0,
) -> jax.Array:
    del grad_factor
    whole = convert(jnp.clip(round_to_even(zero_point), quant_min, quant_max), np.dtype(np.int32))
    return _of_channels(x, scale, whole, axis, quant_min, quant_max)[0]


@register_lowering("_fake_quantize_learnable_per_tensor_affine_backward", node=True)
def _learnable_per_tensor_backward(
    grad: jax.Array,
    x: jax.Array,
    scale: jax.Array,
    zero_point: jax.Array,
    quant_min: int,
    quant_max: int,
    grad_factor: float = 1.0,
    *,
    node: fx.Node,
) -> Any:
    if not x.size:
        return x, scale, zero_point
    whole = _whole_zero_point(zero_point, quant_min, quant_max, 0.5).astype(_FLOAT)
    value = convert(scale.reshape(-1)[0], _FLOAT)
    dx, dscale, dzero = _learnable_backward(grad, x, value, whole, quant_min, quant_max, grad_factor)
    return _as_results(node, dx, dscale.sum()[None], dzero.sum()[None])


@register_lowering("_fake_quantize_learnable_per_channel_affine_backward", node=True)
def _learnable_per_channel_backward(
    grad: jax.Array,
    x: jax.Array,
    scale: jax.Array,
    zero_point: jax.Array,
    axis: int,
    quant_min: int,
    quant_max: int,
    grad_factor: float = 1.0,
    *,
    node: fx.Node,
) -> Any:
    if not x.size:
        return x, scale, zero_point
    whole = jnp.clip(round_to_even(convert(zero_point, _FLOAT)), quant_min, quant_max)
    scale, whole = (_aligned_to_axis(value, axis, x.ndim) for value in (convert(scale, _FLOAT), whole))
    others = tuple(i for i in range(x.ndim) if i != axis)
    dx, dscale, dzero = _learnable_backward(grad, x, scale, whole, quant_min, quant_max, grad_factor)
    return _as_results(node, dx, dscale.sum(others), dzero.sum(others))


def _learnable_backward(
    grad: jax.Array, x: jax.Array, scale: jax.Array, zero_point: jax.Array, low: int, high: int, factor: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the gradients by the argument, and by the scale and the zero point for each element, before summation."""
    grad, x = convert(grad, _FLOAT), convert(x, _FLOAT)
    by = number(factor, _FLOAT)
    inverse = 1 / scale
    steps = convert(round_to_even(zero_point + x * inverse), _LONG)
    below, above = steps < low, steps > high
    inside = ~(below | above)
    dx = grad * convert(inside, _FLOAT)
    y = (jnp.clip(steps, low, high).astype(_FLOAT) - zero_point) * scale
    at_end = jnp.where(below, number(low, _FLOAT) - zero_point, number(high, _FLOAT) - zero_point)
    dscale = jnp.where(inside, grad * (y - x) * inverse * by, grad * at_end * by)
    dzero = jnp.where(inside, number(0, _FLOAT), -grad * scale * by)
    return dx, dscale, dzero


def _as_results(node: fx.Node, *values: jax.Array) -> tuple[jax.Array, ...]:
    return tuple(convert(value, out_dtype(node, index)) for index, value in enumerate(values))
