"""Values of tensors that operators write to, saved before the writes and restored after the run."""

from __future__ import annotations

import torch

from jtbridge._compat import storage_id


class WrittenValues:
    """Store of tensors' values, saved just before the tensors are written to."""

    def __init__(self) -> None:
        self._storages: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}  # a storage and its copy
        self._memories: list[tuple[torch.Tensor, torch.Tensor]] = []

    def save(self, tensor: torch.Tensor) -> None:
        """Save the storage of `tensor`, to which an operator is about to write."""
        if tensor.layout is torch.strided and storage_id(tensor) not in self._storages:
            storage = tensor.untyped_storage()
            self._storages[storage_id(tensor)] = storage, storage.clone()

    def save_memory(self, tensor: torch.Tensor) -> None:
        """Save the memory of `tensor`, before an assignment to ``tensor.data``."""
        self._memories.append((tensor, tensor.detach()))

    def restore(self) -> None:
        """Restore the memory and the values of every saved tensor."""
        for tensor, memory in reversed(self._memories):
            tensor.data = memory
        for storage, values in self._storages.values():
            if storage.nbytes() != values.nbytes():
                storage.resize_(values.nbytes())
            storage.copy_(values)
