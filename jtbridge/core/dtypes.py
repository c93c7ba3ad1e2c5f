"""Dtypes that JAX and torch both have, and the changes of width between them.

While ``jax_enable_x64`` is off, JAX uses int32 where torch uses int64, and JAX has no 64-bit floats. A JAX int32 array
therefore reaches torch as int64, unless ``int32="keep"``: labels, token ids and indices must be int64 in torch. A
64-bit result comes back as a 32-bit array, as 64-bit NumPy arrays do in JAX.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import jax
import ml_dtypes
import numpy as np
import torch

from jtbridge.errors import DTypeError

# Stands for an int64 result where torch raises on a CPU. Both 32-bit halves of the number are the least int32, so the
# conversion of int64 results to int32, which keeps the lower half, gives the least int32.
NO_INT64 = -(2**63) + 2**31

# Sources: https://docs.pytorch.org/docs/stable/tensor_attributes.html and jax.numpy's dtype list.
_PAIRS: tuple[tuple[torch.dtype, np.dtype], ...] = tuple(
    (getattr(torch, name), np.dtype(scalar))
    for name, scalar in [
        ("bool", np.bool_),
        ("uint8", np.uint8),
        ("uint16", np.uint16),
        ("uint32", np.uint32),
        ("uint64", np.uint64),
        ("int8", np.int8),
        ("int16", np.int16),
        ("int32", np.int32),
        ("int64", np.int64),
        ("float16", np.float16),
        ("bfloat16", ml_dtypes.bfloat16),
        ("float32", np.float32),
        ("float64", np.float64),
        ("complex64", np.complex64),
        ("complex128", np.complex128),
        ("float8_e4m3fn", ml_dtypes.float8_e4m3fn),
        ("float8_e4m3fnuz", ml_dtypes.float8_e4m3fnuz),
        ("float8_e5m2", ml_dtypes.float8_e5m2),
        ("float8_e5m2fnuz", ml_dtypes.float8_e5m2fnuz),
        ("float8_e8m0fnu", ml_dtypes.float8_e8m0fnu),
    ]
    if hasattr(torch, name)
)
_TO_TORCH = {numpy: torch_dtype for torch_dtype, numpy in _PAIRS}
_TO_NUMPY = dict(_PAIRS)

# NumPy dtypes that torch.from_numpy refuses, each with the integer dtypes of the same width to view its arrays through.
_CARRIERS: dict[np.dtype, tuple[np.dtype, torch.dtype]] = {
    numpy: ((np.dtype(np.uint8), torch.uint8) if numpy.itemsize == 1 else (np.dtype(np.int16), torch.int16))
    for numpy in _TO_TORCH
    if numpy.kind == "V" or numpy.type.__module__.startswith("ml_dtypes")
}


def torch_dtype(dtype: np.dtype, what: str) -> torch.dtype:
    """Return the torch dtype with the same bits as a NumPy or JAX dtype; `what` names the array in the error."""
    try:
        return _TO_TORCH[np.dtype(dtype)]
    except (KeyError, TypeError):
        raise DTypeError(
            f"{what} has JAX dtype `{dtype}`, which torch does not have. Both sides have: "
            f"{', '.join(str(d) for d in _TO_TORCH)}. Convert it with `.astype(...)` before the call"
            + (" (a PRNG key is passed as `rng=`)." if "key" in str(dtype) else ".")
        ) from None


def has_torch_dtype(dtype: np.dtype) -> bool:
    """Return whether torch has a JAX dtype. Some dtypes exist only in JAX, such as that of a key."""
    return isinstance(dtype, np.dtype) and dtype in _TO_TORCH


def argument_dtypes(
    dtypes: Iterable[np.dtype], names: Callable[[], Sequence[str]], function: str, *, keep_int32: bool
) -> tuple[torch.dtype, ...]:
    """Return the torch dtypes in which the array arguments of a function reach it.

    Args:
        dtypes: the dtypes of the arrays.
        names: returns the names of the arguments, for the error.
        function: the name of the function.
        keep_int32: whether int32 stays int32 while x64 is off. Otherwise int32 becomes int64, torch's dtype of
            integers.

    Raises:
        DTypeError: torch does not have one of the dtypes.
    """
    widen = not keep_int32 and not jax.config.jax_enable_x64  # type: ignore[attr-defined]
    found = []
    for i, dtype in enumerate(dtypes):
        wanted = _TO_TORCH.get(dtype) or torch_dtype(dtype, f"argument `{names()[i]}` of `{function}`")
        found.append(torch.int64 if widen and wanted is torch.int32 else wanted)
    return tuple(found)


def numpy_dtype(dtype: torch.dtype, what: str | Callable[[], str]) -> np.dtype:
    """Return the NumPy dtype with the same bits as a torch dtype; `what` names the tensor in the error.

    `what` is a string for a result, and a function that returns a string for an argument.
    """
    try:
        return _TO_NUMPY[dtype]
    except KeyError:
        name, where = (what, "inside the function") if isinstance(what, str) else (what(), "before the call")
        raise DTypeError(
            f"{name} has torch dtype `{dtype}`, which JAX does not have. Both sides have: "
            f"{', '.join(str(d) for d in _TO_NUMPY)}. Convert it with `.to(...)` {where}."
        ) from None


def canonical_dtype(dtype: np.dtype) -> np.dtype:
    """Return the dtype that JAX uses for a dtype: 64-bit types become 32-bit types while x64 is off."""
    return np.dtype(jax.dtypes.canonicalize_dtype(dtype))


def carrier(dtype: np.dtype) -> tuple[np.dtype, torch.dtype] | None:
    """Return the integer dtypes of NumPy and torch that arrays of a dtype are viewed as, to pass between the two.

    Bfloat16 and the float8 types need such a dtype. For other dtypes the result is None.
    """
    return _CARRIERS.get(dtype)


def is_differentiable(dtype: np.dtype) -> bool:
    """Return whether arrays of this dtype have tangents of the same dtype (float or complex)."""
    return jax.dtypes.issubdtype(dtype, np.inexact)
