"""Helpers of the lowerings of special functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from torch import fx

from jtbridge.lowerings._common import opmath, out_dtype
from jtbridge.lowerings._registry import register_lowering


def unary(*names: str) -> Callable[[Callable[[jax.Array], jax.Array]], Callable[[jax.Array], jax.Array]]:
    """Return a decorator that registers a function of one float array under `names`.

    Integers become floats, and half precision is computed in float32.
    """

    def register(function: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
        def lowering(x: jax.Array, *, node: fx.Node) -> jax.Array:
            result = out_dtype(node)
            return function(x.astype(opmath(result))).astype(result)

        register_lowering(*names, node=True)(lowering)
        return function

    return register


def polynomial(x: jax.Array, coefficients: Sequence[float]) -> jax.Array:
    """Return the value of a polynomial at `x`. The coefficient of the highest power comes first."""
    total = jnp.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        total = total * x + jnp.asarray(coefficient, x.dtype)
    return total


def chebyshev_sum(x: jax.Array, coefficients: Sequence[float]) -> jax.Array:
    """Return the value of a Chebyshev series at x/2.

    The coefficient of the highest order comes first. The coefficient of the lowest order is given doubled.
    """
    before, last, total = jnp.zeros_like(x), jnp.zeros_like(x), jnp.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        before, last = last, total
        total = x * last - before + jnp.asarray(coefficient, x.dtype)
    return 0.5 * (total - before)


def rational_function(x: jax.Array, numerator: Sequence[float], denominator: Sequence[float]) -> jax.Array:
    """Return the value of the quotient of two polynomials at `x`."""
    return polynomial(x, numerator) / polynomial(x, denominator)
