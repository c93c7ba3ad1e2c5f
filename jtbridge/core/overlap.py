"""Writes whose result depends on the order in which elements are computed, because several share memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from jtbridge._compat import OpOverload, overload_name, schema_of, storage_id

from .pytree import tensor_leaves
from .writes import written_tensors

_MAX_MAP_ELEMENTS = 1 << 28  # elements; tensors that span more memory are assumed to overlap if their ranges do

_aten = torch.ops.aten
# Operators that write to a copy of the first argument. The copy has the argument's strides unless a stride is 0.
_WRITE_TO_A_COPY = frozenset(
    {
        _aten.select_scatter.default,
        _aten.slice_scatter.default,
        _aten.diagonal_scatter.default,
        _aten.as_strided_scatter.default,
    }
)
# Each element that these operators write depends only on the elements of the arguments at the same position.
_BY_ELEMENT = frozenset({_aten.copy_.default, _aten.masked_fill_.Scalar, _aten.masked_fill_.Tensor})


def overlapping_write_reason(fn: OpOverload, args: tuple, kwargs: dict[str, Any]) -> str | None:
    """Return how an operator writes to elements that share memory with others; None if it does not.

    Torch does not define the result of such a write, and torch's derivatives do not follow it.

    Args:
        fn: the operator.
        args: its arguments.
        kwargs: its keyword arguments.
    """
    written = list(args[:1]) if fn in _WRITE_TO_A_COPY else written_tensors(fn, args, kwargs)
    if fn in _WRITE_TO_A_COPY and 0 in (stride for _, stride in _offset_and_dimensions(args[0])[1]):
        return None
    written = [tensor for tensor in written if tensor.layout is torch.strided and tensor.numel()]
    if any(map(may_overlap, written)):
        return "it writes to a tensor whose elements share memory, as those of `expand` and `unfold` do"
    if not written or fn in _WRITE_TO_A_COPY:
        return None
    name = schema_of(fn).name.partition("::")[2]
    by_element = torch.Tag.pointwise in fn.tags or fn in _BY_ELEMENT or name.startswith(("_foreach_", "_fused_"))
    # `torch.addmm(x, y, z, out=x)` is `x.addmm_(y, z)`, which torch defines.
    has_in_place_form = overload_name(fn).endswith("out") and hasattr(_aten, f"{name}_")
    is_in_place = has_in_place_form and isinstance(args[0], torch.Tensor) and _is_same(args[0], written[0])
    leaves = tensor_leaves((args[is_in_place:], kwargs))
    for tensor in written:
        read = [t for t in leaves if t.layout is torch.strided and storage_id(t) == storage_id(tensor)]
        again = sum(_is_same(t, tensor) for t in (written if by_element else read)) > 1
        if again or any(shares_other_elements(tensor, t) for t in read):
            return "it writes to memory that it reads as other elements, as in `x /= x[0]` and `x.addmm_(x, x)`"
    return None


def may_overlap(tensor: torch.Tensor, *, ignoring_expanded: bool = False) -> bool:
    """Return whether elements of a tensor may share memory. If the result is False, they do not.

    With `ignoring_expanded`, elements along expanded dimensions, whose stride is 0, do not count.
    """
    if tensor.layout is not torch.strided or tensor.numel() == 0 or tensor.is_contiguous():
        return False
    reach = 0  # the distance in memory between the first and the last element of the dimensions so far
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1 or (ignoring_expanded and stride == 0):
            continue
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def shares_elements(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have an element in common in memory."""
    if storage_id(tensor) != storage_id(other) or not (tensor.numel() and other.numel()):
        return False
    return _offset_and_dimensions(tensor) == _offset_and_dimensions(other) or shares_other_elements(tensor, other)


def _is_same(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have the same elements in the same order."""
    return storage_id(tensor) == storage_id(other) and _offset_and_dimensions(tensor) == _offset_and_dimensions(other)


def shares_other_elements(written: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors of one storage share an element that has different positions in them."""
    if _offset_and_dimensions(written) == _offset_and_dimensions(other) or not other.numel():
        return False
    if written.itemsize != other.itemsize:
        return True
    (start, stop), (first, last) = _range(written), _range(other)
    if last <= start or stop <= first:
        return False
    low, high = min(start, first), max(stop, last)
    if high - low > _MAX_MAP_ELEMENTS:
        return True
    memory = np.zeros(high - low, bool)
    _elements(memory, written, low)[...] = True
    return bool(_elements(memory, other, low).any())


def _offset_and_dimensions(tensor: torch.Tensor) -> tuple[int, list[tuple[int, int]]]:
    """Return the offset of a tensor, and the size and stride of each dimension that may have several elements."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    several = [(size, stride) for size, stride in sizes if not (isinstance(size, int) and size == 1)]
    return int(tensor.storage_offset()), several


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the offset of a tensor's first element in its storage, and the offset after its last element."""
    start = int(tensor.storage_offset())
    steps = [(int(size) - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return start, start + sum(steps) + 1


def _elements(memory: np.ndarray, tensor: torch.Tensor, start: int) -> np.ndarray:
    """Return the elements of a tensor as a view of `memory`, an array for the storage from the offset `start`."""
    here = memory[tensor.storage_offset() - start :]
    return np.lib.stride_tricks.as_strided(here, tuple(tensor.shape), tensor.stride())


def whole_storage(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a tensor's storage in one dimension, as a view in the tensor's dtype."""
    length = tensor.untyped_storage().nbytes() // tensor.itemsize
    return tensor.detach().as_strided((length,), (1,), 0)
