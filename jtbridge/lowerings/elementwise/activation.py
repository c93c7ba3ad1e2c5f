"""Activation functions and their backward operators."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from torch import fx

from jtbridge.lowerings._common import axis_of, out_dtype
from jtbridge.lowerings._registry import register_lowering

from ._common import elementwise, number, operands


@register_lowering("relu")
def _relu(x: jax.Array) -> jax.Array:
    return jnp.maximum(x, jnp.zeros((), x.dtype))


# Sigmoid and tanh


def _logistic(x: jax.Array) -> jax.Array:
    return 1 / (1 + jnp.exp(-x)) if jnp.iscomplexobj(x) else lax.logistic(x)


elementwise("sigmoid")(_logistic)
elementwise("silu")(lambda x: x * _logistic(x))
elementwise("sigmoid_backward")(lambda grad, out: grad * jnp.conj((1 - out) * out))
elementwise("tanh_backward")(lambda grad, out: grad * jnp.conj(1 - out * out))


@elementwise("silu_backward")
def _silu_backward(grad: jax.Array, x: jax.Array) -> jax.Array:
    gate = _logistic(x)
    return grad * jnp.conj(gate * (1 + x * (1 - gate)))


@elementwise("mish")
def _mish(x: jax.Array) -> jax.Array:
    return x * jnp.tanh(jnp.log1p(jnp.exp(x)))


@elementwise("mish_backward")
def _mish_backward(grad: jax.Array, x: jax.Array) -> jax.Array:
    tanh = jnp.tanh(jnp.log1p(jnp.exp(x)))
    return grad * (tanh + x * lax.logistic(x) * (1 - tanh * tanh))


@register_lowering("log_sigmoid_forward", node=True)
def _log_sigmoid_forward(x: jax.Array, *, node: fx.Node) -> tuple[jax.Array, jax.Array]:
    (value,) = operands(node, x)
    decay = jnp.exp(-jnp.abs(value))
    return (jnp.minimum(value, 0) - jnp.log1p(decay)).astype(out_dtype(node)), decay.astype(out_dtype(node, 1))


@register_lowering("log_sigmoid_backward", node=True)
def _log_sigmoid_backward(grad: jax.Array, x: jax.Array, buffer: jax.Array, *, node: fx.Node) -> jax.Array:
    upstream, value, decay = operands(node, grad, x, buffer)
    if decay.shape != value.shape:  # on devices other than the CPU, the forward returns an empty buffer
        decay = jnp.exp(-jnp.abs(value))
    part = decay / (1 + decay)
    return (upstream * jnp.where(value < 0, 1 - part, part)).astype(out_dtype(node))


@register_lowering("logit", node=True)
def _logit(x: jax.Array, eps: float | None = None, *, node: fx.Node) -> jax.Array:
    (value,) = operands(node, x)
    if eps is not None:
        low, high = number(eps, np.dtype(value.dtype)), number(1 - eps, np.dtype(value.dtype))
        value = jnp.where(value < low, low, jnp.where(value > high, high, value))
    return jnp.log(value / (1 - value)).astype(out_dtype(node))


@register_lowering("logit_backward", node=True)
def _logit_backward(grad: jax.Array, x: jax.Array, eps: float | None = None, *, node: fx.Node) -> jax.Array:
    """Return the gradient of `logit`: 0 where the value was clamped, and NaN where it is NaN."""
    upstream, value = operands(node, grad, x)
    clamps = eps is not None and eps >= 0
    margin = eps if eps is not None and clamps else 0.0
    low, high = (number(each, np.dtype(value.dtype)) for each in (margin, 1 - margin))
    slope = jnp.where((value == 0) | (value == 1), jnp.inf, 1 / (value * (1 - value)))
    outside = jnp.zeros_like(value) if clamps else jnp.full_like(value, jnp.nan)
    return jnp.where((value < low) | (value > high), outside, upstream * slope).astype(out_dtype(node))


# GELU


@register_lowering("gelu", node=True)
def _gelu(x: jax.Array, *, approximate: str = "none", node: fx.Node) -> jax.Array:
    (value,) = operands(node, x)
    return (value * _gelu_gate(value, approximate)).astype(out_dtype(node))


def _gelu_gate(x: jax.Array, approximate: str) -> jax.Array:
    if approximate == "tanh":
        return 0.5 * (1 + jnp.tanh(_gelu_inner(x)))
    return 0.5 * (1 + lax.erf(x * np.sqrt(0.5).astype(x.dtype)))


def _gelu_inner(x: jax.Array) -> jax.Array:
    return np.sqrt(2 / np.pi).astype(x.dtype) * (x + 0.044715 * x * x * x)


@register_lowering("gelu_backward", node=True)
def _gelu_backward(grad: jax.Array, x: jax.Array, *, approximate: str = "none", node: fx.Node) -> jax.Array:
    upstream, value = operands(node, grad, x)
    if approximate == "tanh":
        tanh = jnp.tanh(_gelu_inner(value))
        inner = np.sqrt(2 / np.pi).astype(value.dtype) * (1 + 3 * 0.044715 * value * value)
        slope = 0.5 * (1 + tanh) + 0.5 * value * (1 - tanh * tanh) * inner
    else:
        density = jnp.exp(-0.5 * value * value) * (1 / np.sqrt(2 * np.pi)).astype(value.dtype)
        slope = _gelu_gate(value, approximate) + value * density
    return (upstream * slope).astype(out_dtype(node))


# Exponential linear units


def _elu_value(x: jax.Array, alpha: Any, scale: Any, input_scale: Any) -> jax.Array:
    return jnp.where(x < 0, jnp.expm1(x * input_scale) * (alpha * scale), x * scale)


@register_lowering("elu", node=True)
def _elu(x: jax.Array, alpha: Any = 1, scale: Any = 1, input_scale: Any = 1, *, node: fx.Node) -> jax.Array:
    (value,) = operands(node, x)
    return _elu_value(value, float(alpha), float(scale), float(input_scale)).astype(out_dtype(node))


@register_lowering("celu", node=True)
def _celu(x: jax.Array, alpha: Any = 1.0, *, node: fx.Node) -> jax.Array:
    (value,) = operands(node, x)
    return _elu_value(value, float(alpha), 1.0, 1 / alpha).astype(out_dtype(node))


@register_lowering("elu_backward", node=True)
def _elu_backward(
    grad: jax.Array, alpha: Any, scale: Any, input_scale: Any, is_result: bool, kept: jax.Array, *, node: fx.Node
) -> jax.Array:
    upstream, value = operands(node, grad, kept)
    growth = value + float(alpha * scale) if is_result else float(alpha * scale) * jnp.exp(value * float(input_scale))
    slope = jnp.where(value > 0, float(scale), float(input_scale) * growth)
    return (upstream * slope).astype(out_dtype(node))


# Piecewise linear functions


@register_lowering("leaky_relu", node=True)
def _leaky_relu(x: jax.Array, negative_slope: Any = 0.01, *, node: fx.Node) -> jax.Array:
    value, slope = operands(node, x, negative_slope, exact=True)
    return jnp.where(value > 0, value, value * slope).astype(out_dtype(node))


@register_lowering("leaky_relu_backward", node=True)
def _leaky_relu_backward(
    grad: jax.Array, kept: jax.Array, negative_slope: Any, self_is_result: bool, *, node: fx.Node
) -> jax.Array:
    del self_is_result  # the result has the sign of the argument
    upstream, slope = operands(node, grad, negative_slope, exact=True)
    return jnp.where(kept > 0, upstream, upstream * slope).astype(out_dtype(node))


@elementwise("_prelu_kernel")
def _prelu(x: jax.Array, weight: jax.Array) -> jax.Array:
    return jnp.where(x > 0, x, weight * x)


@register_lowering("_prelu_kernel_backward", node=True)
def _prelu_backward(grad: jax.Array, x: jax.Array, weight: jax.Array, *, node: fx.Node) -> tuple[jax.Array, jax.Array]:
    upstream, value, slope = operands(node, grad, x, weight)
    of_input = jnp.where(value > 0, upstream, slope * upstream)
    of_weight = jnp.where(value > 0, 0, value * upstream)
    return of_input.astype(out_dtype(node)), of_weight.astype(out_dtype(node, 1))


@register_lowering("hardtanh")
def _hardtanh(x: jax.Array, min_val: Any = -1, max_val: Any = 1) -> jax.Array:
    dtype = np.dtype(x.dtype)
    return jnp.minimum(jnp.maximum(x, number(min_val, dtype)), number(max_val, dtype))


@register_lowering("hardtanh_backward", node=True)
def _hardtanh_backward(grad: jax.Array, x: jax.Array, min_val: Any, max_val: Any, *, node: fx.Node) -> jax.Array:
    wide, low, high = operands(node, x, min_val, max_val, exact=True)
    return jnp.where((wide > low) & (wide < high), grad, jnp.zeros((), grad.dtype))


elementwise("hardswish")(lambda x: x * jnp.clip(x + 3, 0, 6) / 6)
elementwise("hardsigmoid")(lambda x: jnp.clip(x + 3, 0, 6) / 6)


@elementwise("hardswish_backward")
def _hardswish_backward(grad: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.where(x <= -3, 0, jnp.where(x >= 3, grad, grad * (x / 3 + 0.5)))


@elementwise("hardsigmoid_backward")
def _hardsigmoid_backward(grad: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.where((x > -3) & (x < 3), grad / 6, 0)


@elementwise("hardshrink")
def _hardshrink(x: jax.Array, lambd: Any = 0.5) -> jax.Array:
    return jnp.where((x >= -lambd) & (x <= lambd), 0, x)


@elementwise("softshrink", exact=True)
def _softshrink(x: jax.Array, lambd: Any = 0.5) -> jax.Array:
    return jnp.where(x > lambd, x - lambd, jnp.where(x < -lambd, x + lambd, x * 0))


@elementwise("softshrink_backward", "hardshrink_backward")
def _shrink_backward(grad: jax.Array, x: jax.Array, lambd: Any = 0.5) -> jax.Array:
    return jnp.where((x < -lambd) | (x > lambd), grad, 0)


# Softplus


@register_lowering("softplus", node=True)
def _softplus(x: jax.Array, beta: Any = 1, threshold: Any = 20, *, node: fx.Node) -> jax.Array:
    value, sharpness, limit = operands(node, x, beta, threshold, exact=True)
    scaled = value * sharpness
    return jnp.where(scaled > limit, value, jnp.log1p(jnp.exp(scaled)) / sharpness).astype(out_dtype(node))


@elementwise("softplus_backward", exact=True)
def _softplus_backward(grad: jax.Array, x: jax.Array, beta: Any = 1, threshold: Any = 20) -> jax.Array:
    scaled = x * beta
    return jnp.where(scaled > threshold, grad, grad * lax.logistic(scaled))


# Gated linear units


def _halves(x: jax.Array, dim: int) -> tuple[jax.Array, jax.Array]:
    first, second = jnp.split(x, 2, axis=axis_of(dim, x.ndim))
    return first, second


@register_lowering("glu", node=True)
def _glu(x: jax.Array, dim: int = -1, *, node: fx.Node) -> jax.Array:
    value, gate = _halves(operands(node, x)[0], dim)
    return (value * lax.logistic(gate)).astype(out_dtype(node))


@register_lowering("glu_backward", node=True)
def _glu_backward(grad: jax.Array, x: jax.Array, dim: int, *, node: fx.Node) -> jax.Array:
    upstream, whole = operands(node, grad, x)
    value, gate = _halves(whole, dim)
    open_ = lax.logistic(gate)
    parts = [upstream * open_, upstream * value * open_ * (1 - open_)]
    return jnp.concatenate(parts, axis=axis_of(dim, whole.ndim)).astype(out_dtype(node))


@register_lowering("glu_jvp", node=True)
def _glu_jvp(out: jax.Array, x: jax.Array, dx: jax.Array, dim: int, *, node: fx.Node) -> jax.Array:
    value, whole, tangent = operands(node, out, x, dx)
    open_ = lax.logistic(_halves(whole, dim)[1])
    of_value, of_gate = _halves(tangent, dim)
    return (of_value * open_ + value * (1 - open_) * of_gate).astype(out_dtype(node))


# Randomized leaky ReLU

_MIN_SPREAD = 1e-6


@register_lowering("rrelu_with_noise_backward", node=True)
def _rrelu_backward(
    grad: jax.Array,
    x: jax.Array,
    noise: jax.Array,
    lower: Any,
    upper: Any,
    training: bool,
    self_is_result: bool,
    *,
    node: fx.Node,
) -> jax.Array:
    upstream, slope = operands(node, grad, noise)
    if training and upper - lower > _MIN_SPREAD:
        return (upstream * slope).astype(out_dtype(node))
    return _leaky_relu_backward(grad, x, (lower + upper) / 2, self_is_result, node=node)
