"""Conversion of 64-bit arrays to pairs of 32-bit words, to pass them through `jax.pure_callback`.

`jax.pure_callback` canonicalises arrays on XLA's own threads, where a ``jax.enable_x64()`` block around the program has
no effect: float64 would arrive as float32.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jtbridge.core.array_types import ArrayType

_WORD = np.dtype(np.uint32)


def is_wide(type_: ArrayType) -> bool:
    """Return whether an array of this type is passed as words."""
    return type_.dtype.itemsize > 4 and type_.dtype.kind in "iufc" and type_.dtype != np.dtype(np.complex64)


def carried(type_: ArrayType) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype in which an array of this type is passed."""
    if not is_wide(type_):
        return jax.ShapeDtypeStruct(type_.shape, type_.dtype)
    tail = (2, 2) if type_.dtype.kind == "c" else (2,)
    return jax.ShapeDtypeStruct(type_.shape + tail, _WORD)


def pack(x: jax.Array, type_: ArrayType) -> jax.Array:
    """Convert a 64-bit argument to words, in the JAX program before the call."""
    if not is_wide(type_):
        return x
    if type_.dtype.kind == "c":
        x = jnp.stack([jnp.real(x), jnp.imag(x)], axis=-1)
    return jax.lax.bitcast_convert_type(x, _WORD)


def unpack(x: jax.Array, type_: ArrayType) -> jax.Array:
    """Convert a 64-bit result from words, in the JAX program after the call."""
    if not is_wide(type_):
        return x
    with jax.enable_x64(True):  # the gradient of a 64-bit array has 64 bits, also where x64 is off
        if type_.dtype.kind == "c":
            parts = jax.lax.bitcast_convert_type(x, jnp.float64)
            return jax.lax.complex(parts[..., 0], parts[..., 1])
        return jax.lax.bitcast_convert_type(x, type_.dtype)


def from_words(array: np.ndarray, type_: ArrayType) -> np.ndarray:
    """Convert a 64-bit argument from words, on the host."""
    if not is_wide(type_):
        return array
    return np.ascontiguousarray(array).reshape(-1).view(type_.dtype).reshape(type_.shape)


def to_words(array: np.ndarray, type_: ArrayType) -> np.ndarray:
    """Convert a 64-bit result to words, on the host."""
    return array.reshape(-1).view(_WORD).reshape(carried(type_).shape) if is_wide(type_) else array
