"""Comparisons, tests of single values such as `isnan`, and logical and bitwise operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from torch import fx

from jtbridge.lowerings._common import convert, promoted_dtype
from jtbridge.lowerings._registry import register_lowering

from ._common import array_of, elementwise


def _register_comparison(function: Callable[[Any, Any], Any], name: str) -> None:
    """Register a comparison of elements that are rounded to the dtype to which torch promotes them."""

    def lowering(x: Any, y: Any, *, node: fx.Node) -> jax.Array:
        dtype = promoted_dtype(node)
        return function(array_of(x, dtype), array_of(y, dtype))

    register_lowering(f"{name}.Tensor", f"{name}.Scalar", f"prims::{name}", node=True)(lowering)


_register_comparison(jnp.equal, "eq")
_register_comparison(jnp.not_equal, "ne")
_register_comparison(jnp.less, "lt")
_register_comparison(jnp.less_equal, "le")
_register_comparison(jnp.greater, "gt")
_register_comparison(jnp.greater_equal, "ge")


register_lowering("isnan")(lambda x: jnp.isnan(x))
register_lowering("isinf")(lambda x: jnp.isinf(x))
register_lowering("prims::isfinite")(lambda x: jnp.isfinite(x))
register_lowering("isposinf")(lambda x: jnp.isinf(x) & (x > 0))
register_lowering("isneginf")(lambda x: jnp.isinf(x) & (x < 0))


@register_lowering("signbit", "prims::signbit")
def _signbit(x: jax.Array) -> jax.Array:
    return jnp.signbit(x) if jnp.issubdtype(x.dtype, jnp.floating) else x < jnp.zeros((), x.dtype)


def _register_logical(function: Callable[..., Any], name: str) -> None:
    register_lowering(name)(lambda *args: function(*(array_of(x, np.dtype(bool)) for x in args)))


_register_logical(jnp.logical_and, "logical_and")
_register_logical(jnp.logical_or, "logical_or")
_register_logical(jnp.logical_xor, "logical_xor")
_register_logical(jnp.logical_not, "logical_not")


def _register_bitwise(function: Callable[[Any, Any], Any], name: str) -> None:
    elementwise(f"{name}.Tensor", f"{name}.Scalar", f"{name}.Scalar_Tensor", f"prims::{name}")(function)


_register_bitwise(jnp.bitwise_and, "bitwise_and")
_register_bitwise(jnp.bitwise_or, "bitwise_or")
_register_bitwise(jnp.bitwise_xor, "bitwise_xor")
elementwise("bitwise_not", "prims::bitwise_not")(jnp.bitwise_not)


@elementwise(
    "bitwise_left_shift.Tensor",
    "bitwise_left_shift.Tensor_Scalar",
    "bitwise_left_shift.Scalar_Tensor",
    "__lshift__.Tensor",
    "__lshift__.Scalar",
    "prims::shift_left",
)
def _left_shift(x: jax.Array, by: jax.Array) -> jax.Array:
    bits = 8 * np.dtype(x.dtype).itemsize
    inside = (by >= 0) & (by < bits)
    return jnp.where(inside, jnp.left_shift(x, jnp.where(inside, by, 0)), 0)


@elementwise(
    "bitwise_right_shift.Tensor",
    "bitwise_right_shift.Tensor_Scalar",
    "bitwise_right_shift.Scalar_Tensor",
    "__rshift__.Tensor",
    "__rshift__.Scalar",
    "prims::shift_right_arithmetic",
)
def _right_shift(x: jax.Array, by: jax.Array) -> jax.Array:
    bits = 8 * np.dtype(x.dtype).itemsize
    inside = (by >= 0) & (by < bits)
    # A shift that is negative or shifts all bits out leaves the sign: -1 or 0.
    gone = jnp.where(x < 0, convert(jnp.asarray(-1), np.dtype(x.dtype)), jnp.zeros((), x.dtype))
    return jnp.where(inside, jnp.right_shift(x, jnp.where(inside, by, 0)), gone)
