"""Sums, products, quotients and remainders of elements."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax
from torch import fx

from jtbridge.lowerings._common import opmath, out_dtype, size_of
from jtbridge.lowerings._registry import register_lowering
from jtbridge.lowerings.indexing._out_of_range import invalid_value

from ._common import elementwise, number, operands, quotient, rounded_to_precision


@register_lowering("add.Tensor", "add.Scalar", "prims::add", node=True)
def _add(x: Any, y: Any, alpha: Any = 1, *, node: fx.Node) -> jax.Array:
    a, b, scale = operands(node, x, y, alpha)
    return jnp.add(a, b if alpha == 1 else b * scale).astype(out_dtype(node))


@register_lowering("sub.Tensor", "sub.Scalar", "prims::sub", node=True)
def _sub(x: Any, y: Any, alpha: Any = 1, *, node: fx.Node) -> jax.Array:
    a, b, scale = operands(node, x, y, alpha)
    return jnp.subtract(a, b if alpha == 1 else b * scale).astype(out_dtype(node))


@register_lowering("rsub.Tensor", "rsub.Scalar", node=True)
def _rsub(x: Any, y: Any, alpha: Any = 1, *, node: fx.Node) -> jax.Array:
    a, b, scale = operands(node, x, y, alpha)
    return jnp.subtract(b, a if alpha == 1 else a * scale).astype(out_dtype(node))


elementwise("mul.Tensor", "mul.Scalar", "prims::mul", exact=True)(jnp.multiply)
elementwise("reciprocal", "prims::reciprocal")(lambda x: jnp.divide(number(1, np.dtype(x.dtype)), x))
elementwise("neg", "prims::neg")(jnp.negative)


@register_lowering("div.Tensor", "div.Scalar", node=True)
def _div(x: Any, y: Any, *, node: fx.Node) -> jax.Array:
    a, b = operands(node, x, y, exact=True)
    return quotient(a, b, exact=_must_be_exact(node)).astype(out_dtype(node))


_aten = torch.ops.aten
# Functions with jumps. `_must_be_exact` also finds them behind functions of `_SMOOTH`.
_JUMPS = frozenset(
    {
        *(_aten.floor, _aten.ceil, _aten.trunc, _aten.round, _aten.frac, _aten.sign),
        *(_aten.eq, _aten.ne, _aten.lt, _aten.le, _aten.gt, _aten.ge),
    }
)
_SMOOTH = frozenset({_aten.abs, _aten.add, _aten.clamp, _aten.expand, _aten.mul, _aten.neg, _aten.sub, _aten.view})


def _must_be_exact(node: fx.Node, depth: int = 3) -> bool:
    """Return whether an error of one ulp in a node's result may grow to an error of 1, for example in its `floor`."""
    for user in node.users:
        packet = getattr(user.target, "overloadpacket", None)
        to_integers = packet is _aten._to_copy and not jnp.issubdtype(out_dtype(user), jnp.inexact)
        if to_integers or packet in _JUMPS or (packet in _SMOOTH and depth and _must_be_exact(user, depth - 1)):
            return True
    return False


