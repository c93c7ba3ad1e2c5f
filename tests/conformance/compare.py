"""What came out of JAX against what came out of torch: count, dtype, shape, values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from .convert import numpy_dtype, to_torch

# Where torch's own default tolerances (torch.testing.assert_close, by dtype) are too narrow for single precision:
# (operator, mode) -> (relative, absolute, reason).
_SUMS = "batched, torch takes another kernel, which adds up products of some hundreds in another order"
TOLERANCES: dict[tuple[str, str], tuple[float, float, str]] = {
    ("addbmm", "vmap"): (1e-5, 2e-4, _SUMS),
    ("nn.functional.conv2d", "vmap"): (1e-5, 1e-4, _SUMS),
    ("nn.functional.conv_transpose3d", "vmap"): (1e-5, 1e-3, _SUMS),
    ("linalg.householder_product", "grad"): (1e-5, 1e-3, "torch's backward has another formula where it is traced"),
}


class MismatchError(AssertionError):
    """The two sides differ; the message says where and by how much."""


def compare(operator: str, mode: str, expected: Sequence[Any], actual: Sequence[Any], values: bool) -> None:
    """Raise :class:`MismatchError` unless all leaves agree; with `values` off, in dtype and shape alone."""
    if len(expected) != len(actual):
        raise MismatchError(f"{len(actual)} outputs, torch has {len(expected)}")
    wider = TOLERANCES.get((operator, mode), (None, None, ""))[:2]
    for i, (want, got) in enumerate(zip(expected, actual, strict=True)):
        if isinstance(want, torch.Tensor):
            single = want.dtype in (torch.float32, torch.complex64)
            _compare_arrays(i, want, got, *(wider if single else (None, None)), values)
        else:
            _compare_numbers(i, want, got, values)


def _compare_arrays(
    i: int, want: torch.Tensor, got: Any, relative: float | None, absolute: float | None, values: bool
) -> None:
    got = np.asarray(got)
    if got.dtype != (dtype := numpy_dtype(want.dtype)):
        raise MismatchError(f"output {i} has dtype {got.dtype}, torch's has {dtype}")
    if got.shape != tuple(want.shape):
        raise MismatchError(f"output {i} has shape {got.shape}, torch's has {tuple(want.shape)}")
    if not values:
        return
    got = to_torch(got)
    if want.dtype.itemsize == 1 and want.dtype.is_floating_point:
        # assert_close does not know the float8 types; every one of their values is a float32.
        want, got = want.float(), got.float()
    try:
        torch.testing.assert_close(got, want, rtol=relative, atol=absolute, equal_nan=True)
    except AssertionError as error:
        raise MismatchError(f"output {i}: {' '.join(str(error).split())}") from None


def _compare_numbers(i: int, want: Any, got: Any, values: bool) -> None:
    """Python numbers. A compiled program can only return one that depends on the data as a 0-d array."""
    if isinstance(want, (bool, int, float, complex)):
        if np.shape(got) != ():
            raise MismatchError(f"output {i} has shape {np.shape(got)}, torch's is the number {want!r}")
        got = np.asarray(got).item()
    if values and got != want and not (_is_nan(got) and _is_nan(want)):
        raise MismatchError(f"output {i} is {got!r}, torch's is {want!r}")


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)
