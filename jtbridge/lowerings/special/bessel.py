"""Bessel and Airy functions, most of them by torch's approximations, which are those of Cephes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from . import _bessel_coefficients as table
from ._common import chebyshev_sum, polynomial, rational_function, unary


@unary("special_i0e")
def _i0e(x: jax.Array) -> jax.Array:
    return jax.lax.bessel_i0e(x)


@unary("special_i1e")
def _i1e(x: jax.Array) -> jax.Array:
    return jax.lax.bessel_i1e(x)


@unary("i0", "special_modified_bessel_i0")
def _i0(x: jax.Array) -> jax.Array:
    return jnp.exp(jnp.abs(x)) * jax.lax.bessel_i0e(x)


@unary("special_i1", "special_modified_bessel_i1")
def _i1(x: jax.Array) -> jax.Array:
    return jnp.exp(jnp.abs(x)) * jax.lax.bessel_i1e(x)


@unary("special_bessel_j0")
def _j0(x: jax.Array) -> jax.Array:
    x = jnp.abs(x)
    square = x * x
    near = (square - 5.78318596294678452118) * (square - 30.4712623436620863991)
    near = near * rational_function(square, table.J0_NUMERATOR, table.J0_DENOMINATOR)
    near = jnp.where(x < 1e-5, 1.0 - square / 4.0, near)
    p, q, angle = _far_parts(x, math.pi / 4, _ORDER_0)
    return jnp.where(x <= 5.0, near, _far(x, p * jnp.cos(angle) - q * jnp.sin(angle)))


@unary("special_bessel_j1")
def _j1(x: jax.Array) -> jax.Array:
    size = jnp.abs(x)
    square = size * size
    near = rational_function(square, table.J1_NUMERATOR, table.J1_DENOMINATOR) * size
    near = near * (square - 14.6819706421238932572) * (square - 49.2184563216946036703)
    p, q, angle = _far_parts(size, 3 * math.pi / 4, _ORDER_1)
    value = jnp.where(size <= 5.0, near, _far(size, p * jnp.cos(angle) - q * jnp.sin(angle)))
    return jnp.where(x < 0, -value, value)


@unary("special_bessel_y0")
def _y0(x: jax.Array) -> jax.Array:
    near = rational_function(x * x, table.Y0_NUMERATOR, table.Y0_DENOMINATOR) + 2 / math.pi * jnp.log(x) * _j0(x)
    p, q, angle = _far_parts(x, math.pi / 4, _ORDER_0)
    value = jnp.where(x <= 5.0, near, _far(x, p * jnp.sin(angle) + q * jnp.cos(angle)))
    return _with_pole(x, value, -jnp.inf)


@unary("special_bessel_y1")
def _y1(x: jax.Array) -> jax.Array:
    near = x * rational_function(x * x, table.Y1_NUMERATOR, table.Y1_DENOMINATOR)
    near = near + 2 / math.pi * (_j1(x) * jnp.log(x) - 1.0 / x)
    p, q, angle = _far_parts(x, 3 * math.pi / 4, _ORDER_1)
    value = jnp.where(x <= 5.0, near, _far(x, p * jnp.sin(angle) + q * jnp.cos(angle)))
    return _with_pole(x, value, -jnp.inf)


_ORDER_0 = (table.ORDER_0_PP, table.ORDER_0_PQ, table.ORDER_0_QP, table.ORDER_0_QQ)
_ORDER_1 = (table.ORDER_1_PP, table.ORDER_1_PQ, table.ORDER_1_QP, table.ORDER_1_QQ)


def _far_parts(
    x: jax.Array, phase: float, tables: tuple[Sequence[float], ...]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the two amplitudes and the angle of a Bessel function far from 0."""
    pp, pq, qp, qq = tables
    inverse = 25.0 / (x * x)
    return rational_function(inverse, pp, pq), 5.0 / x * rational_function(inverse, qp, qq), x - phase


def _far(x: jax.Array, wave: jax.Array) -> jax.Array:
    return wave * math.sqrt(2 / math.pi) / jnp.sqrt(x)


def _with_pole(x: jax.Array, value: jax.Array, pole: float) -> jax.Array:
    """Return `value`, with NaN for negative numbers and the infinity `pole` at 0."""
    return jnp.where(x == 0, pole, jnp.where(x < 0, jnp.nan, value)).astype(x.dtype)