@elementwise("gcd", "prims::gcd")
def _gcd(a: jax.Array, b: jax.Array) -> jax.Array:
    """Return the greatest common divisor, also of the least integer of a dtype.

    The absolute value of that integer wraps around to itself, so `jnp.gcd` does not terminate.
    """

    def step(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        a, b = state
        return jnp.where(a == 0, a, lax.rem(b, jnp.where(a == 0, 1, a))), jnp.where(a == 0, b, a)

    a, b = jnp.broadcast_arrays(jnp.abs(a), jnp.abs(b))
    return lax.while_loop(lambda state: (state[0] != 0).any(), step, (a, b))[1]


@elementwise("lcm")
def _lcm(a: jax.Array, b: jax.Array) -> jax.Array:
    divisor = _gcd(a, b)
    # Torch computes in 32 bits or more before it takes the absolute value, and wraps the result.
    wide = np.promote_types(a.dtype, np.int32)
    a, b, nonzero = a.astype(wide), b.astype(wide), jnp.where(divisor == 0, 1, divisor).astype(wide)
    return jnp.where(divisor == 0, 0, jnp.abs(lax.div(a, nonzero) * b))


@elementwise("prims::div")
def _div_prim(a: jax.Array, b: jax.Array) -> jax.Array:
    return _trunc_divide(a, b) if _integral(a) else quotient(a, b)


@register_lowering("div.Tensor_mode", "div.Scalar_mode", node=True)
def _div_mode(x: Any, y: Any, *, rounding_mode: str | None, node: fx.Node) -> jax.Array:
    dtype = out_dtype(node)
    a, b = operands(node, x, y, exact=True)
    if rounding_mode == "trunc" and opmath(dtype) != dtype and size_of(y) != 1:
        # Torch rounds a half-precision quotient before it drops the fraction, unless the divisor is a single number.
        return jnp.trunc(rounded_to_precision(quotient(a, b), dtype)).astype(dtype)
    divide = {None: quotient, "trunc": _trunc_divide, "floor": _floor_divide}[rounding_mode]
    return divide(a, b).astype(dtype)


def _trunc_divide(a: jax.Array, b: jax.Array) -> jax.Array:
    if _integral(a):
        return _no_number_by_zero(lax.div(*jnp.broadcast_arrays(a, b)), b)
    return jnp.trunc(quotient(a, b))


def _floor_divide(a: jax.Array, b: jax.Array) -> jax.Array:
    if _integral(a):
        return _no_number_by_zero(jnp.floor_divide(a, b), b)
    # (a - fmod(a, b)) / b is exact where a / b would round up to an integer.
    left = _fmod(a, b)
    quotient = (a - left) / b
    quotient = jnp.where((left != 0) & ((b < 0) != (left < 0)), quotient - 1, quotient)
    floor = jnp.floor(quotient)
    floor = jnp.where(quotient - floor > 0.5, floor + 1, floor)
    plain = jnp.divide(a, b)
    return jnp.where(b == 0, plain, jnp.where(quotient == 0, jnp.copysign(jnp.zeros_like(plain), plain), floor))


def _fmod(a: jax.Array, b: jax.Array) -> jax.Array:
    rest = lax.rem(*jnp.broadcast_arrays(a, b))
    return _no_number_by_zero(rest, b) if _integral(a) else rest


@elementwise("remainder.Tensor", "remainder.Scalar", "remainder.Scalar_Tensor", "prims::remainder")
def _remainder(a: jax.Array, b: jax.Array) -> jax.Array:
    left = _fmod(a, b)
    rest = jnp.where((left != 0) & ((b < 0) != (left < 0)), left + b, left)
    return _no_number_by_zero(rest, b) if _integral(a) else rest


elementwise("floor_divide", "floor_divide.Scalar", exact=True)(_floor_divide)
elementwise("fmod.Tensor", "fmod.Scalar", "prims::fmod")(_fmod)


def _no_number_by_zero(result: jax.Array, divisor: jax.Array) -> jax.Array:
    """Replace the result of an integer division by 0, for which torch raises, by the dtype's invalid value."""
    return jnp.where(divisor == 0, number(invalid_value(np.dtype(result.dtype)), np.dtype(result.dtype)), result)


def _integral(x: Any) -> bool:
    return np.dtype(x.dtype).kind in "iu"


@register_lowering("addcmul", node=True)
def _addcmul(x: Any, y: Any, z: Any, *, value: Any = 1, node: fx.Node) -> jax.Array:
    a, b, c, scale = operands(node, x, y, z, value, exact=True)
    return (a + (b if value == 1 else b * scale) * c).astype(out_dtype(node))


@register_lowering("addcdiv", node=True)
def _addcdiv(x: Any, y: Any, z: Any, *, value: Any = 1, node: fx.Node) -> jax.Array:
    a, b, c, scale = operands(node, x, y, z, value, exact=True)
    return (a + (b if value == 1 else b * scale) / c).astype(out_dtype(node))


@elementwise("lerp.Scalar", "lerp.Tensor", exact=True)
def _lerp(start: jax.Array, end: jax.Array, weight: jax.Array) -> jax.Array:
    span = end - start
    # Two formulas, so that the result is exact at both ends.
    return jnp.where(
        jnp.abs(weight) < 0.5, start + weight * span, end - span * (number(1, np.dtype(span.dtype)) - weight)
    )


@register_lowering("abs", "prims::abs", node=True)
def _abs(x: jax.Array, *, node: fx.Node) -> jax.Array:
    x = x.astype(opmath(np.dtype(x.dtype)))
    size = jnp.abs(x)
    if jnp.iscomplexobj(x):  # the absolute value of inf+nanj is inf
        size = jnp.where(jnp.isinf(jnp.real(x)) | jnp.isinf(jnp.imag(x)), jnp.inf, size)
    return size.astype(out_dtype(node))


@elementwise("sign", "sgn", "prims::sign")
def _sign(x: jax.Array) -> jax.Array:
    if x.dtype == bool:
        return x
    if not jnp.iscomplexobj(x):
        # Torch gives 0 for -0.0 and for NaN; jnp.sign returns these arguments unchanged.
        return jnp.where(jnp.isnan(x) | (x == 0), 0, jnp.sign(x)).astype(x.dtype)
    size = jnp.abs(x)
    nan = jnp.asarray(complex(np.nan, np.nan), x.dtype)
    return jnp.where(size == 0, 0, jnp.where(jnp.isinf(size), nan, x / size.astype(x.dtype))).astype(x.dtype)


elementwise("deg2rad")(lambda x: x * number(np.pi / 180, np.dtype(x.dtype)))
elementwise("rad2deg")(lambda x: x * number(180 / np.pi, np.dtype(x.dtype)))
