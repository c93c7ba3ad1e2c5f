"""Host memory in and out of torch without a copy: NumPy views of XLA's buffers, and tensors over them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import numpy as np
import torch

from ._dtypes import carrier, numpy_dtype, torch_dtype
from ._functions import ArrayType

# From here on torch's parallel copy beats NumPy's (measured on 2 cores: 0.33 us against 0.84 us for 16 floats,
# 190 us against 90 us for a million).
_PARALLEL_COPY_ELEMENTS = 1 << 15


def reader(type_: ArrayType) -> Callable[[np.ndarray], torch.Tensor]:
    """A function that makes a tensor over the memory of a NumPy array of this type."""
    carried = carrier(type_.dtype)
    if carried is None:
        return torch.from_numpy
    numpy_carrier, _ = carried
    dtype = torch_dtype(type_.dtype, "an argument")
    return lambda array: torch.from_numpy(array.view(numpy_carrier)).view(dtype)


def writer(type_: ArrayType) -> Callable[[np.ndarray, torch.Tensor], None]:
    """A function that copies a tensor of this type into a NumPy array of the same shape."""
    read = reader(type_)
    size = int(np.prod(type_.shape))
    if size == 0:
        return lambda array, tensor: None
    if carrier(type_.dtype) is not None or size >= _PARALLEL_COPY_ELEMENTS or type_.dtype.kind == "c":

        def write(array: np.ndarray, tensor: torch.Tensor) -> None:
            read(array).copy_(tensor.detach())

        return write

    def write_small(array: np.ndarray, tensor: torch.Tensor) -> None:
        try:
            np.copyto(array, tensor.numpy())
        except RuntimeError:  # it requires grad, or is lazily negated or zero: rarer than asking every time is cheap
            read(array).copy_(tensor.detach())

    return write_small


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """The values of a tensor in NumPy memory of its own, of the same dtype."""
    memory = np.empty(tuple(tensor.shape), numpy_dtype(tensor.dtype, "a tensor"))
    writer(ArrayType(tuple(tensor.shape), memory.dtype))(memory, tensor)
    return memory


def placed(results: Sequence[np.ndarray], like: Sequence[jax.Array]) -> list[jax.Array]:
    """Results on the device of the arguments, committed to it if one of those is."""
    return jax.device_put(list(results), next((x.device for x in like if x.committed), None))
