"""What lowerings share: torch's type promotion, dimensions counted from the end, and what a node says of itself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import fx

from jtbridge._dtypes import numpy_dtype

_HALF = (np.dtype(np.float16), np.dtype(jnp.bfloat16))


def jax_dtype(dtype: torch.dtype) -> np.dtype:
    """The NumPy/JAX dtype of the same bits."""
    return numpy_dtype(dtype, "a tensor")


def out_dtype(node: fx.Node, index: int = 0) -> np.dtype:
    """The dtype that torch's result has."""
    value = node.meta["val"]
    value = value[index] if isinstance(value, list | tuple) else value
    return jax_dtype(value.dtype)


def out_shape(node: fx.Node, index: int = 0) -> tuple[int, ...]:
    """The shape that torch's result has; where it was traced with symbolic sizes, with JAX's symbols."""
    if "jax_shapes" in node.meta:
        return node.meta["jax_shapes"][index]
    value = node.meta["val"]
    value = value[index] if isinstance(value, list | tuple) else value
    return tuple(value.shape)


def input_value(node: fx.Node, position: int | str) -> Any:
    """A tensor argument of a node as torch traced it: its shape, strides and dtype, without values."""
    argument = node.kwargs[position] if isinstance(position, str) else node.args[position]
    return argument.meta["val"] if isinstance(argument, fx.Node) else argument


def promoted(node: fx.Node, x: Any, y: Any) -> list[jax.Array]:
    """A node's first two arguments (arrays and Python numbers) as arrays of the dtype torch's promotion gives them."""
    dtype = promoted_dtype(node)
    return [jnp.asarray(x, dtype), jnp.asarray(y, dtype)]


def promoted_dtype(node: fx.Node) -> np.dtype:
    """The dtype to which torch promotes the first two arguments of a node."""
    return jax_dtype(torch.result_type(_stand_in(input_value(node, 0)), _stand_in(input_value(node, 1))))


def _stand_in(value: Any) -> Any:
    """Of a tensor: one of its dtype that is 0-d if it is 0-d. Numbers stay as they are."""
    if isinstance(value, torch.Tensor):
        return torch.empty((0,) if value.dim() else (), dtype=value.dtype)
    return value


def opmath(dtype: np.dtype) -> np.dtype:
    """The dtype that torch computes in: float32 for half precision."""
    return np.dtype(np.float32) if dtype in _HALF else dtype


def axis_of(dim: int, ndim: int) -> int:
    """A dimension counted from the front; 0-d arrays count as 1-d, as torch has it."""
    return dim % max(ndim, 1)


def axes_of(dims: Sequence[int] | int | None, ndim: int) -> tuple[int, ...]:
    """Dimensions counted from the front; none given, or an empty list, means all."""
    if dims is None or (not isinstance(dims, int) and len(dims) == 0):
        return tuple(range(ndim))
    dims = (dims,) if isinstance(dims, int) else dims
    return tuple(axis_of(d, ndim) for d in dims) if ndim else ()


def size_of(x: Any) -> int:
    """How many elements an array has."""
    return math.prod(jnp.shape(x))
