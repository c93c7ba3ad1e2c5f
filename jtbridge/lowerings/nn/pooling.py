"""Average and maximum pooling over windows of a fixed size, and their gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jtbridge.lowerings._common import opmath
from jtbridge.lowerings._registry import register_lowering
from jtbridge.lowerings.indexing._out_of_range import invalid_if, is_outside

from ._windows import Windows, flat_positions, larger, lowest, scattered_into_planes, windows

Sizes = Sequence[int]


def _divisors(w: Windows, count_include_pad: bool) -> np.ndarray | jax.Array:
    """Return the number of elements in each window.

    With `count_include_pad`, elements of the given padding count. Elements beyond this padding, which `ceil_mode` may
    add, never count.
    """
    counts: Any = np.ones((), np.int64)
    for n, o, k, s, p in zip(w.inputs, w.outputs, w.kernel, w.stride, w.padding, strict=True):
        xp = np if isinstance(n, int) else jnp  # NumPy does not accept symbolic sizes
        start = xp.arange(o) * s - p
        end = xp.minimum(start + k, n + p)
        length = end - start if count_include_pad else xp.minimum(end, n) - xp.maximum(start, 0)
        counts = counts[..., None] * length
    return counts.clip(1)


def _window_sums(x: jax.Array, w: Windows) -> jax.Array:
    return lax.reduce_window(x, np.zeros((), x.dtype), lax.add, **w.arguments(x.ndim))


def _avg_pool(
    rank: int,
    x: jax.Array,
    kernel_size: Sizes,
    stride: Sizes = (),
    padding: Sizes = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> jax.Array:
    w = windows(x, kernel_size, stride, padding, (1,), ceil_mode, rank)
    total = _window_sums(x.astype(opmath(x.dtype)), w)
    by = _divisors(w, count_include_pad) if divisor_override is None else np.full((1,) * rank, divisor_override)
    divisor = jnp.broadcast_to(jnp.asarray(by, total.dtype), total.shape)
    return lax.div(total, divisor).astype(x.dtype)  # integers round towards zero


def _avg_pool_backward(
    rank: int,
    grad: jax.Array,
    x: jax.Array,
    kernel_size: Sizes,
    stride: Sizes,
    padding: Sizes,
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> jax.Array:
    w = windows(x, kernel_size, stride, padding, (1,), ceil_mode, rank)
    by = _divisors(w, count_include_pad) if divisor_override is None else divisor_override
    inner = opmath(grad.dtype)
    wide = jax.ShapeDtypeStruct(x.shape, inner)
    (found,) = jax.linear_transpose(lambda a: _window_sums(a, w), wide)(grad.astype(inner) / jnp.asarray(by, inner))
    return found.astype(grad.dtype)


def _max_pool(
    rank: int,
    x: jax.Array,
    kernel_size: Sizes,
    stride: Sizes = (),
    padding: Sizes = (0,),
    dilation: Sizes = (1,),
    ceil_mode: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Return the largest element of each window and its flat position in the plane.

    The values are computed separately, so that XLA can drop the positions if they are not used.
    """
    w = windows(x, kernel_size, stride, padding, dilation, ceil_mode, rank)
    how = w.arguments(x.ndim)
    value = lax.reduce_window(x, lowest(x.dtype), lax.max, **how)
    flat = flat_positions(w.inputs)
    none = np.asarray(np.iinfo(flat.dtype).max, flat.dtype)
    place = jnp.broadcast_to(jnp.asarray(flat), x.shape)
    _, found = lax.reduce_window((x, place), (lowest(x.dtype), none), larger, **how)
    return value, found.astype(np.int64)


@register_lowering("max_unpool2d", "max_unpool3d")
def _max_unpool(x: jax.Array, indices: jax.Array, output_size: Sizes, *_: Sizes) -> jax.Array:
    """Return zeros with `x` at the indices. The stride and the padding after `output_size` are not needed."""
    rank = len(output_size)
    result = scattered_into_planes(x, indices, (*x.shape[:-rank], *output_size), rank, add=False)
    return invalid_if(is_outside((math.prod(output_size),), (indices,), wrap=False), result)


def _register_pools(rank: int) -> None:
    register_lowering(f"avg_pool{rank}d")(lambda *args: _avg_pool(rank, *args))
    register_lowering(f"avg_pool{rank}d_backward")(lambda *args: _avg_pool_backward(rank, *args))
    register_lowering(f"max_pool{rank}d_with_indices")(lambda *args: _max_pool(rank, *args))

    @register_lowering(
        f"max_pool{rank}d_with_indices_backward",
        f"adaptive_max_pool{rank}d_backward",
        f"fractional_max_pool{rank}d_backward",
    )
    def _(grad: jax.Array, x: jax.Array, *options_and_indices: Any) -> jax.Array:
        """Return the gradients of maxima, added up at the positions of the maxima."""
        wide = grad.astype(opmath(grad.dtype))
        return scattered_into_planes(wide, options_and_indices[-1], x.shape, rank, add=True).astype(grad.dtype)


for _rank in (2, 3):
    _register_pools(_rank)
