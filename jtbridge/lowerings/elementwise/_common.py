"""Helpers of elementwise lowerings: torch's dtype conversions, and operands in the dtype in which torch computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from torch import fx

from jtbridge.lowerings._common import convert, opmath, out_dtype, size_of
from jtbridge.lowerings._registry import register_lowering


def elementwise(*names: str, exact: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function of arrays of one dtype as the lowering of each named operator.

    The function gets its operands in the dtype of torch's result, or in float32 for half precision. Its result is
    converted to the dtype of torch's result. `operands` explains `exact`.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        def lowering(*args: Any, node: fx.Node) -> jax.Array:
            return function(*operands(node, *args, exact=exact)).astype(out_dtype(node))

        register_lowering(*names, node=True)(lowering)
        return function

    return register


def operands(node: fx.Node, *args: Any, exact: bool = False) -> list[Any]:
    """Convert arrays and Python numbers to the dtype in which torch computes the node's result.

    For half precision, torch computes in float32. Depending on the operator, torch converts numbers, and scalars of
    other dtypes, directly (`exact`), or rounds them to the result's dtype first.
    """
    dtype = out_dtype(node)
    wide = opmath(dtype)
    return [array_of(x if exact else array_of(x, dtype), wide) for x in args]


def array_of(x: Any, dtype: np.dtype) -> Any:
    """Convert an array, a Python number or a symbolic size to a dtype; numbers and sizes become 0-d arrays."""
    if isinstance(x, bool | int | float | complex):
        return number(x, dtype)
    return convert(jnp.asarray(x), dtype)


def number(value: complex, dtype: np.dtype) -> np.ndarray:
    """Return a Python number as a 0-d array of a dtype; an integer dtype wraps numbers and drops their fraction."""
    if dtype.kind in "iu":
        wrapped = int(value.real) % 2 ** (8 * dtype.itemsize)
        return np.asarray(wrapped, f"u{dtype.itemsize}").view(dtype)
    with np.errstate(over="ignore"):
        return np.asarray(value if dtype.kind == "c" else value.real, dtype)


def rounded_to_precision(x: jax.Array, dtype: np.dtype) -> jax.Array:
    """Round values to the precision of a narrower float dtype, without changing their dtype.

    A conversion to the narrower dtype and back is not enough, because XLA may remove it.
    """
    info = jnp.finfo(dtype)
    return lax.reduce_precision(x, info.nexp, info.nmant)


def round_to_even(x: jax.Array) -> jax.Array:
    """Round to the nearest integer; of two equally near ones, to the even one."""
    return lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN)


def quotient(a: Any, b: Any, *, exact: bool = False) -> jax.Array:
    """Return ``a / b``, correctly rounded if `b` has one element; with `exact`, correctly rounded for any `b`.

    XLA would replace the division by a number or a broadcast array by a product with its reciprocal. That product is
    not exact where the quotient is an integer: the floor of 61.0 / 61 must not be 0. To prevent this for arrays too
    costs time, so only `exact` does.
    """
    if not jnp.issubdtype(b.dtype, jnp.floating) or not jnp.ndim(a):
        return jnp.divide(a, b)
    if exact or (size_of(b) == 1 and not _has_exact_reciprocal(b)):
        # This makes `b` an array that depends on `a`. Where `a` is NaN, the quotient is NaN for every `b`.
        b = jnp.where(jnp.isnan(a), jnp.ones((), b.dtype), b)
    return jnp.divide(a, b)


def _has_exact_reciprocal(b: Any) -> bool:
    """Return whether `b` is a constant whose reciprocal is exact: a power of two."""
    return isinstance(b, np.ndarray) and abs(float(np.frexp(float(b.item()))[0])) == 0.5
