"""Exponentials, logarithms, powers and roots."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from torch import fx

from jtbridge.errors import TranslationError
from jtbridge.lowerings._common import out_dtype
from jtbridge.lowerings._registry import register_lowering

from ._common import elementwise, number, operands

elementwise("exp", "prims::exp")(jnp.exp)
elementwise("expm1", "prims::expm1")(jnp.expm1)
elementwise("log", "prims::log")(jnp.log)
elementwise("log1p", "prims::log1p")(jnp.log1p)
elementwise("rsqrt", "prims::rsqrt")(lambda x: lax.rsqrt(x) if not jnp.iscomplexobj(x) else 1 / _sqrt(x))


@elementwise("sqrt", "prims::sqrt")
def _sqrt(x: jax.Array) -> jax.Array:
    return jnp.sqrt(x) if not jnp.iscomplexobj(x) else by_conjugates(jnp.sqrt, x)


def by_conjugates(function: Any, x: jax.Array) -> jax.Array:
    """Evaluate a complex function for which f(conj(x)) = conj(f(x)), so that -0j is below a cut on the real axis.

    The function is evaluated at the absolute value of the imaginary part. If that part has a minus sign, the result is
    conjugated.
    """
    below = jnp.signbit(jnp.imag(x))
    upper = function(lax.complex(jnp.real(x), jnp.abs(jnp.imag(x))))
    return lax.complex(jnp.real(upper), jnp.where(below, -jnp.imag(upper), jnp.imag(upper)))


@elementwise("exp2", "prims::exp2")
def _exp2(x: jax.Array) -> jax.Array:
    # XLA computes exp2 as exp(x * log(2)), which is not exact at integers. XLA's power is exact there.
    return jnp.exp(x * number(np.log(2), np.dtype(x.dtype))) if jnp.iscomplexobj(x) else jnp.power(2, x)


@elementwise("log2", "prims::log2")
def _log2(x: jax.Array) -> jax.Array:
    if jnp.iscomplexobj(x):
        return jnp.log2(x)
    # Adding the exponent to the logarithm of the mantissa is exact at powers of two.
    mantissa, exponent = jnp.frexp(x)
    low = mantissa < np.sqrt(0.5)
    mantissa = jnp.where(low, 2 * mantissa, mantissa)
    logarithm = jnp.log(mantissa) * number(1 / np.log(2), np.dtype(x.dtype)) + jnp.where(low, exponent - 1, exponent)
    return jnp.where((x > 0) & (x < np.inf), logarithm, jnp.log(x)).astype(x.dtype)


@elementwise("log10", "prims::log10")
def _log10(x: jax.Array) -> jax.Array:
    logarithm = jnp.log10(x)
    if jnp.iscomplexobj(x):
        return logarithm
    # The rounded logarithm makes the result exact at powers of ten.
    whole = jnp.round(logarithm)
    return jnp.where(jnp.power(10, whole) == x, whole, logarithm)


@elementwise("pow.Tensor_Tensor", "prims::pow")
def _pow_tensor(base: Any, exponent: Any) -> jax.Array:
    kind = np.dtype(base.dtype).kind
    if kind in "iu":
        return _integer_power(base, exponent)
    if kind != "c":
        return jnp.power(base, exponent)
    power = jnp.power(base, exponent)
    growth = jnp.real(exponent)
    at_zero = jnp.where(growth > 0, 0, jnp.where(growth < 0, np.inf, np.nan)).astype(growth.dtype)
    unknown = jnp.where(growth > 0, 0, np.nan).astype(growth.dtype)
    return jnp.where(base == 0, lax.complex(at_zero, unknown), power)


def _integer_power(base: Any, exponent: Any) -> jax.Array:
    """Return powers that wrap around; a negative exponent gives 0 unless the base is 1 or -1."""
    base, exponent = jnp.broadcast_arrays(base, exponent)
    one = jnp.ones_like(base)

    def step(state: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        result, square, left = state
        return jnp.where(left & 1 == 1, result * square, result), square * square, left >> 1

    start = one, base, jnp.maximum(exponent, 0)
    power, _, _ = lax.while_loop(lambda state: jnp.any(state[2] > 0), step, start)
    if base.dtype.kind == "u":
        return power
    of_unit = jnp.where(base == 1, one, jnp.where(base == -1, jnp.where(exponent & 1 == 1, -one, one), 0))
    return jnp.where(exponent < 0, of_unit, power)


@register_lowering("pow.Tensor_Scalar", node=True)
def _pow_scalar(x: jax.Array, exponent: Any, *, node: fx.Node) -> jax.Array:
    (base,) = operands(node, x)
    if out_dtype(node) == np.float16 and exponent in (0.5, -0.5):  # torch uses a power; a root differs at -inf and -0.0
        return _pow_tensor(base, number(exponent, np.dtype(base.dtype))).astype(out_dtype(node))
    return _power_of_number(base, exponent).astype(out_dtype(node))


def _power_of_number(base: jax.Array, exponent: Any) -> jax.Array:
    """Return `base` to the power of a Python number, computed as torch does.

    Torch uses products and roots where it can. These differ from a power in rounding and at infinities.
    """
    integral = base.dtype.kind in "iu"
    if exponent == 0:
        return jnp.ones_like(base)
    if exponent == 1:
        return base
    if exponent in (2, 3):
        return base * base if exponent == 2 else base * base * base
    if integral:
        if exponent < 0:
            raise TranslationError("integers to negative integer powers are not allowed, as in torch")
        return lax.integer_pow(base, int(exponent))
    if exponent == 0.5:
        return _sqrt(base)
    if exponent in (-0.5, -1, -2):
        below = {-0.5: lambda: _sqrt(base), -1: lambda: base, -2: lambda: base * base}[exponent]()
        return number(1, np.dtype(base.dtype)) / below
    return _pow_tensor(base, number(exponent, np.dtype(base.dtype)))


@register_lowering("pow.Scalar", node=True)
def _pow_of_number(base: Any, x: jax.Array, *, node: fx.Node) -> jax.Array:
    (exponent,) = operands(node, x)
    if base == 1:
        return jnp.ones_like(exponent).astype(out_dtype(node))
    return _pow_tensor(number(base, np.dtype(exponent.dtype)), exponent).astype(out_dtype(node))


@elementwise("hypot", "prims::hypot")
def _hypot(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.hypot(x, y)


def _log_of_sum(x: jax.Array, y: jax.Array, exp: Any, log: Any, log1p: Any) -> jax.Array:
    if jnp.iscomplexobj(x):
        return _complex_log_of_sum(x, y, exp, log, log1p)
    larger = jnp.maximum(x, y)
    same = (x == y) & jnp.isinf(x)
    return jnp.where(same, x, larger + log1p(exp(-jnp.abs(jnp.where(same, 0, x - y)))))


def _complex_log_of_sum(x: jax.Array, y: jax.Array, exp: Any, log: Any, log1p: Any) -> jax.Array:
    swap = jnp.real(x) < jnp.real(y)
    larger, smaller = jnp.where(swap, y, x), jnp.where(swap, x, y)
    infinite = jnp.isinf(jnp.real(x)) & (jnp.real(x) == jnp.real(y))
    of_infinite = jnp.where(jnp.real(x) < 0, smaller, log(exp(x) + exp(y)))
    return jnp.where(infinite, of_infinite, log1p(exp(smaller - larger)) + larger)


@elementwise("logaddexp")
def _logaddexp(x: jax.Array, y: jax.Array) -> jax.Array:
    return _log_of_sum(x, y, jnp.exp, jnp.log, jnp.log1p)


@elementwise("logaddexp2")
def _logaddexp2(x: jax.Array, y: jax.Array) -> jax.Array:
    per_bit = number(1 / np.log(2), np.dtype(x.dtype))
    return _log_of_sum(x, y, _exp2, _log2, lambda z: jnp.log1p(z) * per_bit)


@elementwise("xlogy.Tensor", "xlogy.Scalar_Other", "xlogy.Scalar_Self")
def _xlogy(x: jax.Array, y: jax.Array) -> jax.Array:
    """Return ``x * log(y)``, which is 0 where `x` is 0, unless `y` is NaN."""
    return jnp.where(jnp.isnan(y), np.nan, jnp.where(x == 0, 0, x * jnp.log(y))).astype(y.dtype)
