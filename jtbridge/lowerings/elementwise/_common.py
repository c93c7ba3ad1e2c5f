"""Helpers of elementwise lowerings: torch's dtype conversions, and operands in the dtype in which torch computes."""

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


def convert(x: Any, dtype: np.dtype) -> Any:
    """Convert an array to another dtype, as torch does on the CPU."""
    source = np.dtype(x.dtype)
    if source == dtype:
        return x
    if dtype == np.bool_:
        return x != np.zeros((), source)
    if source.kind == "c" and dtype.kind != "c":
        return convert(jnp.real(x), dtype)
    if source == np.bool_ and dtype.kind not in "iu":
        # XLA rewrites a product with a converted bool as a selection between the other factor and 0, which loses a NaN
        # of that factor.
        return jnp.where(x, np.ones((), dtype), np.zeros((), dtype))
    if dtype.kind in "iu" and jnp.issubdtype(source, jnp.floating):
        return _float_to_integer(x, dtype)
    if dtype.itemsize <= 2 and dtype.kind not in "iu" and source.itemsize > 2:
        # Torch rounds to float32 before it rounds to the narrower dtype.
        return x.astype(jnp.float32).astype(dtype)
    return x.astype(dtype)


def rounded(x: jax.Array, dtype: np.dtype) -> jax.Array:
    """Round values to the precision of a narrower float dtype, and keep their own dtype.

    XLA may remove a conversion to the narrower dtype and back.
    """
    info = jnp.finfo(dtype)
    return lax.reduce_precision(x, info.nexp, info.nmant)


def quotient(a: Any, b: Any) -> jax.Array:
    """Return ``a / b``, correctly rounded also where `b` is a single number.

    XLA would replace the division by a single number by a product with its reciprocal. That product is not exact where
    the quotient is an integer: the floor of 61.0 / 61 must not be 0.
    """
    if jnp.issubdtype(b.dtype, jnp.floating) and size_of(b) == 1 and jnp.ndim(a) and not _exact_reciprocal(b):
        # This makes `b` an array that depends on `a`. Where `a` is NaN, the quotient is NaN for every `b`.
        b = jnp.where(jnp.isnan(a), jnp.ones((), b.dtype), b)
    return jnp.divide(a, b)


def _exact_reciprocal(b: Any) -> bool:
    """Return whether `b` is a constant whose reciprocal is exact: a power of two."""
    return isinstance(b, np.ndarray) and abs(float(np.frexp(float(b.item()))[0])) == 0.5


def _float_to_integer(x: jax.Array, dtype: np.dtype) -> jax.Array:
    """Convert floats to integers as C does on x86: through int32 or int64, and narrower integers wrap.

    NaN and floats that are out of range for int32 or int64 become its least integer. For uint32 and uint64, floats in
    the upper half of the dtype's range keep their value, and larger floats become 0.
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
