"""What elementwise lowerings share: torch's conversions, and operands in the dtype that torch computes in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from torch import fx

from jtbridge.lowerings._common import opmath, out_dtype, size_of
from jtbridge.lowerings._registry import register_lowering


def elementwise(*names: str, exact: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function of arrays of one dtype, torch's result dtype (float32 for half precision), as lowerings.

    `exact` is that of `operands`.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        def lowering(*args: Any, node: fx.Node) -> jax.Array:
            return function(*operands(node, *args, exact=exact)).astype(out_dtype(node))

        register_lowering(*names, node=True)(lowering)
        return function

    return register


def operands(node: fx.Node, *args: Any, exact: bool = False) -> list[Any]:
    """Arrays and Python numbers as arrays of the dtype in which torch computes the node's result.

    With half precision, torch computes in float32. By operator it takes numbers, and scalars of other dtypes, as they
    are (`exact`), or rounds them to the result's dtype first.
    """
    dtype = out_dtype(node)
    wide = opmath(dtype)
    return [array_of(x if exact else array_of(x, dtype), wide) for x in args]


def array_of(x: Any, dtype: np.dtype) -> Any:
    """An array converted, or a number as an array without dimensions: a Python number, or a size that is a symbol."""
    if isinstance(x, bool | int | float | complex):
        return number(x, dtype)
    return convert(jnp.asarray(x), dtype)


def number(value: complex, dtype: np.dtype) -> np.ndarray:
    """A Python number of a dtype; integers wrap, and converting a float to an integer drops its fraction."""
    if dtype.kind in "iu":
        wrapped = int(value.real) % 2 ** (8 * dtype.itemsize)
        return np.asarray(wrapped, f"u{dtype.itemsize}").view(dtype)
    with np.errstate(over="ignore"):
        return np.asarray(value if dtype.kind == "c" else value.real, dtype)


def convert(x: Any, dtype: np.dtype) -> Any:
    """An array in another dtype, as torch on the CPU converts."""
    source = np.dtype(x.dtype)
    if source == dtype:
        return x
    if dtype == np.bool_:
        return x != np.zeros((), source)
    if source.kind == "c" and dtype.kind != "c":
        return convert(jnp.real(x), dtype)
    if source == np.bool_ and dtype.kind not in "iu":
        # XLA makes a product with a converted bool a choice between the other factor and 0, and loses its NaN.
        return jnp.where(x, np.ones((), dtype), np.zeros((), dtype))
    if dtype.kind in "iu" and jnp.issubdtype(source, jnp.floating):
        return _float_to_integer(x, dtype)
    if dtype.itemsize <= 2 and dtype.kind not in "iu" and source.itemsize > 2:
        # torch rounds to float32 first.
        return x.astype(jnp.float32).astype(dtype)
    return x.astype(dtype)


def rounded(x: jax.Array, dtype: np.dtype) -> jax.Array:
    """Values rounded to a narrower float dtype, and kept in their own; XLA may skip a conversion there and back."""
    info = jnp.finfo(dtype)
    return lax.reduce_precision(x, info.nexp, info.nmant)


def quotient(a: Any, b: Any) -> jax.Array:
    """a / b, correctly rounded also by one number, which XLA would replace by a product with its reciprocal.

    The product is not exact where the quotient is an integer: the floor of 61.0 / 61 must not be 0.
    """
    if jnp.issubdtype(b.dtype, jnp.floating) and size_of(b) == 1 and jnp.ndim(a) and not _exact_reciprocal(b):
        b = jnp.where(jnp.isnan(a), jnp.ones((), b.dtype), b)
    return jnp.divide(a, b)


def _exact_reciprocal(b: Any) -> bool:
    return isinstance(b, np.ndarray) and abs(float(np.frexp(float(b.item()))[0])) == 0.5


def _float_to_integer(x: jax.Array, dtype: np.dtype) -> jax.Array:
    """What C makes of a float on x86: NaN and floats out of range are the least integer, narrow integers wrap.

    The unsigned integers of 32 and 64 bits have their upper half too.
    """
    wide = np.dtype(np.int64 if dtype.itemsize == 8 or dtype == np.uint8 else np.int32)
    x = x.astype(opmath(np.dtype(x.dtype))) if np.dtype(x.dtype).itemsize > 1 else x.astype(jnp.float32)
    least = np.iinfo(wide).min
    low = np.asarray(least, x.dtype)
    inside = (x >= low) & (x < -low)
    whole = jnp.where(inside, jnp.where(inside, x, 0).astype(wide), np.asarray(least, wide)).astype(dtype)
    if dtype not in (np.uint32, np.uint64):
        return whole
    upper = (x >= -low) & (x < -2 * low)
    return jnp.where(x >= -low, jnp.where(upper, x, 0).astype(dtype), whole)
