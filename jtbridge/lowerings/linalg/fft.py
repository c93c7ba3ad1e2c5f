"""Discrete Fourier transforms."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jtbridge.lowerings._common import axis_of, size_along, size_of
from jtbridge.lowerings._registry import register_lowering
from jtbridge.lowerings._row_major import row_major

# The divisor for each of torch's normalization codes: 1, the square root of the number of elements, that number.
_DIVISORS = {0: lambda n: 1.0, 1: math.sqrt, 2: float}


def _normalized_transform(x: jax.Array, count: int, normalization: int) -> jax.Array:
    divisor = _DIVISORS[normalization](count)
    return x if divisor == 1.0 else x * jnp.asarray(1.0 / divisor, x.real.dtype)


def _complex_transform(x: jax.Array, axes: Sequence[int], forward: bool) -> jax.Array:
    """Return the transform without a divisor, computed axis by axis."""
    if size_of(x) == 0:
        return x
    for axis in axes:
        x = _transform_along_axis(x, axis, jnp.fft.fft if forward else functools.partial(jnp.fft.ifft, norm="forward"))
    return x


def _transform_along_axis(x: jax.Array, axis: int, transform: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Return the transform along one axis; `transform` works along the last one."""
    return jnp.moveaxis(row_major(transform(jnp.moveaxis(x, axis, -1))), -1, axis)


@register_lowering("_fft_c2c")
def _c2c(x: jax.Array, dim: Sequence[int], normalization: int, forward: bool) -> jax.Array:
    axes = [axis_of(d, x.ndim) for d in dim]
    return _normalized_transform(_complex_transform(x, axes, forward), size_along(x, axes), normalization)


@register_lowering("_fft_r2c")
def _r2c(x: jax.Array, dim: Sequence[int], normalization: int, onesided: bool) -> jax.Array:
    axes = [axis_of(d, x.ndim) for d in dim]
    if not onesided:
        x = x.astype(np.complex128 if x.dtype == np.float64 else np.complex64)
        return _c2c(x, dim, normalization, True)
    count = size_along(x, axes)
    if size_of(x) == 0:
        shape = [n // 2 + 1 if i == axes[-1] else n for i, n in enumerate(x.shape)]
        return jnp.zeros(shape, np.complex128 if x.dtype == np.float64 else np.complex64)
    y = _complex_transform(_transform_along_axis(x, axes[-1], jnp.fft.rfft), axes[:-1], True)
    return _normalized_transform(y, count, normalization)


@register_lowering("_fft_c2r")
def _c2r(x: jax.Array, dim: Sequence[int], normalization: int, last_dim_size: int) -> jax.Array:
    axes = [axis_of(d, x.ndim) for d in dim]
    shape = [last_dim_size if i == axes[-1] else n for i, n in enumerate(x.shape)]
    if math.prod(shape) == 0 or size_of(x) == 0:
        return jnp.zeros(shape, x.real.dtype)
    y = _complex_transform(x, axes[:-1], False)
    y = _transform_along_axis(y, axes[-1], functools.partial(jnp.fft.irfft, n=last_dim_size, norm="forward"))
    return _normalized_transform(y, size_along(y, axes), normalization)
