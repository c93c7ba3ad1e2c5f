"""Helpers for lowerings: torch's type promotion, negative dimensions, and metadata of graph nodes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import fx

from jtbridge._compat import InconclusiveDimensionOperation
from jtbridge.core.dtypes import numpy_dtype

_HALF = (np.dtype(np.float16), np.dtype(jnp.bfloat16))


def jax_dtype(dtype: torch.dtype) -> np.dtype:
    """Return the NumPy/JAX dtype with the same bits as a torch dtype."""
    return numpy_dtype(dtype, "a tensor")


def out_dtype(node: fx.Node, index: int = 0) -> np.dtype:
    """Return the dtype of a node's result in torch; for a node with several results, the dtype of result `index`."""
    value = node.meta["val"]
    value = value[index] if isinstance(value, list | tuple) else value
    return jax_dtype(value.dtype)


def out_shape(node: fx.Node, index: int = 0) -> tuple[int, ...]:
    """Return the shape of a node's result, or of result `index`, with JAX's symbolic dimensions for torch's symbols."""
    if "jax_shapes" in node.meta:
        return node.meta["jax_shapes"][index]
    value = node.meta["val"]
    value = value[index] if isinstance(value, list | tuple) else value
    return tuple(value.shape)


def input_value(node: fx.Node, position: int | str) -> Any:
    """Return an argument of a node; if the argument is a tensor, return its fake tensor (shape, strides, dtype)."""
    argument = node.kwargs[position] if isinstance(position, str) else node.args[position]
    return argument.meta["val"] if isinstance(argument, fx.Node) else argument


def promoted(node: fx.Node, x: Any, y: Any) -> list[jax.Array]:
    """Return `x` and `y`, the node's first two arguments, as arrays of the dtype to which torch promotes them."""
    dtype = promoted_dtype(node)
    return [jnp.asarray(x, dtype), jnp.asarray(y, dtype)]


def promoted_dtype(node: fx.Node) -> np.dtype:
    """Return the dtype to which torch promotes the first two arguments of a node."""
    return jax_dtype(torch.result_type(_stand_in(input_value(node, 0)), _stand_in(input_value(node, 1))))


def _stand_in(value: Any) -> Any:
    """Return a real tensor that promotes like a fake tensor: same dtype, and 0-d or not. Return a number unchanged."""
    if isinstance(value, torch.Tensor):
        return torch.empty((0,) if value.dim() else (), dtype=value.dtype)
    return value


def opmath(dtype: np.dtype) -> np.dtype:
    """Return the dtype in which torch computes: float32 for half precision, otherwise `dtype`."""
    return np.dtype(np.float32) if dtype in _HALF else dtype


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


def _float_to_integer(x: jax.Array, dtype: np.dtype) -> jax.Array:
    """Convert floats to integers as C does on x86: to int32 or int64 first, then to a narrower dtype by wrapping.

    NaN and floats outside the range of that first dtype become its least integer. For uint32 and uint64, floats in the
    upper half of the dtype's range keep their value, and larger floats become 0.
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


def axis_of(dim: int, ndim: int) -> int:
    """Return a dimension, which may be negative, as an axis from 0 up; a 0-d array counts as 1-d, as in torch."""
    return dim % max(ndim, 1)


def axes_of(dims: Sequence[int] | int | None, ndim: int) -> tuple[int, ...]:
    """Return dimensions, which may be negative, as axes from 0 up; None or an empty list means all dimensions."""
    if dims is None or (not isinstance(dims, int) and len(dims) == 0):
        return tuple(range(ndim))
    dims = (dims,) if isinstance(dims, int) else dims
    return tuple(axis_of(d, ndim) for d in dims) if ndim else ()


def is_below(size: Any, bound: int) -> bool:
    """Return whether a size is certainly below a bound; False if the comparison of a symbolic size is undecided."""
    try:
        return bool(size < bound)
    except InconclusiveDimensionOperation:
        return False


def size_of(x: Any) -> int:
    """Return the number of elements of an array."""
    return math.prod(jnp.shape(x))


def size_along(x: jax.Array, axes: Sequence[int]) -> int:
    """Return the product of the lengths of some axes: the number of elements that a reduction over them combines."""
    return math.prod(x.shape[axis] for axis in axes)


def computed_once(
    function: Callable[..., jax.Array], elsewhere: Callable[..., jax.Array] | None = None
) -> Callable[..., jax.Array]:
    """Return a function whose result XLA does not compute again in each operation that reads it.

    XLA's CPU compiler copies additions and products into every operation that reads their result, but it does not copy
    a conditional. So the function becomes the branch of a conditional that is always taken, which XLA cannot infer.

    Args:
        function: a function of arrays that returns an array.
        elsewhere: a function that computes the same on platforms other than the CPU; `function` if None.
    """

    def in_a_branch(*args: jax.Array) -> jax.Array:
        result = jax.eval_shape(function, *args)
        is_taken = jax.lax.optimization_barrier(jnp.array(True))
        return jax.lax.cond(is_taken, function, lambda *_: jnp.zeros(result.shape, result.dtype), *args)

    return lambda *args: jax.lax.platform_dependent(*args, cpu=in_a_branch, default=elsewhere or function)
