"""Padding at the edges of an array, and its gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jtbridge.lowerings._common import opmath
from jtbridge.lowerings._registry import register_lowering

Pad = Callable[[jax.Array, int, int, int], jax.Array]


@register_lowering("constant_pad_nd")
def _constant_pad(x: jax.Array, pad: Sequence[int], value: Any = 0) -> jax.Array:
    config = [(0, 0, 0)] * x.ndim
    for i in range(len(pad) // 2):  # (before, after) per dimension, from the last one on; negative numbers crop
        config[-1 - i] = (pad[2 * i], pad[2 * i + 1], 0)
    return lax.pad(x, jnp.asarray(value, x.dtype), config)


def _reflection_padded(x: jax.Array, axis: int, before: int, after: int) -> jax.Array:
    length = x.shape[axis]
    parts = [lax.slice_in_dim(x, max(-before, 0), length - max(-after, 0), axis=axis)]
    if before > 0:
        parts.insert(0, lax.rev(lax.slice_in_dim(x, 1, 1 + before, axis=axis), (axis,)))
    if after > 0:
        parts.append(lax.rev(lax.slice_in_dim(x, length - 1 - after, length - 1, axis=axis), (axis,)))
    return lax.concatenate(parts, axis)


def _replication_padded(x: jax.Array, axis: int, before: int, after: int) -> jax.Array:
    length = x.shape[axis]
    parts = [lax.slice_in_dim(x, max(-before, 0), length - max(-after, 0), axis=axis)]
    if before > 0:
        parts.insert(0, _repeated_along(lax.slice_in_dim(x, 0, 1, axis=axis), axis, before))
    if after > 0:
        parts.append(_repeated_along(lax.slice_in_dim(x, length - 1, length, axis=axis), axis, after))
    return lax.concatenate(parts, axis)


def _repeated_along(x: jax.Array, axis: int, count: int) -> jax.Array:
    return jnp.broadcast_to(x, (*x.shape[:axis], count, *x.shape[axis + 1 :]))


def _pad(x: jax.Array, padding: Sequence[int], by: Pad) -> jax.Array:
    for i in range(len(padding) // 2):
        x = by(x, x.ndim - 1 - i, padding[2 * i], padding[2 * i + 1])
    return x


def _register(name: str, by: Pad, dimensions: int) -> None:
    def forward(x: jax.Array, padding: Sequence[int]) -> jax.Array:
        return _pad(x, padding, by)

    def backward(grad: jax.Array, x: jax.Array, padding: Sequence[int]) -> jax.Array:
        dtype = opmath(grad.dtype)
        transpose = jax.linear_transpose(lambda a: _pad(a, padding, by), jax.ShapeDtypeStruct(x.shape, dtype))
        return transpose(grad.astype(dtype))[0].astype(grad.dtype)

    register_lowering(f"{name}{dimensions}d")(forward)
    register_lowering(f"{name}{dimensions}d_backward")(backward)


for _dimensions in (1, 2, 3):
    _register("reflection_pad", _reflection_padded, _dimensions)
    _register("replication_pad", _replication_padded, _dimensions)
