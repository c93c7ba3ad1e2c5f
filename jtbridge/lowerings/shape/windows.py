"""Sliding windows over an array, and their gradients, which are sums of overlapping windows."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jtbridge.lowerings._common import axis_of, computed_once, opmath
from jtbridge.lowerings._registry import register_lowering
from jtbridge.lowerings.indexing._places import at_axis

# With at most this many shifts, overlapping windows are summed as shifted arrays, which is faster than a scatter.
_SHIFTS = 16


def _windows_along_axis(x: jax.Array, axis: int, size: int, step: int, dilation: int = 1) -> jax.Array:
    """Return the windows along an axis, which becomes two axes: the window, and the place in the window."""
    length = x.shape[axis]
    count = (length - dilation * (size - 1) - 1) // step + 1
    before, after = x.shape[:axis], x.shape[axis + 1 :]
    if dilation == 1 and step == size:
        return lax.slice_in_dim(x, 0, count * size, axis=axis).reshape(*before, count, size, *after)
    if dilation == 1:
        starts = jnp.arange(count) * step
        return jax.vmap(lambda start: lax.dynamic_slice_in_dim(x, start, size, axis), out_axes=axis)(starts)
    places = jnp.arange(count)[:, None] * step + jnp.arange(size) * dilation
    return x.at[at_axis(places, axis)].get(mode="promise_in_bounds", wrap_negative_indices=False)


def _overlapped(grad: jax.Array, axis: int, length: int, step: int, dilation: int = 1) -> jax.Array:
    """Return the transpose of `_windows_along_axis`: the sum of the windows, each at the position it was taken from."""
    before, (count, size), after = grad.shape[:axis], grad.shape[axis : axis + 2], grad.shape[axis + 2 :]
    blocks = -(-size // step)
    if dilation == 1 and blocks <= min(_SHIFTS, size):
        filled = _padded_along_axis(grad, axis + 1, 0, blocks * step - size)
        total = jnp.zeros((*before, (count + blocks - 1) * step, *after), grad.dtype)
        for i in range(blocks):
            block = lax.slice_in_dim(filled, i * step, (i + 1) * step, axis=axis + 1)
            flat = block.reshape(*before, count * step, *after)
            total = total + _padded_along_axis(flat, axis, i * step, (blocks - 1 - i) * step)
        return _padded_along_axis(total, axis, 0, length - total.shape[axis])
    if size <= _SHIFTS:
        total = jnp.zeros((*before, length, *after), grad.dtype)
        for i in range(size):
            tap = lax.index_in_dim(grad, i, axis + 1, keepdims=False)
            reach = (count - 1) * step + 1
            total = total + _padded_along_axis(tap, axis, i * dilation, length - i * dilation - reach, step - 1)
        return total
    places = jnp.arange(count)[:, None] * step + jnp.arange(size) * dilation
    total = jnp.zeros((*before, length, *after), grad.dtype)
    return total.at[at_axis(places, axis)].add(grad, mode="promise_in_bounds")


def _padded_along_axis(x: jax.Array, axis: int, before: int, after: int, between: int = 0) -> jax.Array:
    config = [(before, after, between) if i == axis else (0, 0, 0) for i in range(x.ndim)]
    return lax.pad(x, jnp.zeros((), x.dtype), config)


@register_lowering("unfold", "unfold_copy")
def _unfold(x: jax.Array, dimension: int, size: int, step: int) -> jax.Array:
    if x.ndim == 0:
        return x.reshape(1)[:size]
    axis = axis_of(dimension, x.ndim)
    return jnp.moveaxis(_windows_along_axis(x, axis, size, step), axis + 1, -1)


@register_lowering("unfold_backward")
def _unfold_backward(grad: jax.Array, input_sizes: Sequence[int], dim: int, size: int, step: int) -> jax.Array:
    del size
    if len(input_sizes) == 0:
        return jnp.sum(grad, dtype=grad.dtype)
    axis = axis_of(dim, len(input_sizes))
    wide = jnp.moveaxis(grad, -1, axis + 1).astype(opmath(grad.dtype))
    return _overlapped(wide, axis, input_sizes[axis], step).astype(grad.dtype)


@register_lowering("im2col")
def _im2col(
    x: jax.Array,
    kernel_size: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
) -> jax.Array:
    def blocks(x: jax.Array) -> jax.Array:
        padded = jnp.pad(x, [(0, 0), (0, 0), *((p, p) for p in padding)])
        across = _windows_along_axis(padded, 3, kernel_size[1], stride[1], dilation[1])  # N C H nw kw
        both = _windows_along_axis(across, 2, kernel_size[0], stride[0], dilation[0])  # N C nh kh nw kw
        n, c, rows, _, columns, _ = both.shape
        return both.transpose(0, 1, 3, 5, 2, 4).reshape(n, c * kernel_size[0] * kernel_size[1], rows * columns)

    out = computed_once(blocks)(x if x.ndim == 4 else x[None])
    return out if x.ndim == 4 else out[0]


@register_lowering("col2im")
def _col2im(
    x: jax.Array,
    output_size: Sequence[int],
    kernel_size: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
) -> jax.Array:
    batched = (x if x.ndim == 3 else x[None]).astype(opmath(x.dtype))
    n, width = batched.shape[0], batched.shape[1]
    lengths = [output_size[i] + 2 * padding[i] for i in (0, 1)]
    rows, columns = ((lengths[i] - dilation[i] * (kernel_size[i] - 1) - 1) // stride[i] + 1 for i in (0, 1))
    c = width // (kernel_size[0] * kernel_size[1])
    split = batched.reshape(n, c, *kernel_size, rows, columns).transpose(0, 1, 4, 2, 5, 3)  # N C nh kh nw kw
    down = _overlapped(split, 2, lengths[0], stride[0], dilation[0])
    both = _overlapped(down, 3, lengths[1], stride[1], dilation[1])
    cropped = both[:, :, padding[0] : padding[0] + output_size[0], padding[1] : padding[1] + output_size[1]]
    return (cropped if x.ndim == 3 else cropped[0]).astype(x.dtype)
