"""The truth value of a tensor of numbers as a condition on data: ``if x.sum():`` is ``if x.sum() != 0:``."""

from __future__ import annotations

from typing import Any

import torch


def _is_nonzero(input: torch.Tensor) -> Any:
    """Return whether a number differs from 0, by a comparison.

    Torch reads the number, which has no value in a trace. Both results of a comparison can be traced (see
    ``modes/branches.py``).
    """
    if input.dtype is torch.bool or input.numel() != 1:
        return NotImplemented
    return bool(input.detach() != 0)


def _method(self: torch.Tensor) -> Any:
    return _is_nonzero(self)


REPLACEMENTS = {
    torch.is_nonzero: _is_nonzero,
    torch.Tensor.is_nonzero: _method,
    torch.Tensor.__bool__: _method,
}
