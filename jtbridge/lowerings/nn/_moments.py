"""Helpers of the normalization lowerings: moments, the affine map after the normalization, and gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jtbridge.lowerings._common import opmath

Maybe = jax.Array | None


def as_computed(*arrays: Maybe) -> list[Any]:
    """Return the arrays in the dtype that torch computes in: float32 for half precision. `None` stays `None`."""
    return [None if x is None else x.astype(opmath(x.dtype)) for x in arrays]


def moments(x: jax.Array, axes: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """Return the mean and the biased variance over some axes, which are kept with length 1."""
    mean = jnp.mean(x, axes, keepdims=True)
    return mean, jnp.mean(jnp.square(x - mean), axes, keepdims=True)


def affine(x: jax.Array, weight: Maybe, bias: Maybe) -> jax.Array:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def selected_gradients(results: Sequence[Maybe], like: Sequence[Maybe], mask: Sequence[bool]) -> tuple[Maybe, ...]:
    """Return the gradients that `mask` selects, in the dtypes of the inputs `like`, and `None` for the others."""
    return tuple(
        result.astype(x.dtype) if wanted and result is not None and x is not None else None
        for result, x, wanted in zip(results, like, mask, strict=True)
    )


def centred(grad: jax.Array, unit: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """Return the gradient without its components along ones and along the normalized values `unit`."""
    mean = jnp.mean(grad, axes, keepdims=True)
    return grad - mean - unit * jnp.mean(grad * unit, axes, keepdims=True)
