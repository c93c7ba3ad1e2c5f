"""Conversions of tensors to JAX arrays and back, bit for bit, through NumPy and without the measured library."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import torch

_NUMPY_DTYPES: dict[torch.dtype, np.dtype] = {
    getattr(torch, name): np.dtype(name)
    for name in (
        *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
    )
}
# Types that NumPy knows only through ml_dtypes; they are converted as integers of the same width.
_VIEWED: dict[torch.dtype, tuple[np.dtype, torch.dtype]] = {
    torch.bfloat16: (np.dtype(ml_dtypes.bfloat16), torch.int16),
    **{
        getattr(torch, name): (np.dtype(getattr(ml_dtypes, name)), torch.uint8)
        for name in ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu")
    },
}
_TORCH_DTYPES = {numpy: dtype for dtype, numpy in _NUMPY_DTYPES.items()} | {
    numpy: dtype for dtype, (numpy, _) in _VIEWED.items()
}


def jax_unsupported_reason(leaf: Any) -> str | None:
    """Return why JAX has no array for a tensor, or None if it has one."""
    if leaf.layout is not torch.strided:
        return f"JAX has no array for a tensor of layout {leaf.layout}"
    if leaf.is_nested or leaf.is_quantized:
        return "JAX has no array for a nested or quantised tensor"
    if leaf.dtype not in _NUMPY_DTYPES and leaf.dtype not in _VIEWED:
        return f"JAX has no dtype for {leaf.dtype}"
    if leaf.device.type != "cpu":
        return f"the tensor is on device {leaf.device}"
    return None


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return a detached, row-major tensor of the same values, without lazy conjugation or negation."""
    values = tensor.detach().resolve_conj().resolve_neg()
    return values.clone(memory_format=torch.contiguous_format)


def numpy_dtype(dtype: torch.dtype) -> np.dtype:
    return _VIEWED[dtype][0] if dtype in _VIEWED else _NUMPY_DTYPES[dtype]


def to_jax(tensor: torch.Tensor) -> jax.Array:
    values = plain(tensor)
    if values.dtype in _VIEWED:
        dtype, carrier = _VIEWED[values.dtype]
        return jnp.asarray(values.view(carrier).numpy().view(dtype))
    return jnp.asarray(values.numpy())


def to_torch(array: Any) -> torch.Tensor:
    values = np.array(array, order="C")
    dtype = _TORCH_DTYPES[values.dtype]
    if dtype in _VIEWED:
        carrier = np.dtype(np.int16 if values.itemsize == 2 else np.uint8)
        return torch.from_numpy(values.view(carrier)).view(dtype)
    return torch.from_numpy(values)


def shape_of(tensor: torch.Tensor) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tuple(tensor.shape), numpy_dtype(tensor.dtype))