@unary("special_modified_bessel_k0")
def _k0(x: jax.Array) -> jax.Array:
    far = jnp.exp(-x) * _k_far(x, table.K0_FAR)
    return _with_pole(x, jnp.where(x <= 2.0, _k0_near(x), far), jnp.inf)


@unary("special_scaled_modified_bessel_k0")
def _scaled_k0(x: jax.Array) -> jax.Array:
    return _with_pole(x, jnp.where(x <= 2.0, _k0_near(x) * jnp.exp(x), _k_far(x, table.K0_FAR)), jnp.inf)


@unary("special_modified_bessel_k1")
def _k1(x: jax.Array) -> jax.Array:
    far = jnp.exp(-x) * _k_far(x, table.K1_FAR)
    return _with_pole(x, jnp.where(x <= 2.0, _k1_near(x), far), jnp.inf)


@unary("special_scaled_modified_bessel_k1")
def _scaled_k1(x: jax.Array) -> jax.Array:
    return _with_pole(x, jnp.where(x <= 2.0, _k1_near(x) * jnp.exp(x), _k_far(x, table.K1_FAR)), jnp.inf)


def _k0_near(x: jax.Array) -> jax.Array:
    return chebyshev_sum(x * x - 2.0, table.K0_NEAR) - jnp.log(0.5 * x) * _i0(x)


def _k1_near(x: jax.Array) -> jax.Array:
    return jnp.log(0.5 * x) * _i1(x) + chebyshev_sum(x * x - 2.0, table.K1_NEAR) / x


def _k_far(x: jax.Array, coefficients: Sequence[float]) -> jax.Array:
    return chebyshev_sum(8.0 / x - 2.0, coefficients) / jnp.sqrt(x)


@unary("special_spherical_bessel_j0")
def _spherical_j0(x: jax.Array) -> jax.Array:
    square = x * x
    near = polynomial(square, [(-1) ** k / math.factorial(2 * k + 1) for k in range(6, -1, -1)])
    value = jnp.where(jnp.abs(x) < 0.5, near, jnp.sin(x) / x)
    return jnp.where(jnp.isinf(x), jnp.zeros((), x.dtype), value)


@unary("special_airy_ai")
def _airy(x: jax.Array) -> jax.Array:
    value = jnp.where(x < -2.09, _airy_left(x), jnp.where(x >= 2.09, _airy_right(x), _airy_middle(x)))
    value = jnp.where(x > 103.892, jnp.zeros((), x.dtype), value)
    return jnp.where(jnp.isinf(x), jnp.asarray(jnp.nan, x.dtype), value)


def _airy_left(x: jax.Array) -> jax.Array:
    root = jnp.sqrt(-x)
    angle = -2.0 * x * root / 3.0
    z = 1.0 / angle
    f = 1.0 + z * z * rational_function(z * z, table.AIRY_AFN, table.AIRY_AFD)
    g = z * rational_function(z * z, table.AIRY_AGN, table.AIRY_AGD)
    turned = angle + 0.25 * math.pi
    return 1 / math.sqrt(math.pi) / jnp.sqrt(root) * (jnp.sin(turned) * f - jnp.cos(turned) * g)


def _airy_right(x: jax.Array) -> jax.Array:
    root = jnp.sqrt(x)
    zeta = 2.0 * x * root / 3.0
    series = rational_function(1.0 / zeta, table.AIRY_AN, table.AIRY_AD)
    return 1 / math.sqrt(math.pi) * series / (2.0 * jnp.sqrt(root) * jnp.exp(zeta))


def _airy_middle(x: jax.Array) -> jax.Array:
    """Return the power series, whose omitted terms are below double precision for |x| < 2.09."""
    terms = 18
    cube = x * x * x
    f, g = jnp.ones_like(x), jnp.ones_like(x)
    for k in range(terms, 0, -1):  # Horner's scheme, innermost term first
        f = 1.0 + f * cube / ((3 * k - 1) * (3 * k))
        g = 1.0 + g * cube / ((3 * k) * (3 * k + 1))
    return 0.355028053887817239260 * f - 0.258819403792806798405 * x * g
