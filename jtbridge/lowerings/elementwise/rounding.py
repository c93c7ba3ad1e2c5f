"""Rounding, and the parts of a float: sign, mantissa and exponent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from torch import fx

from jtbridge.lowerings._common import opmath, out_dtype
from jtbridge.lowerings._registry import register_lowering

from ._common import elementwise, number, operands, quotient, round_to_even, rounded_to_precision

_FAR = 1 << 15  # larger exponents overflow or underflow every dtype, for any mantissa


def _register_rounding(function: Callable[[jax.Array], jax.Array], name: str) -> None:
    """Register a rounding function as a lowering that leaves integers unchanged."""
    elementwise(name, f"prims::{name}")(lambda x: function(x) if jnp.issubdtype(x.dtype, jnp.floating) else x)


_register_rounding(jnp.floor, "floor")
_register_rounding(jnp.ceil, "ceil")
_register_rounding(jnp.trunc, "trunc")
_register_rounding(round_to_even, "round")
elementwise("frac")(lambda x: x - jnp.trunc(x))


@register_lowering("round.decimals", node=True)
def _round_decimals(x: jax.Array, *, decimals: int, node: fx.Node) -> jax.Array:
    (value,) = operands(node, x)
    if not jnp.issubdtype(value.dtype, jnp.floating):
        return value
    ten = number(10.0 ** abs(decimals), np.dtype(value.dtype))
    rounded = quotient(round_to_even(value * ten), ten) if decimals >= 0 else round_to_even(quotient(value, ten)) * ten
    return rounded.astype(out_dtype(node))


elementwise("copysign.Tensor", "copysign.Scalar")(jnp.copysign)


@register_lowering("nextafter", "prims::nextafter")
def _nextafter(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.nextafter(x, y)


@register_lowering("frexp.Tensor", "prims::frexp", node=True)
def _frexp(x: jax.Array, *, node: fx.Node) -> tuple[jax.Array, jax.Array]:
    dtype = out_dtype(node)
    mantissa, exponent = jnp.frexp(x.astype(jnp.float32) if dtype.itemsize == 2 else x)
    return mantissa.astype(dtype), exponent.astype(jnp.int32)


@register_lowering("ldexp.Tensor", node=True)
def _ldexp(x: Any, exponent: Any, *, node: fx.Node) -> jax.Array:
    (value,) = operands(node, x)
    if jnp.issubdtype(exponent.dtype, jnp.integer) and jnp.issubdtype(x.dtype, jnp.floating):
        near = jnp.clip(exponent.astype(jnp.int64), -_FAR, _FAR)
        return jnp.ldexp(value, near.astype(jnp.int32)).astype(out_dtype(node))
    # This branch computes the power of two, which may overflow where the result would not.
    given = np.dtype(exponent.dtype if jnp.issubdtype(exponent.dtype, jnp.floating) else value.dtype)
    wide = opmath(given)
    power = jnp.power(number(2, wide), exponent.astype(wide))
    power = rounded_to_precision(power, given) if wide != given else power
    return (value * power.astype(value.dtype)).astype(out_dtype(node))
