"""The memory that a kernel sees behind the tensors that it is launched on.

A kernel is given addresses. It may go from one on to all that lies in the same memory, as one does that is given the
first row and the stride of the others, and two addresses may lead to the same element. So what is passed on are whole
memories, and where in them a tensor begins; each memory once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from jtbridge._compat import inside_functorch, storage_id
from jtbridge.errors import LaunchError


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a tensor lies.

    Attributes:
        memory: position of the memory among those that are passed on.
        offset: the element of it that the tensor begins with.
        shape: of the tensor.
        strides: of the tensor, in elements.
    """

    memory: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def tensor(self, memories: Sequence[torch.Tensor]) -> torch.Tensor:
        """The tensor, in memories that are contiguous."""
        memory = memories[self.memory]
        return memory.as_strided(self.shape, self.strides, memory.storage_offset() + self.offset)


def memories_of(tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[Place]]:
    """The memories of tensors, each as a contiguous tensor, and where in them the tensors lie."""
    wholes = [_whole(tensor) for tensor in tensors]
    memories: list[torch.Tensor] = []
    for whole in sorted(wholes, key=lambda x: -x.numel()):
        if not any(_lies_in(whole, memory) for memory in memories):
            memories.append(whole)
    memories.sort(key=lambda memory: next(i for i, whole in enumerate(wholes) if _lies_in(whole, memory)))
    return memories, [_place(*pair, memories) for pair in zip(tensors, wholes, strict=True)]


def shared(memories: Sequence[torch.Tensor], written: Sequence[int]) -> bool:
    """Whether one of them that is written is in part another one: of another dtype, or a part of what is not known."""
    ids = [_storage(memory) for memory in memories]
    return any(ids.count(ids[i]) > 1 for i in written)


def refuse_parts(memories: Sequence[torch.Tensor], written: Sequence[int], kernel: str) -> None:
    """Raise where torch.vmap hides what a tensor is a part of, from which it would be batched apart.

    Raises:
        LaunchError: a memory is not the whole of one.
    """
    seen = [memory for memory in memories if _storage(memory) >= 0]
    parts = [memory for memory in seen if memory.untyped_storage().nbytes() != memory.numel() * memory.element_size()]
    if parts or shared(memories, written):
        raise LaunchError(
            f"Kernel `{kernel}` is launched inside torch.vmap on views, whose memory is hidden there. Launch it on "
            "tensors of their own (`.clone(memory_format=torch.contiguous_format)`), or use jax.vmap."
        )


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """All the memory that a tensor is a view of, as a contiguous tensor of its dtype: JAX knows no strides.

    Of a tensor that is only permuted this is the permutation back. Where there are gaps in what it is a view of, it is
    all that lies between its own first and last element.
    """
    base = tensor if tensor._base is None else tensor._base
    if base.is_complex() and not tensor.is_complex():
        base = torch.view_as_real(base)
    if tensor.numel() and base.dtype == tensor.dtype:
        dense = _dense(base)
        if dense is not None and _lies_in(tensor, dense):
            return dense
    dense = _dense(tensor)
    if dense is not None:
        return dense
    return base.as_strided((_span(tensor),), (1,), tensor.storage_offset())


def _dense(tensor: torch.Tensor) -> torch.Tensor | None:
    """A tensor with its elements in the order of memory; None if there are gaps between them."""
    if tensor.is_contiguous():
        return tensor
    order = sorted(range(tensor.ndim), key=lambda d: (-tensor.stride(d), -tensor.shape[d]))
    permuted = tensor.permute(order)
    return permuted if permuted.is_contiguous() else None


def _place(tensor: torch.Tensor, whole: torch.Tensor, memories: Sequence[torch.Tensor]) -> Place:
    position = next(i for i, memory in enumerate(memories) if _lies_in(whole, memory))
    offset = tensor.storage_offset() - memories[position].storage_offset() if tensor.numel() else 0
    return Place(position, int(offset), tuple(tensor.shape), tuple(tensor.stride()))


def _lies_in(tensor: torch.Tensor, memory: torch.Tensor) -> bool:
    """Whether a contiguous tensor has in it all that lies between the first and the last element of another one."""
    if tensor is memory:
        return True
    if tensor.dtype != memory.dtype or _storage(tensor) != _storage(memory) or not tensor.numel():
        return False
    start = tensor.storage_offset() - memory.storage_offset()
    return start >= 0 and start + _span(tensor) <= memory.numel()


def _span(tensor: torch.Tensor) -> int:
    """How many elements lie from its first to its last, both counted."""
    if not tensor.numel():
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _storage(tensor: torch.Tensor) -> int:
    """What tensors of the same memory have in common; a number of its own, negative, where torch.func hides it."""
    try:
        return storage_id(tensor)
    except NotImplementedError:
        if not inside_functorch():
            raise
        return -id(tensor)
