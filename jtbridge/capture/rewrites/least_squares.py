"""Result types of ``torch.linalg.lstsq``. Torch infers none, because the shape of the residuals may depend on data."""

from __future__ import annotations

from typing import Any

import torch

LEAST_SQUARES = torch.ops.aten.linalg_lstsq.default
_WITH_SINGULAR_VALUES = ("gelss", "gelsd")


def least_squares_results(a: torch.Tensor, b: torch.Tensor, rcond: Any = None, *, driver: str | None = None) -> Any:
    """Return tensors of the types that ``lstsq(a, b)`` returns on a CPU; None where these depend on data.

    Only an overdetermined system has residuals, and only with another driver than the default one. The drivers `gelss`
    and `gelsd` find the rank, and return residuals only if the rank is full.
    """
    *batch, rows, columns = a.shape
    overdetermined = rows > columns
    if not a.is_cpu or (overdetermined and driver in _WITH_SINGULAR_VALUES):
        return None
    is_vector = b.ndim == 1 or (b.ndim == a.ndim - 1 and b.shape == a.shape[:-1])
    right = () if is_vector else (b.shape[-1],)
    batch = list(torch.broadcast_shapes(batch, b.shape[: b.ndim - 1 - len(right)]))
    real = a.dtype.to_real()
    has_residuals = overdetermined and driver == "gels"
    return (
        a.new_empty([*batch, columns, *right]),
        a.new_empty([*batch, *(right or (1,))] if has_residuals else [0], dtype=real),
        a.new_empty([0] if driver == "gels" else batch, dtype=torch.int64),
        a.new_empty([*batch, min(rows, columns)] if driver in _WITH_SINGULAR_VALUES else [0], dtype=real),
    )
