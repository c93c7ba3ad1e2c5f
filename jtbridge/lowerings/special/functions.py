"""Special functions: gamma, error, zeta and the like."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from torch import fx

from jtbridge.lowerings._common import opmath, out_dtype
from jtbridge.lowerings._registry import register_lowering

from ._common import chebyshev_sum, polynomial, unary


# Double precision: XLA's single-precision gamma functions lose digits, and an exponential amplifies the error.
@unary("lgamma")
def _lgamma(x: jax.Array) -> jax.Array:
    return jax.lax.lgamma(x.astype(np.float64)).astype(x.dtype)


@unary("digamma")
def _digamma(x: jax.Array) -> jax.Array:
    value = jax.lax.digamma(x.astype(np.float64)).astype(x.dtype)
    return jnp.where(x == 0, jnp.copysign(jnp.asarray(jnp.inf, x.dtype), -x), value)


@register_lowering("polygamma", node=True)
def _polygamma(n: int, x: jax.Array, *, node: fx.Node) -> jax.Array:
    result = out_dtype(node)
    x = x.astype(opmath(result))
    if n == 0:
        return _digamma(x).astype(result)
    if n == 1:
        return _trigamma(x).astype(result)
    scale = math.gamma(n + 1.0) if n < 170 else math.inf
    order = jnp.full_like(x, n + 1)
    # polygamma(n, x) = (-1)^(n + 1) n! zeta(n + 1, x), with the Hurwitz zeta function.
    return ((1 if n % 2 else -1) * scale * _hurwitz(order, x)).astype(result)


def _trigamma(x: jax.Array) -> jax.Array:
    """Return the second derivative of lgamma.

    Left of 1/2 the reflection formula is used, with the sine of a rounded product, as in torch.
    """
    sine = jnp.sin(math.pi * x)
    left = x < 0.5
    right = jax.lax.zeta(jnp.full_like(x, 2), jnp.where(left, 1.0 - x, x))
    right = jnp.where(x == jnp.inf, jnp.zeros((), x.dtype), right)
    return jnp.where(left, math.pi**2 / (sine * sine) - right, right)


@register_lowering("mvlgamma", node=True)
def _mvlgamma(x: jax.Array, p: int, *, node: fx.Node) -> jax.Array:
    result = out_dtype(node)
    x = x.astype(opmath(result))
    total = jnp.full_like(x, p * (p - 1) / 4 * math.log(math.pi))
    for j in range(p):
        total = total + _lgamma(x - 0.5 * j)
    return total.astype(result)


@unary("erf")
def _erf(x: jax.Array) -> jax.Array:
    return jax.lax.erf(x)


@unary("erfc")
def _erfc(x: jax.Array) -> jax.Array:
    return jax.lax.erfc(x)


@unary("erfinv")
def _erfinv(y: jax.Array) -> jax.Array:
    x = jax.lax.erf_inv(y)
    # One step of Newton's method, because XLA's approximation loses digits near 1.
    size = jnp.abs(y)
    slope = 2 / math.sqrt(math.pi) * jnp.exp(-x * x)
    miss = jnp.where(size > 0.5, ((1.0 - size) - jax.lax.erfc(jnp.abs(x))) * jnp.sign(y), jax.lax.erf(x) - y)
    better = x - miss / slope
    return jnp.where(jnp.isfinite(better), better, x)


@unary("special_erfcx")
def _erfcx(x: jax.Array) -> jax.Array:
    """Return exp(x^2) erfc(x) without overflow, in double precision because `_log_ndtr` takes the logarithm."""
    wide = x.astype(np.float64)
    size = jnp.abs(wide)
    # (1 + 2x) erfcx(x) as a Chebyshev series in (x - 3.75) / (x + 3.75), after Shepherd and Laframboise (1981).
    inner = jnp.where(jnp.isinf(size), 1.0, (size - 3.75) / (size + 3.75))
    right = chebyshev_sum(2.0 * inner, _ERFCX) / (1.0 + 2.0 * size)
    return jnp.where(wide < 0, 2.0 * jnp.exp(wide * wide) - right, right).astype(x.dtype)


_ERFCX = (
    -2.237056659422547e-18, 5.06814890479747e-17, 7.418235256625416e-17, -1.2507950530688509e-15,
    -1.864562880419199e-15, 3.347811948286807e-14, 3.252548148148741e-14, -9.654696748433439e-13,
    1.9455868545777349e-13, 2.8687950109306699e-11, -6.318088340866485e-11, -7.754400208831351e-10,
    4.521959811218288e-09, 1.0764999465670911e-08, -2.188640104923944e-07, 7.740383066198491e-07,
    4.139027986073010e-06, -6.916973302501206e-05, 4.907758365258086e-04, -2.413163540417608e-03,
    9.074997670705265e-03, -2.665866843530575e-02, 5.920993999819189e-02, -8.424913336651792e-02,
    -4.590054580646477e-03, 2.3551578691348035,
)  # fmt: skip


@unary("special_ndtri")
def _ndtri(p: jax.Array) -> jax.Array:
    return jax.scipy.special.ndtri(p)


@unary("special_log_ndtr")
def _log_ndtr(x: jax.Array) -> jax.Array:
    t = x * math.sqrt(0.5)
    left = jnp.log(_erfcx(-t) / 2.0) - t * t
    return jnp.where(x < -1.0, left, jnp.log1p(-jax.lax.erfc(t) / 2.0))


@unary("special_entr")
def _entr(x: jax.Array) -> jax.Array:
    return jnp.where(x > 0, -x * jnp.log(x), jnp.where(x == 0, 0.0, jnp.where(x < 0, -jnp.inf, x))).astype(x.dtype)


@unary("sinc")
def _sinc(x: jax.Array) -> jax.Array:
    product = x * math.pi
    return jnp.where(x == 0, jnp.ones((), x.dtype), jnp.sin(product) / product)


def _both(x: Any, y: Any, node: fx.Node) -> tuple[jax.Array, jax.Array]:
    wide = opmath(out_dtype(node))
    a, b = jnp.broadcast_arrays(jnp.asarray(x, wide), jnp.asarray(y, wide))
    return a, b


@register_lowering("igamma", node=True)
def _igamma(a: jax.Array, x: jax.Array, *, node: fx.Node) -> jax.Array:
    a, x = _both(a, x, node)
    return _gamma_ratio(a, x, upper=False).astype(out_dtype(node))


@register_lowering("igammac", node=True)
def _igammac(a: jax.Array, x: jax.Array, *, node: fx.Node) -> jax.Array:
    a, x = _both(a, x, node)
    return _gamma_ratio(a, x, upper=True).astype(out_dtype(node))


_MANY_TERMS = 1e5  # above this `a`, XLA's series of the incomplete gamma functions would take too many terms


def _gamma_ratio(a: jax.Array, x: jax.Array, *, upper: bool) -> jax.Array:
    """Return the regularized incomplete gamma function, the upper or the lower one.

    It is computed in double precision, because XLA's single precision loses all digits for large arguments.
    """
    wide_a, wide_x = a.astype(np.float64), x.astype(np.float64)
    large = (wide_a > _MANY_TERMS) & jnp.isfinite(wide_a) & jnp.isfinite(wide_x) & (wide_x > 0)
    function = jax.lax.igammac if upper else jax.lax.igamma
    value = function(jnp.where(large, 1.0, wide_a), jnp.where(large, 1.0, wide_x))
    value = jnp.where(large, _gamma_ratio_of_large(wide_a, wide_x, upper), value).astype(a.dtype)
    at_zero, at_infinity = (1.0, 0.0) if upper else (0.0, 1.0)
    # Torch tests the arguments in this order, so the result is not NaN in some cases where the other argument is NaN.
    invalid = (x < 0) | (a < 0)
    cases = [
        (invalid, jnp.nan),
        (a == 0, jnp.where(x > 0, at_infinity, jnp.nan)),
        (x == 0, at_zero),
        (jnp.isinf(a), jnp.where(jnp.isinf(x), jnp.nan, at_zero)),
        (jnp.isinf(x), at_infinity),
    ]
    return jnp.select([condition for condition, _ in cases], [jnp.asarray(of, value.dtype) for _, of in cases], value)


def _gamma_ratio_of_large(a: jax.Array, x: jax.Array, upper: bool) -> jax.Array:
    """Return an incomplete gamma function of `a` above `_MANY_TERMS` by Temme's uniform expansion (DLMF 8.12)."""
    distance = (x - a) / a
    near = jnp.abs(distance) < 0.03
    small = jnp.where(near, distance, 0.0)
    # eta^2 / 2, that is distance - log1p(distance), as a series where the difference would lose digits
    series = small * small * polynomial(small, [(-1) ** k / (k + 2) for k in range(9, -1, -1)])
    half_square = jnp.where(near, series, distance - jnp.log1p(distance))
    eta = jnp.copysign(jnp.sqrt(2.0 * half_square), distance)
    t = jnp.clip(eta, -1.0, 1.0)  # the exponential is 0 beyond
    factor = polynomial(t, _TEMME[0]) + polynomial(t, _TEMME[1]) / a
    rest = jnp.exp(-a * half_square) / jnp.sqrt(2.0 * math.pi * a) * factor
    sign = 1.0 if upper else -1.0
    return 0.5 * jax.lax.erfc(sign * eta * jnp.sqrt(0.5 * a)) + sign * rest


