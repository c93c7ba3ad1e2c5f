"""What normalizations share: moments, the affine map after them, and their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jtbridge.lowerings._common import opmath

Maybe = jax.Array | None


def as_computed(*arrays: Maybe) -> list[Any]:
    """Arrays in the dtype that torch computes in."""
    return [None if x is None else x.astype(opmath(x.dtype)) for x in arrays]


def moments(x: jax.Array, axes: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """Mean and biased variance, with the axes kept."""
    mean = jnp.mean(x, axes, keepdims=True)
    return mean, jnp.mean(jnp.square(x - mean), axes, keepdims=True)


def affine(x: jax.Array, weight: Maybe, bias: Maybe) -> jax.Array:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def gradients(results: Sequence[Maybe], like: Sequence[Maybe], mask: Sequence[bool]) -> tuple[Maybe, ...]:
    """The gradients asked for, in the dtypes of what they are gradients of."""
    return tuple(
        result.astype(x.dtype) if wanted and result is not None and x is not None else None
        for result, x, wanted in zip(results, like, mask, strict=True)
    )


def centred(grad: jax.Array, unit: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """The gradient without its components along ones and along the normalized values."""
    mean = jnp.mean(grad, axes, keepdims=True)
    return grad - mean - unit * jnp.mean(grad * unit, axes, keepdims=True)
