"""Rotary position embedding of halves, in jnp.

Arrays begin with an axis of groups `g`: each x is [g, batch, heads, tokens, d]; cos and sin are [g, batch, tokens, d],
where either leading axis may be 1 for all.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jtbridge.kernels._shapes import accumulated, to_precision


def rotate_half(x: jax.Array) -> jax.Array:
    """``(x1, x2) -> (-x2, x1)`` in the last dimension."""
    first, second = jnp.split(x, 2, -1)
    return jnp.concatenate([-second, first], -1)


def forward(*arrays: jax.Array, rounded: bool = False) -> tuple[jax.Array, ...]:
    """From some x, then cos and sin: ``x * cos + rotate_half(x) * sin`` for each, rounded once, or the products too."""
    *xs, cos, sin = arrays
    wide_cos, wide_sin = _wide_angles(cos, sin, xs[0])

    def turned(x: jax.Array) -> jax.Array:
        wide = x.astype(wide_cos.dtype)
        return _sum(wide * wide_cos, rotate_half(wide) * wide_sin, x.dtype, rounded=rounded)

    return tuple(turned(x) for x in xs)


def backward(*arrays: jax.Array, rounded: bool = False) -> tuple[jax.Array, ...]:
    """From what `forward` is given, then a cotangent for each x: gradients of it all."""
    count = (len(arrays) - 2) // 2
    xs, (cos, sin), cts = arrays[:count], arrays[count : count + 2], arrays[count + 2 :]
    wide_cos, wide_sin = _wide_angles(cos, sin, xs[0])

    def turned_back(ct: jax.Array) -> jax.Array:  # the transpose of rotate_half is its negative
        wide = ct.astype(wide_cos.dtype)
        return _sum(wide * wide_cos, -rotate_half(wide * wide_sin), ct.dtype, rounded=rounded)

    return (*(turned_back(ct) for ct in cts), *angle_gradients(*arrays))


def _wide_angles(cos: jax.Array, sin: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """As they meet x, in the dtype that is computed in."""
    wide = accumulated(x)
    return cos.astype(wide)[:, :, None], sin.astype(wide)[:, :, None]


def _sum(a: jax.Array, b: jax.Array, dtype: jnp.dtype, *, rounded: bool) -> jax.Array:
    if rounded:
        a, b = to_precision(a, dtype), to_precision(b, dtype)
    return (a + b).astype(dtype)


def angle_gradients(*arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
    """From what `backward` is given: the gradients of cos and sin, one for each group."""
    count = (len(arrays) - 2) // 2
    xs, (cos, sin), cts = arrays[:count], arrays[count : count + 2], arrays[count + 2 :]
    wide = accumulated(xs[0])

    def summed(products: list[jax.Array], like: jax.Array) -> jax.Array:
        total = sum((product.sum(2) for product in products[1:]), products[0].sum(2))
        return (total if like.shape[1] > 1 else total.sum(1, keepdims=True)).astype(like.dtype)

    pairs = [(x.astype(wide), ct.astype(wide)) for x, ct in zip(xs, cts, strict=True)]
    return (
        summed([ct * x for x, ct in pairs], cos),
        summed([ct * rotate_half(x) for x, ct in pairs], sin),
    )