_TEMME = (
    (-139 / 777600, 1 / 2835, 1 / 864, -2 / 135, 1 / 12, -1 / 3),
    (-77 / 77760, 1 / 378, -1 / 288, -1 / 540),
)


@register_lowering("special_zeta", "special_zeta.other_scalar", "special_zeta.self_scalar", node=True)
def _zeta(x: Any, q: Any, *, node: fx.Node) -> jax.Array:
    a, b = _both(x, q, node)
    return _hurwitz(a, b).astype(out_dtype(node))


def _hurwitz(s: jax.Array, q: jax.Array) -> jax.Array:
    """Return the Hurwitz zeta function: the sum of (q + k)^-s over k. XLA's zeta takes positive q only.

    For negative q and integral s, the terms up to the sign change of q + k are the difference of two such sums.
    It is computed in double precision, because XLA's single precision overflows for s above 40.
    """
    dtype = s.dtype
    s, q = s.astype(np.float64), q.astype(np.float64)
    whole = s == jnp.floor(s)
    negative = (q < 0) & (q != jnp.floor(q)) & whole & (s > 1)
    rest = q - jnp.floor(q)
    left = jax.lax.zeta(s, jnp.where(negative, jnp.ceil(q) - q, 1.0)) - jax.lax.zeta(
        s, jnp.where(negative, 1.0 - q, 1.0)
    )
    left = jnp.where(s % 2 == 0, left, -left)
    right = jax.lax.zeta(s, jnp.where(negative, rest, q))
    value = jnp.where(negative, left + right, right)
    value = jnp.where((q <= 0) & (q == jnp.floor(q)) & (s > 1), jnp.inf, value)
    value = jnp.where(s < 1, jnp.nan, value)
    # For such s the other terms are too small to count, and XLA's zeta overflows.
    return jnp.where((s > 1e10) & (q > 0), q**-s, value).astype(dtype)


@register_lowering("special_xlog1py", "special_xlog1py.other_scalar", "special_xlog1py.self_scalar", node=True)
def _xlog1py(x: Any, y: Any, *, node: fx.Node) -> jax.Array:
    a, b = _both(x, y, node)
    value = jnp.where((a == 0) & ~jnp.isnan(b), jnp.zeros((), a.dtype), a * jnp.log1p(b))
    return value.astype(out_dtype(node))
