"""Trigonometric and hyperbolic functions and their inverses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ._common import elementwise
from .exponential import by_conjugates


def _register_with_prim(function: Callable[..., Any], name: str) -> None:
    elementwise(name, f"prims::{name}")(function)


_register_with_prim(jnp.sin, "sin")
_register_with_prim(jnp.cos, "cos")
_register_with_prim(jnp.tan, "tan")
_register_with_prim(jnp.arctan2, "atan2")
_register_with_prim(jnp.sinh, "sinh")
_register_with_prim(jnp.cosh, "cosh")
_register_with_prim(jnp.tanh, "tanh")


def _with_cuts(function: Callable[[jax.Array], jax.Array], name: str) -> None:
    """Register a function whose branch cuts, for complex numbers, are on the real axis."""
    _register_with_prim(lambda x: by_conjugates(function, x) if jnp.iscomplexobj(x) else function(x), name)


_with_cuts(jnp.arcsin, "asin")
_with_cuts(jnp.arccos, "acos")
_with_cuts(jnp.arccosh, "acosh")
_with_cuts(jnp.arctanh, "atanh")


def _with_imaginary_cuts(function: Callable[[jax.Array], jax.Array], name: str) -> None:
    """Register a function with f(-conj(x)) = -conj(f(x)) whose branch cuts are on the imaginary axis.

    A number with the real part -0.0 is left of a cut.
    """

    def lowering(x: jax.Array) -> jax.Array:
        if not jnp.iscomplexobj(x):
            return function(x)
        left = jnp.signbit(jnp.real(x))
        right = function(lax.complex(jnp.abs(jnp.real(x)), jnp.imag(x)))
        return lax.complex(jnp.where(left, -jnp.real(right), jnp.real(right)), jnp.imag(right))

    _register_with_prim(lowering, name)


_with_imaginary_cuts(jnp.arcsinh, "asinh")
_with_imaginary_cuts(jnp.arctan, "atan")
