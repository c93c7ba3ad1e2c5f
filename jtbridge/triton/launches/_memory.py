"""The memories of the tensors on which a kernel is launched.

A kernel gets the address of each tensor. From there it can reach the whole storage, for example other rows by the
stride between rows, and two tensors may share elements. JAX has no views, so the operator of a launch takes *memories*:
each is a contiguous tensor that covers all that its views can reach, and is passed once. A `MemoryView` says where in a
memory a tensor lies.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from jtbridge._compat import base_of, inside_functorch, storage_id
from jtbridge.errors import LaunchError


@dataclasses.dataclass(frozen=True)
class MemoryView:
    """The place of a tensor in a memory.

    Attributes:
        memory: position of the memory among the operands of the launch.
        offset: index of the tensor's first element in the memory.
        shape: shape of the tensor.
        strides: strides of the tensor, in elements.
    """

    memory: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def tensor(self, memories: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the tensor as a view of one of the contiguous memories."""
        memory = memories[self.memory]
        return memory.as_strided(self.shape, self.strides, memory.storage_offset() + self.offset)


def memories_of(tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[MemoryView]]:
    """Return the memories of tensors, and for each tensor its place in a memory."""
    wholes = [_contiguous_memory(tensor) for tensor in tensors]
    memories: list[torch.Tensor] = []
    for whole in sorted(wholes, key=lambda x: -x.numel()):
        if not any(_lies_in(whole, memory) for memory in memories):
            memories.append(whole)
    memories.sort(key=lambda memory: next(i for i, whole in enumerate(wholes) if _lies_in(whole, memory)))
    views = []
    for tensor, whole in zip(tensors, wholes, strict=True):
        position = next(i for i, memory in enumerate(memories) if _lies_in(whole, memory))
        offset = tensor.storage_offset() - memories[position].storage_offset() if tensor.numel() else 0
        views.append(MemoryView(position, int(offset), tuple(tensor.shape), tuple(tensor.stride())))
    return memories, views


def overlaps_written(memories: Sequence[torch.Tensor], written: Sequence[int]) -> bool:
    """Return whether a written memory shares its storage with another memory."""
    ids = [_storage_identity(memory) for memory in memories]
    return any(ids.count(ids[i]) > 1 for i in written)


def refuse_hidden_views(memories: Sequence[torch.Tensor], written: Sequence[int], kernel: str) -> None:
    """Raise if a memory does not cover its storage. Inside torch.vmap the storage is batched in another layout.

    Raises:
        LaunchError: a memory does not cover its storage, or a written memory shares its storage with another.
    """
    seen = [memory for memory in memories if _storage_identity(memory) >= 0]
    parts = [memory for memory in seen if memory.untyped_storage().nbytes() != memory.numel() * memory.element_size()]
    if parts or overlaps_written(memories, written):
        raise LaunchError(
            f"Kernel `{kernel}` is launched inside torch.vmap on views, whose storage torch.vmap hides. Launch it on "
            "copies (`.clone(memory_format=torch.contiguous_format)`), or use jax.vmap."
        )


def _contiguous_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a tensor as a contiguous tensor of the same dtype, because JAX has no strides.

    The memory of a view is its base, and that of a permuted tensor has the dimensions in the order of their strides. If
    the base has gaps, the memory is the range from the tensor's first to its last element.
    """
    base = base_of(tensor)
    if base.is_complex() and not tensor.is_complex():
        base = torch.view_as_real(base)
    if tensor.numel() and base.dtype == tensor.dtype:
        dense = _contiguous_permutation(base)
        if dense is not None and _lies_in(tensor, dense):
            return dense
    dense = _contiguous_permutation(tensor)
    if dense is not None:
        return dense
    return base.as_strided((_span(tensor),), (1,), tensor.storage_offset())


def _contiguous_permutation(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the tensor with its dimensions permuted to the order of memory, or None if there are gaps."""
    if tensor.is_contiguous():
        return tensor
    order = sorted(range(tensor.ndim), key=lambda d: (-tensor.stride(d), -tensor.shape[d]))
    permuted = tensor.permute(order)
    return permuted if permuted.is_contiguous() else None


def _lies_in(tensor: torch.Tensor, memory: torch.Tensor) -> bool:
    """Return whether a contiguous `memory` covers the range from the first to the last element of `tensor`."""
    if tensor is memory:
        return True
    if tensor.dtype != memory.dtype or _storage_identity(tensor) != _storage_identity(memory) or not tensor.numel():
        return False
    start = tensor.storage_offset() - memory.storage_offset()
    return start >= 0 and start + _span(tensor) <= memory.numel()


def _span(tensor: torch.Tensor) -> int:
    """Return the number of elements from the first to the last element, both included."""
    if not tensor.numel():
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _storage_identity(tensor: torch.Tensor) -> int:
    """Return an identifier of the storage. If torch.func hides the storage, it is negative and unique."""
    try:
        return storage_id(tensor)
    except NotImplementedError:
        if not inside_functorch():
            raise
        return -id(tensor)
