"""Convolutions of one to three dimensions, transposed ones included, and their gradients."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jtbridge.lowerings._common import computed_once
from jtbridge.lowerings._registry import register_lowering

from ._windows import per_dimension

Sizes = Sequence[int]


@dataclasses.dataclass(frozen=True)
class _Window:
    """The geometry of a convolution for XLA.

    A transposed convolution becomes an ordinary one that dilates its input by `spread` and uses a flipped kernel.
    """

    strides: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    spread: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int


def _ordinary_window(kernel: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes, groups: int) -> _Window:
    n = len(kernel)
    pads = tuple((p, p) for p in per_dimension(padding, n))
    return _Window(per_dimension(stride, n), pads, (1,) * n, per_dimension(dilation, n), groups)


def _transposed_window(
    kernel: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes, more: Sizes, groups: int
) -> _Window:
    n = len(kernel)
    dilation = per_dimension(dilation, n)
    margins = [d * (k - 1) - p for d, k, p in zip(dilation, kernel, per_dimension(padding, n), strict=True)]
    pads = tuple((m, m + extra) for m, extra in zip(margins, per_dimension(more, n), strict=True))
    return _Window((1,) * n, pads, per_dimension(stride, n), tuple(dilation), groups)


def _flipped(weight: jax.Array, groups: int) -> jax.Array:
    """Return the weight of the ordinary convolution that computes a transposed convolution with `weight`."""
    ins, outs, *kernel = weight.shape
    weight = jnp.flip(weight, range(2, weight.ndim)).reshape(groups, ins // groups, outs, *kernel)
    return jnp.swapaxes(weight, 1, 2).reshape(groups * outs, ins // groups, *kernel)


def _convolved(x: jax.Array, weight: jax.Array, window: _Window) -> jax.Array:
    if jnp.issubdtype(x.dtype, jnp.integer):
        return _convolved_by_taps(x, weight, window)
    if _is_depthwise(weight, window):
        by_taps = computed_once(lambda x, w: _depthwise(x, w, window), elsewhere=lambda x, w: _by_xla(x, w, window))
        return by_taps(x, weight)
    if _is_pointwise(weight, window):
        return lax.platform_dependent(x, weight, cpu=_pointwise, default=lambda x, w: _by_xla(x, w, window))
    return _by_xla(x, weight, window)


def _by_xla(x: jax.Array, weight: jax.Array, window: _Window) -> jax.Array:
    return lax.conv_general_dilated(
        x, weight, window.strides, window.padding, window.spread, window.dilation, feature_group_count=window.groups
    )


# On a CPU, XLA's depthwise convolution takes up to a hundred times as long as torch's; a sum of shifted products, one
# for each element of the kernel, takes up to twice as long. XLA's pointwise convolution takes four times as long as
# torch's; a matrix product takes 1.2 times as long.
_MAX_TAPS = 64
_MAX_GROUPS = 64


def _is_depthwise(weight: jax.Array, window: _Window) -> bool:
    return window.groups > 1 and weight.shape[1] == 1 and 1 < math.prod(weight.shape[2:]) <= _MAX_TAPS


def _depthwise(x: jax.Array, weight: jax.Array, window: _Window) -> jax.Array:
    dtype, wide = x.dtype, jnp.promote_types(x.dtype, jnp.float32)  # torch adds 16-bit floats as float32
    x, weight = _padded_input(x.astype(wide), window), weight.astype(wide)
    batch, groups = x.shape[0], window.groups
    shape = (batch, groups, weight.shape[0] // groups, *_lengths(x, weight, window))
    total = jnp.zeros(shape, wide)
    for tap in itertools.product(*map(range, weight.shape[2:])):
        scale = weight[(..., 0, *tap)].reshape(1, groups, -1, *(1,) * (x.ndim - 2))
        total = total + _inputs_of_tap(x, tap, shape[3:], window)[:, :, None] * scale
    return total.reshape(batch, weight.shape[0], *shape[3:]).astype(dtype)


# y[o] = sum_t xp[o s + t d] w[t] for strides s and dilation d, where xp is x with spread r and padding p before it.
# So the gradient by xp[m] is sum_t g[(m - t d) / s] w[t]: a convolution of g, spread by s and padded by d (k - 1), with
# the flipped kernel. The gradient by x[i] = xp[p + i r] is every r-th result of that convolution, from p on.
def _depthwise_by_input(grad: jax.Array, shape: Sizes, weight: jax.Array, window: _Window) -> jax.Array:
    pads = []
    for kernel, (before, _), s, r, d, length, results in zip(
        weight.shape[2:],
        window.padding,
        window.strides,
        window.spread,
        window.dilation,
        shape[2:],
        grad.shape[2:],
        strict=True,
    ):
        first = d * (kernel - 1) - before
        pads.append((first, (length - 1) * r + d * (kernel - 1) - first - (results - 1) * s))
    each = _Window(window.spread, tuple(pads), window.strides, window.dilation, weight.shape[0])
    wide = jnp.promote_types(grad.dtype, jnp.float32)
    parts = _depthwise(grad.astype(wide), jnp.flip(weight, range(2, weight.ndim)), each)
    return parts.reshape(*shape[:2], weight.shape[0] // shape[1], *shape[2:]).sum(2).astype(grad.dtype)


def _depthwise_by_weight(grad: jax.Array, x: jax.Array, weight_shape: Sizes, window: _Window) -> jax.Array:
    """Return the gradient of the weight, by a loop over the elements of the kernel, which XLA compiles once."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    x = _padded_input(x.astype(wide), window)
    batch, groups, *lengths = grad.shape[0], window.groups, *grad.shape[2:]
    grad = grad.astype(wide).reshape(batch, groups, weight_shape[0] // groups, *lengths)
    reach = [(n - 1) * s + 1 for n, s in zip(lengths, window.strides, strict=True)]
    steps = tuple(slice(None, None, s) for s in window.strides)

    def of_tap(start: jax.Array) -> jax.Array:
        part = lax.dynamic_slice(x, (*start,), (batch, groups, *reach))[(..., *steps)]
        return jnp.sum(part[:, :, None] * grad, (0, *range(3, grad.ndim)))

    starts = itertools.product(
        [0], [0], *(range(0, d * k, d) for d, k in zip(window.dilation, weight_shape[2:], strict=True))
    )
    found = lax.map(of_tap, jnp.array(list(starts), np.int32))
    return jnp.moveaxis(found, 0, -1).reshape(weight_shape).astype(grad.dtype)


def _is_pointwise(weight: jax.Array, window: _Window) -> bool:
    ones = (*weight.shape[2:], *window.strides, *window.spread, window.groups)
    return all(n == 1 for n in ones) and not any(map(any, window.padding))


def _pointwise(x: jax.Array, weight: jax.Array) -> jax.Array:
    flat = x.reshape(*x.shape[:2], math.prod(x.shape[2:]))
    matrix = jnp.broadcast_to(weight.reshape(weight.shape[:2]), (x.shape[0], *weight.shape[:2]))
    return (matrix @ flat).reshape(x.shape[0], weight.shape[0], *x.shape[2:])


def _convolved_by_taps(x: jax.Array, weight: jax.Array, window: _Window) -> jax.Array:
    """Convolve as a sum of products over the kernel's elements, because GPUs have no convolution of integers."""
    x = _padded_input(x, window)
    batch, groups, lengths = x.shape[0], window.groups, _lengths(x, weight, window)
    total = jnp.zeros((batch, groups, weight.shape[0] // groups, *lengths), x.dtype)
    for tap in itertools.product(*map(range, weight.shape[2:])):
        part = _inputs_of_tap(x, tap, lengths, window).reshape(batch, groups, weight.shape[1], *lengths)
        taken = weight[(..., *tap)].reshape(groups, -1, weight.shape[1])
        total = total + jnp.einsum("goi,bgi...->bgo...", taken, part)
    return total.reshape(batch, weight.shape[0], *lengths)


def _padded_input(x: jax.Array, window: _Window) -> jax.Array:
    zero = np.zeros((), x.dtype)
    return lax.pad(x, zero, [(0, 0, 0)] * 2 + [(*p, s - 1) for p, s in zip(window.padding, window.spread, strict=True)])


def _lengths(padded: jax.Array, weight: jax.Array, window: _Window) -> list[int]:
    reach = [d * (k - 1) for d, k in zip(window.dilation, weight.shape[2:], strict=True)]
    return [(n - r - 1) // s + 1 for n, r, s in zip(padded.shape[2:], reach, window.strides, strict=True)]


def _inputs_of_tap(padded: jax.Array, tap: Sizes, lengths: Sizes, window: _Window) -> jax.Array:
    """Return the elements of a padded array that one element of the kernel multiplies."""
    for axis, (i, d, n, s) in enumerate(zip(tap, window.dilation, lengths, window.strides, strict=True), 2):
        padded = lax.slice_in_dim(padded, i * d, i * d + (n - 1) * s + 1, s, axis)
    return padded


def _ordinary(
    weight: jax.Array,
    stride: Sizes,
    padding: Sizes,
    dilation: Sizes,
    transposed: bool,
    output_padding: Sizes,
    groups: int,
) -> tuple[jax.Array, _Window]:
    """Return the weight and the window of the equivalent convolution that is not transposed."""
    kernel = weight.shape[2:]
    if not transposed:
        return weight, _ordinary_window(kernel, stride, padding, dilation, groups)
    window = _transposed_window(kernel, stride, padding, dilation, output_padding, groups)
    return _flipped(weight, groups), window


def _biased(y: jax.Array, bias: jax.Array | None) -> jax.Array:
    return y if bias is None else y + bias.reshape(-1, *(1,) * (y.ndim - 2))


@register_lowering("convolution", "convolution_overrideable", "_convolution")
def _convolution(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    stride: Sizes,
    padding: Sizes,
    dilation: Sizes,
    transposed: bool,
    output_padding: Sizes,
    groups: int,
    *_: bool,
) -> jax.Array:
    ordinary = _ordinary(weight, stride, padding, dilation, transposed, output_padding, groups)
    return _biased(_convolved(x, *ordinary), bias)


@register_lowering("convolution_backward")
def _convolution_backward(
    grad: jax.Array,
    x: jax.Array,
    weight: jax.Array,
    bias_sizes: Sizes | None,
    stride: Sizes,
    padding: Sizes,
    dilation: Sizes,
    transposed: bool,
    output_padding: Sizes,
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[Any, Any, Any]:
    del bias_sizes
    by_input = by_weight = by_bias = None
    if output_mask[0]:
        ordinary = _ordinary(weight, stride, padding, dilation, transposed, output_padding, groups)
        by_input = _by_input(grad, x, *ordinary)
    if output_mask[1]:
        by_weight = _by_weight(grad, x, weight, stride, padding, dilation, transposed, groups)
    if output_mask[2]:
        by_bias = jnp.sum(grad, axis=(0, *range(2, grad.ndim)), dtype=grad.dtype)
    return by_input, by_weight, by_bias


def _by_input(grad: jax.Array, x: jax.Array, weight: jax.Array, window: _Window) -> jax.Array:
    def transposed(grad: jax.Array, weight: jax.Array) -> jax.Array:
        (gradient,) = jax.linear_transpose(lambda a: _by_xla(a, weight, window), x)(grad)
        return gradient

    if _is_depthwise(weight, window):
        return computed_once(lambda g, w: _depthwise_by_input(g, x.shape, w, window), elsewhere=transposed)(
            grad, weight
        )
    if _is_pointwise(weight, window):
        return _convolved(grad, weight.swapaxes(0, 1), window)
    return transposed(grad, weight)


# The gradient of <grad, conv(x, w)> by w. A transposed convolution is the transpose of conv(., w), so its gradient by w
# is the gradient of <x, conv(grad, w)>. XLA's gradient of a transposed convolution takes forty times as long.
def _by_weight(
    grad: jax.Array,
    x: jax.Array,
    weight: jax.Array,
    stride: Sizes,
    padding: Sizes,
    dilation: Sizes,
    transposed: bool,
    groups: int,
) -> jax.Array:
    window = _ordinary_window(weight.shape[2:], stride, padding, dilation, groups)
    if transposed:
        shape = jax.eval_shape(lambda w: _by_xla(grad, w, window), weight).shape
        # With an output padding of the stride or more, conv(grad, w) is larger than x, so x is padded with zeros.
        further = [(0, n - m) for n, m in zip(shape, x.shape, strict=True)]
        grad, x = jnp.pad(x, further), grad

    def by_xla(grad: jax.Array, x: jax.Array) -> jax.Array:
        (gradient,) = jax.linear_transpose(lambda w: _by_xla(x, w, window), weight)(grad)
        return gradient

    if groups > 1 and weight.shape[1] == 1:
        return lax.platform_dependent(
            grad, x, cpu=lambda g, x: _depthwise_by_weight(g, x, weight.shape, window), default=by_xla
        )
    if groups == 1 or groups > _MAX_GROUPS:
        (gradient,) = jax.linear_transpose(lambda w: _convolved(x, w, window), weight)(grad)
        return gradient
    one = dataclasses.replace(window, groups=1)
    # One gradient for each group: XLA's gradient of a grouped convolution takes a hundred times as long on a CPU.
    parts = zip(*(jnp.split(a, groups, axis) for a, axis in ((grad, 1), (x, 1), (weight, 0))), strict=True)
    return jnp.concatenate(
        [jax.linear_transpose(lambda w, x=x: _convolved(x, w, one), weight)(grad)[0] for grad, x, weight in parts]
    )


@register_lowering(
    *("_slow_conv2d_forward", "slow_conv3d_forward", "slow_conv_dilated2d", "slow_conv_dilated3d"),
    *("_conv_depthwise2d", "conv_depthwise3d"),
)
def _slow_convolution(
    x: jax.Array,
    weight: jax.Array,
    kernel_size: Sizes,
    bias: jax.Array | None = None,
    stride: Sizes = (1,),
    padding: Sizes = (0,),
    dilation: Sizes = (1,),
) -> jax.Array:
    weight = weight.reshape(weight.shape[0], -1, *kernel_size)  # some operators take the weight as a matrix
    batched = x if x.ndim == weight.ndim else x[None]
    groups = batched.shape[1] // weight.shape[1]
    window = _ordinary_window(kernel_size, stride, padding, dilation, groups)
    y = _biased(_convolved(batched, weight, window), bias)
    return y if x.ndim == weight.ndim else y[0]


@register_lowering("slow_conv_transpose2d", "slow_conv_transpose3d")
def _slow_transposed_convolution(
    x: jax.Array,
    weight: jax.Array,
    kernel_size: Sizes,
    bias: jax.Array | None = None,
    stride: Sizes = (1,),
    padding: Sizes = (0,),
    output_padding: Sizes = (0,),
    dilation: Sizes = (1,),
) -> jax.Array:
    batched = x if x.ndim == weight.ndim else x[None]
    window = _transposed_window(kernel_size, stride, padding, dilation, output_padding, 1)
    y = _biased(_convolved(batched, _flipped(weight, 1), window), bias)
    return y if x.ndim == weight.ndim else y[0]


@register_lowering("conv_tbc")
def _conv_tbc(x: jax.Array, weight: jax.Array, bias: jax.Array, pad: int = 0) -> jax.Array:
    """Convolve `x` (time, batch, channel) with `weight` (kernel, input channel, output channel)."""
    window = _ordinary_window((1,), (1,), (pad,), (1,), 1)
    y = _convolved(jnp.transpose(x, (1, 2, 0)), jnp.transpose(weight, (2, 1, 0)), window)
    return jnp.transpose(y, (2, 0, 1)) + bias
