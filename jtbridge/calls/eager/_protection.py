"""Protection of large arguments that are shared with torch: their memory is copied before the first write."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from jtbridge._compat import TorchDispatchMode, exports_to_dlpack_seen, innermost, replace_memory, storage_id
from jtbridge.core.writes import written_tensors

# Functions that give access to a tensor's memory, which can then be written to without an operator.
_EXPOSING = frozenset(
    {
        torch.Tensor.numpy,
        torch.Tensor.__array__,
        torch.Tensor.data_ptr,
        torch.Tensor.untyped_storage,
        torch.Tensor.storage,
        torch.Tensor.share_memory_,
        torch.Tensor.__dlpack__,
        torch.Tensor.resize_,
        torch.Tensor.set_,
    }
)


class CopyOnWrite:
    """A context that protects the memory of some tensors: a write to a tensor goes to a copy of its memory.

    The copy replaces the memory of the tensor's storage, so every view of the tensor sees the write.

    Example:
        with CopyOnWrite([x]):
            x.add_(1)  # the memory that `x` was made over is as it was
    """

    def __init__(self, tensors: Sequence[torch.Tensor]):
        self._tensors = {storage_id(tensor): tensor for tensor in tensors}
        self._operators = _Writes(self)
        self._functions = _Exposures(self)
        self._exports = exports_to_dlpack_seen(self.release)

    def __enter__(self) -> CopyOnWrite:
        self._operators.__enter__()
        self._functions.__enter__()
        self._exports.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._exports.__exit__(*error)
        self._functions.__exit__(*error)
        self._operators.__exit__(*error)

    def release(self, tensor: torch.Tensor) -> None:
        """Replace the memory of a tensor by a copy, if it is protected."""
        tensor = innermost(tensor)
        if tensor.layout is torch.strided:
            protected = self._tensors.pop(storage_id(tensor), None)
            if protected is not None:
                replace_memory(protected.untyped_storage())


class _Writes(TorchDispatchMode):
    def __init__(self, owner: CopyOnWrite):
        super().__init__()
        self._release = owner.release

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        for tensor in written_tensors(func, args, kwargs):
            self._release(tensor)
        return func(*args, **kwargs)


class _Exposures(TorchFunctionMode):
    def __init__(self, owner: CopyOnWrite):
        super().__init__()
        self._release = owner.release

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in _EXPOSING:
            self._release(args[0])
        return func(*args, **(kwargs or {}))
