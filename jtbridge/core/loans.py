"""Protection of arrays whose memory torch shares: it is copied before the first write."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from jtbridge._compat import (
    DispatchMode,
    StorageWeakRef,
    exports_to_dlpack_seen,
    innermost,
    replace_memory,
    storage_id,
    storage_of,
)

from .writes import AS_NUMPY, written_tensors

# Functions that give access to a tensor's memory, which can then be written to without an operator.
_EXPOSING = frozenset(
    {
        *AS_NUMPY,
        torch.Tensor.data_ptr,
        torch.Tensor.untyped_storage,
        torch.Tensor.storage,
        torch.Tensor.share_memory_,
        torch.Tensor.__dlpack__,
        torch.Tensor.resize_,
        torch.Tensor.set_,
    }
)


# The memory of arrays that torch uses now, by `storage_id`. A weak reference keeps the id from being used again.
_LENT: dict[int, StorageWeakRef] = {}


class Loan:
    """The memory of some JAX arrays that torch uses in a run, and as long as the graph of the run exists.

    A function may keep an argument, as in ``self.average = x.detach()``, and write to it later. So when the last object
    that refers to the loan is gone, memory that is still in use is replaced by a copy.

    Args:
        tensors: tensors over the memory.
    """

    __slots__ = ("_storages",)

    def __init__(self, tensors: Sequence[torch.Tensor]):
        self._storages = [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]
        for storage in self._storages:
            _LENT[storage.cdata] = storage

    def __bool__(self) -> bool:
        return bool(self._storages)

    def end(self) -> None:
        """End the loan although the memory is still in use: whoever uses it will not write to it."""
        for reference in self._storages:
            _LENT.pop(reference.cdata, None)

    def __del__(self) -> None:
        if sys.is_finalizing():
            return
        for reference in self._storages:
            storage = storage_of(reference) if _LENT.pop(reference.cdata, None) is not None else None
            if storage is not None:
                replace_memory(storage)


def protected() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which a write to memory that torch has on loan goes to a copy of it."""
    return CopyOnWrite() if _LENT else contextlib.nullcontext()


@contextlib.contextmanager
def lent(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Protect the memory of tensors inside the block. Writes to them go to a copy, which they share from then on."""
    loan = Loan(tensors)
    try:
        with protected():
            yield
    finally:
        loan.end()


class CopyOnWrite:
    """A context that protects the memory of all loans: a write to a tensor goes to a copy of its memory.

    The copy replaces the memory of the tensor's storage, so every view of the tensor sees the write.

    Example:
        loan = Loan([x])
        with CopyOnWrite():
            x.add_(1)  # the memory that `x` was made over is as it was
    """

    def __init__(self) -> None:
        self._operators = _Writes()
        self._functions = _Exposures()
        self._exports = exports_to_dlpack_seen(_end_loan)

    def __enter__(self) -> CopyOnWrite:
        self._operators.__enter__()
        self._functions.__enter__()
        self._exports.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._exports.__exit__(*error)
        self._functions.__exit__(*error)
        self._operators.__exit__(*error)


def _end_loan(tensor: torch.Tensor) -> None:
    """Replace the memory of a tensor by a copy, if it is on loan."""
    tensor = innermost(tensor)
    if tensor.layout is torch.strided and _LENT.pop(storage_id(tensor), None) is not None:
        replace_memory(tensor.untyped_storage())


class _Writes(DispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        for tensor in written_tensors(func, args, kwargs):
            _end_loan(tensor)
        return func(*args, **kwargs)


class _Exposures(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in _EXPOSING:
            _end_loan(args[0])
        return func(*args, **(kwargs or {}))
