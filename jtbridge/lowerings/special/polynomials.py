"""Orthogonal polynomials whose degrees are elements of arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from torch import fx

from jtbridge.lowerings._common import convert, opmath, out_dtype
from jtbridge.lowerings._registry import register_lowering

Step = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
Function = Callable[[jax.Array, jax.Array], jax.Array]


def _register_polynomial(name: str) -> Callable[[Function], Function]:
    """Return a decorator that registers a function of (x, int64 degrees) for the three overloads of a polynomial."""

    def register(function: Function) -> Function:
        def lowering(x: Any, n: Any, *, node: fx.Node) -> jax.Array:
            wide = opmath(out_dtype(node))
            a, b = jnp.broadcast_arrays(jnp.asarray(x, wide), jnp.asarray(n, wide))
            degree = convert(b, np.dtype(np.int64))  # negative if `b` is NaN or out of range for int64
            value = jnp.where(degree < 0, jnp.zeros((), wide), function(a, degree))
            return value.astype(out_dtype(node))

        register_lowering(f"special_{name}", f"special_{name}.n_scalar", f"special_{name}.x_scalar", node=True)(
            lowering
        )
        return function

    return register


def _by_recurrence(n: jax.Array, second: jax.Array, step: Step) -> jax.Array:
    """Return element `n` of a sequence that starts with 1 and `second`.

    ``step(k, q, p)`` computes element k + 1 from element k (q) and element k - 1 (p). All array elements advance
    together, up to the highest degree among them. As in torch, an array element that becomes NaN stays NaN.
    """

    def unfinished(state: tuple[jax.Array, ...]) -> jax.Array:
        k, _, q = state
        return jnp.any((k < n) & ~jnp.isnan(q))

    def advance(state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        k, p, q = state
        following = step(k.astype(q.dtype), q, p)
        active = (k < n) & ~jnp.isnan(q)
        return k + 1, jnp.where(active, q, p), jnp.where(active, following, q)

    start = (jnp.ones((), np.int64), jnp.ones_like(second), second)
    _, _, value = jax.lax.while_loop(unfinished, advance, start)
    return jnp.where(n == 0, jnp.ones_like(value), value)


def _alternating_sign(n: jax.Array, dtype: np.dtype) -> jax.Array:
    return jnp.where(n % 2 == 0, 1, -1).astype(dtype)


def _chebyshev(x: jax.Array, n: jax.Array, limit: int, kind: str) -> jax.Array:
    """Return a Chebyshev polynomial.

    Degrees over `limit` use the closed form inside (-1, 1). At -1 and 1 the values are known. All else is computed by
    recurrence.
    """
    degree = n.astype(x.dtype)
    closed, right, left, second = _FORMS[kind](x, degree, _alternating_sign(n, x.dtype))
    inside = (n > limit) & (jnp.abs(x) < 1)
    ends = jnp.abs(x) == 1
    series = _by_recurrence(jnp.where(inside | ends, 0, n), second, lambda k, q, p: (x + x) * q - p)
    return jnp.where(ends, jnp.where(x > 0, right, left), jnp.where(inside, closed, series))


# Each kind returns its closed form, its values at 1 and at -1, and its polynomial of degree 1.
def _first_kind(x: jax.Array, n: jax.Array, sign: jax.Array) -> tuple[jax.Array, ...]:
    return jnp.cos(n * jnp.arccos(x)), jnp.ones_like(x), sign, x


def _second_kind(x: jax.Array, n: jax.Array, sign: jax.Array) -> tuple[jax.Array, ...]:
    angle = jnp.arccos(x)
    sine = jnp.sin(angle)
    limit = (n + 1) * jnp.cos((n + 1) * angle) / x
    return jnp.where(sine != 0, jnp.sin((n + 1) * angle) / sine, limit), n + 1, sign * (n + 1), x + x


def _third_kind(x: jax.Array, n: jax.Array, sign: jax.Array) -> tuple[jax.Array, ...]:
    angle = jnp.arccos(x)
    left = sign * (n + n + 1)
    form = jnp.cos((n + 0.5) * angle) / jnp.cos(angle / 2)
    return jnp.where(jnp.sin(angle / 2) != 1, form, left), jnp.ones_like(x), left, x + x - 1


def _fourth_kind(x: jax.Array, n: jax.Array, sign: jax.Array) -> tuple[jax.Array, ...]:
    angle = jnp.arccos(x)
    right = n + n + 1
    form = jnp.sin((n + 0.5) * angle) / jnp.sin(angle / 2)
    return jnp.where(jnp.cos(angle / 2) != 1, form, right), right, sign, x + x + 1


_FORMS = {"t": _first_kind, "u": _second_kind, "v": _third_kind, "w": _fourth_kind}


def _register_chebyshev(kind: str, limit: int, shifted_limit: int) -> None:
    _register_polynomial(f"chebyshev_polynomial_{kind}")(lambda x, n: _chebyshev(x, n, limit, kind))
    _register_polynomial(f"shifted_chebyshev_polynomial_{kind}")(
        lambda x, n: _chebyshev(x + x - 1, n, shifted_limit, kind)
    )


for _kind, _limit, _shifted_limit in (("t", 6, 6), ("u", 8, 6), ("v", 8, 6), ("w", 8, 4)):
    _register_chebyshev(_kind, _limit, _shifted_limit)


def _hermite(x: jax.Array, n: jax.Array, second: jax.Array, step: Step) -> jax.Array:
    limit = 512 if x.dtype == np.float64 else 128  # torch's limit, beyond which torch returns NaN
    value = _by_recurrence(jnp.minimum(n, limit), second, step)
    return jnp.where(n > limit, jnp.asarray(jnp.nan, x.dtype), value)


@_register_polynomial("hermite_polynomial_h")
def _hermite_h(x: jax.Array, n: jax.Array) -> jax.Array:
    return _hermite(x, n, x + x, lambda k, q, p: (x + x) * q - (k + k) * p)


@_register_polynomial("hermite_polynomial_he")
def _hermite_he(x: jax.Array, n: jax.Array) -> jax.Array:
    return _hermite(x, n, x, lambda k, q, p: x * q - k * p)


@_register_polynomial("laguerre_polynomial_l")
def _laguerre(x: jax.Array, n: jax.Array) -> jax.Array:
    value = _by_recurrence(n, 1 - x, lambda k, q, p: ((k + k + (1 - x)) * q - k * p) / (k + 1))
    return jnp.where(x == 0, jnp.ones_like(x), value)


@_register_polynomial("legendre_polynomial_p")
def _legendre(x: jax.Array, n: jax.Array) -> jax.Array:
    value = _by_recurrence(n, x, lambda k, q, p: ((k + k + 1) * x * q - k * p) / (k + 1))
    ends = jnp.abs(x) == 1
    return jnp.where(ends, jnp.where(x > 0, jnp.ones_like(x), _alternating_sign(n, x.dtype)), value)
