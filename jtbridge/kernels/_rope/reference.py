"""Rotary position embedding of halves, or of neighbours, in jnp.

Arrays begin with an axis of groups `g`: each x is [g, batch, heads, tokens, d], or has the tokens before the heads; cos
and sin are [g, batch, tokens, d], where `g` is 1 if all groups share the angles, and `batch` is 1 if a batch shares
them.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jtbridge.kernels._shapes import accumulation_dtype, to_precision


@dataclasses.dataclass(frozen=True)
class Rotation:
    """The kind of rotation, and the layout of the arrays."""

    rounded: bool = False  # round products to the dtype of x before they are added
    interleaved: bool = False  # rotate neighbours instead of halves
    tokens_first: bool = False  # x is [g, batch, tokens, heads, d]

    @property
    def heads(self) -> int:
        """The axis of the heads."""
        return 3 if self.tokens_first else 2


def turned(x: jax.Array, *, interleaved: bool) -> jax.Array:
    """Return ``(-x2, x1)`` of the halves ``(x1, x2)`` of the last dimension, or of each pair of neighbours."""
    if interleaved:
        return jnp.stack([-x[..., 1::2], x[..., ::2]], -1).reshape(x.shape)
    first, second = jnp.split(x, 2, -1)
    return jnp.concatenate([-second, first], -1)


def forward(*arrays: jax.Array, rotation: Rotation) -> tuple[jax.Array, ...]:
    """Compute ``x * cos + turned(x) * sin`` for each x, given all x, then cos and sin.

    The result is rounded once; with `rotation.rounded`, the products are rounded too.
    """
    *xs, cos, sin = arrays
    wide_cos, wide_sin = _wide_angles(cos, sin, xs[0], rotation)

    def rotated(x: jax.Array) -> jax.Array:
        wide = x.astype(wide_cos.dtype)
        return _rounded_sum(
            wide * wide_cos, turned(wide, interleaved=rotation.interleaved) * wide_sin, x.dtype, rotation
        )

    return tuple(rotated(x) for x in xs)


def backward(*arrays: jax.Array, rotation: Rotation) -> tuple[jax.Array, ...]:
    """Return the gradients of all arguments of `forward`, given these arguments, then a cotangent for each x."""
    count = (len(arrays) - 2) // 2
    xs, (cos, sin), cts = arrays[:count], arrays[count : count + 2], arrays[count + 2 :]
    wide_cos, wide_sin = _wide_angles(cos, sin, xs[0], rotation)

    def rotated_back(ct: jax.Array) -> jax.Array:  # the transpose of `turned` is its negative
        wide = ct.astype(wide_cos.dtype)
        return _rounded_sum(
            wide * wide_cos, -turned(wide * wide_sin, interleaved=rotation.interleaved), ct.dtype, rotation
        )

    return (*(rotated_back(ct) for ct in cts), *angle_gradients(*arrays, rotation=rotation))


def _wide_angles(cos: jax.Array, sin: jax.Array, x: jax.Array, rotation: Rotation) -> tuple[jax.Array, jax.Array]:
    """Return cos and sin in the dtype of the computation, with an axis for the heads of x."""
    wide = accumulation_dtype(x)
    return jnp.expand_dims(cos.astype(wide), rotation.heads), jnp.expand_dims(sin.astype(wide), rotation.heads)


def _rounded_sum(a: jax.Array, b: jax.Array, dtype: jnp.dtype, rotation: Rotation) -> jax.Array:
    if rotation.rounded:
        a, b = to_precision(a, dtype), to_precision(b, dtype)
    return (a + b).astype(dtype)


def angle_gradients(*arrays: jax.Array, rotation: Rotation) -> tuple[jax.Array, jax.Array]:
    """Return the gradients of cos and sin, one for each group, given the arguments of `backward`."""
    count = (len(arrays) - 2) // 2
    xs, (cos, sin), cts = arrays[:count], arrays[count : count + 2], arrays[count + 2 :]
    wide = accumulation_dtype(xs[0])

    def summed(products: list[jax.Array], like: jax.Array) -> jax.Array:
        by_heads = [product.sum(rotation.heads) for product in products]
        total = sum(by_heads[1:], by_heads[0])
        return (total if like.shape[1] > 1 else total.sum(1, keepdims=True)).astype(like.dtype)

    pairs = [(x.astype(wide), ct.astype(wide)) for x, ct in zip(xs, cts, strict=True)]
    return (
        summed([ct * x for x, ct in pairs], cos),
        summed([ct * turned(x, interleaved=rotation.interleaved) for x, ct in pairs], sin),
    )
