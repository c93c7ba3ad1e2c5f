"""The values of tensors that a function with side effects writes to where it runs on zeros, saved and put back."""

from __future__ import annotations

import torch

from jtbridge._compat import storage_id


class WrittenValues:
    """Saves tensors just before they are written to, and puts their values back."""

    def __init__(self) -> None:
        self._storages: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}  # with a copy
        self._memories: list[tuple[torch.Tensor, torch.Tensor]] = []

    def save(self, tensor: torch.Tensor) -> None:
        """An operator is about to write to `tensor`."""
        if tensor.layout is torch.strided and storage_id(tensor) not in self._storages:
            storage = tensor.untyped_storage()
            self._storages[storage_id(tensor)] = storage, storage.clone()

    def save_memory(self, tensor: torch.Tensor) -> None:
        """``tensor.data`` is about to be assigned to."""
        self._memories.append((tensor, tensor.detach()))

    def restore(self) -> None:
        """Give every saved tensor its memory and its values back."""
        for tensor, memory in reversed(self._memories):
            tensor.data = memory
        for storage, values in self._storages.values():
            if storage.nbytes() != values.nbytes():
                storage.resize_(values.nbytes())
            storage.copy_(values)
