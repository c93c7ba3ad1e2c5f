"""Writes whose result depends on the order in which elements are computed, because several are one in memory."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from jtbridge._compat import storage_id

_LARGEST_MAP = 1 << 28  # bytes; beyond it memories that lie in one another are taken to overlap


def overlapping_write(written: Iterable[torch.Tensor], given: Iterable[torch.Tensor]) -> str | None:
    """Return how an operator writes to elements that are one in memory with others, or None.

    Torch does not define the result of such a write, nor do its derivatives follow it.

    Args:
        written: the tensors that the operator writes to.
        given: all tensors that it reads.
    """
    read = [tensor for tensor in given if tensor.layout is torch.strided]
    for tensor in written:
        if tensor.layout is not torch.strided or not tensor.numel():
            continue
        if may_overlap(tensor):
            return (
                "it writes to a tensor of which several elements are one in memory, as those of `expand` and `unfold`"
            )
        if any(_shares(tensor, other) for other in read if storage_id(other) == storage_id(tensor)):
            return "it writes to memory that the same operator reads as other elements, as in `x /= x[0]`"
    return None


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


def _shares(written: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether tensors of one storage share elements, other than each with its like."""
    if _place(written) == _place(other) or not other.numel():
        return False
    if written.itemsize != other.itemsize:
        return True
    (start, stop), (first, last) = _range(written), _range(other)
    if last <= start or stop <= first:
        return False
    low, high = min(start, first), max(stop, last)
    if high - low > _LARGEST_MAP:
        return True
    memory = np.zeros(high - low, bool)
    _elements(memory, written, low)[...] = True
    return bool(_elements(memory, other, low).any())


def _place(tensor: torch.Tensor) -> tuple[int, list[tuple[int, int]]]:
    """Return the offset of a tensor, and the size and stride of each dimension with several elements."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return int(tensor.storage_offset()), [(size, stride) for size, stride in sizes if size != 1]


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the places in memory of a tensor's first element, and after its last."""
    start = int(tensor.storage_offset())
    steps = [(int(size) - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return start, start + sum(steps) + 1


def _elements(memory: np.ndarray, tensor: torch.Tensor, start: int) -> np.ndarray:
    """Return the elements of a tensor as a view of a map of the memory that begins at a place."""
    here = memory[tensor.storage_offset() - start :]
    return np.lib.stride_tricks.as_strided(here, tuple(tensor.shape), tensor.stride())
