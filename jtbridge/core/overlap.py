"""Tensors of which several elements are one in memory, as those of `expand` and `unfold`."""

from __future__ import annotations

from typing import NoReturn

import torch

from jtbridge.errors import DifferentiationError


def may_overlap(tensor: torch.Tensor) -> bool:
    """Return whether elements of a tensor may be one in memory. It is sure if the answer is False."""
    if tensor.layout is not torch.strided or tensor.numel() == 0 or tensor.is_contiguous():
        return False
    reach = 0  # the distance in memory between the first and the last element of the dimensions so far
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def refuse_derivative(name: str, operator: str) -> NoReturn:
    """Refuse to differentiate a function that writes to a tensor of which several elements are one in memory.

    Raises:
        DifferentiationError: always.
    """
    raise DifferentiationError(
        f"`{name}` writes to a tensor of which several elements are one in memory (`{operator}`), as those of `expand` "
        "and `unfold`, and torch's derivatives of such a write are wrong. Write to a `clone()` of the tensor."
    )
