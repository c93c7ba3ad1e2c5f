"""Compare results of JAX with results of torch: count, dtype, shape, values."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from .convert import numpy_dtype, to_torch
from .exactness import FACTOR, FACTORS, as_exact, difference

_SINGLE = (torch.float32, torch.complex64)
# Where torch's own default tolerances (torch.testing.assert_close, by dtype) are too narrow for single precision:
# (operator, mode) -> (relative, absolute, reason).
_SUMS = "batched, torch takes another kernel, which adds up products of some hundreds in another order"
_CELLS = "sums in another order; double precision is no help, for it finds other cells, between which gradients jump"
TOLERANCES: dict[tuple[str, str], tuple[float, float, str]] = {
    ("addbmm", "vmap"): (1e-5, 2e-4, _SUMS),
    ("grid_sampler_3d", "grad"): (1e-5, 5e-5, _CELLS),
    ("grid_sampler_3d", "gradgrad"): (1e-5, 2e-4, _CELLS),
    ("nn.functional.conv2d", "vmap"): (1e-5, 1e-4, _SUMS),
    ("nn.functional.conv_transpose3d", "vmap"): (1e-5, 1e-3, _SUMS),
    ("linalg.householder_product", "grad"): (1e-5, 1e-3, "torch's backward has another formula where it is traced"),
}

# Outputs whose columns are eigenvectors, each of which may have any sign or phase.
EIGENVECTORS = {"linalg.eig": 1, "linalg.eigh": 1}


class MismatchError(AssertionError):
    """The two sides differ; the message says where and by how much."""


# Torch's result in double precision, or None if it has none.
Exact = Callable[[], Sequence[Any] | None]
AS_EXACT = "differs, but is as exact as torch against double precision"


def compare(
    operator: str, mode: str, expected: Sequence[Any], actual: Sequence[Any], values: bool, exact: Exact | None = None
) -> str:
    """Raise :class:`MismatchError` unless all leaves agree; without `values`, only compare dtypes and shapes.

    With `exact`, which a translation has, a leaf that differs is accepted where it is as close to that as torch's is
    (:mod:`.exactness`), and a note that says so is returned; and eigenvectors may have another phase.
    """
    if len(expected) != len(actual):
        raise MismatchError(f"{len(actual)} outputs, torch has {len(expected)}")
    wider = TOLERANCES.get((operator, mode), (None, None, ""))[:2]
    note = ""
    for i, (want, got) in enumerate(zip(expected, actual, strict=True)):
        if not isinstance(want, torch.Tensor):
            _compare_numbers(i, want, got, values)
            continue
        got = _same_form(i, want, got)
        if exact is not None and mode in ("forward", "vmap") and EIGENVECTORS.get(operator) == i:
            got = _in_phase(got, want)
        error = difference(want, got, *(wider if want.dtype in _SINGLE else (None, None))) if values else None
        if error is None:
            continue
        precise = exact() if exact is not None else None
        if precise is None or not as_exact(got, want, precise[i], FACTORS.get((operator, mode), FACTOR)):
            raise MismatchError(f"output {i}: {error}")
        note = AS_EXACT
    return note


def _same_form(i: int, want: torch.Tensor, got: Any) -> torch.Tensor:
    got = np.asarray(got)
    if got.dtype != (dtype := numpy_dtype(want.dtype)):
        raise MismatchError(f"output {i} has dtype {got.dtype}, torch's has {dtype}")
    if got.shape != tuple(want.shape):
        raise MismatchError(f"output {i} has shape {got.shape}, torch's has {tuple(want.shape)}")
    return to_torch(got)


def _in_phase(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """Return the columns, each multiplied by the number of absolute value 1 that brings it closest to torch's."""
    return got * (want * got.conj()).sum(-2, keepdim=True).sgn()


def _compare_numbers(i: int, want: Any, got: Any, values: bool) -> None:
    """Compare Python numbers. A compiled program returns a number that depends on the data as a 0-d array."""
    if isinstance(want, (bool, int, float, complex)):
        if np.shape(got) != ():
            raise MismatchError(f"output {i} has shape {np.shape(got)}, torch's is the number {want!r}")
        got = np.asarray(got).item()
    if values and got != want and not (_is_nan(got) and _is_nan(want)):
        raise MismatchError(f"output {i} is {got!r}, torch's is {want!r}")


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)
