"""Protection of arrays whose memory torch shares: the memory is copied before torch's first write."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from jtbridge._compat import (
    DispatchMode,
    HigherOrderOperator,
    StorageWeakRef,
    control_flow_outside_modes,
    exports_to_dlpack_seen,
    flex_attention_uncompiled,
    innermost,
    is_flex_attention,
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

# Held while memory is replaced. A thread that is about to write to memory on loan waits while another replaces it.
_REPLACING = threading.RLock()


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
        """End the loan although the memory is still in use. The code that uses it must not write to it."""
        for reference in self._storages:
            _LENT.pop(reference.cdata, None)

    def __del__(self) -> None:
        if sys.is_finalizing():
            return
        _replace_lent_memory([reference.cdata for reference in self._storages])


def protected() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which a write to memory that torch has on loan goes to a copy of it."""
    return CopyOnWrite() if _LENT else contextlib.nullcontext()


@contextlib.contextmanager
def lent(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Protect the memory of tensors inside the block. A write goes to a copy, which becomes the tensor's memory."""
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
            x.add_(1)  # `x` has new memory now; the lent memory is unchanged
    """

    def __init__(self) -> None:
        self._contexts = contextlib.ExitStack()

    def __enter__(self) -> CopyOnWrite:
        with contextlib.ExitStack() as stack:
            stack.enter_context(_Writes())
            stack.enter_context(_Exposures())
            stack.enter_context(exports_to_dlpack_seen(_end_loan))
            # Torch's operators that take functions run outside the modes, so nothing sees a write inside them.
            stack.enter_context(control_flow_outside_modes(_end_all_loans))
            stack.enter_context(flex_attention_uncompiled())
            self._contexts = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._contexts.__exit__(*error)


def _end_loan(tensor: torch.Tensor) -> None:
    """Replace the memory of a tensor by a copy, if it is on loan."""
    tensor = innermost(tensor)
    if tensor.layout is torch.strided and (storage := storage_id(tensor)) in _LENT:
        _replace_lent_memory([storage])


def _end_all_loans() -> None:
    """Replace all memory on loan by copies, for code whose writes are not seen."""
    _replace_lent_memory(list(_LENT))


def _replace_lent_memory(storages: Sequence[int]) -> None:
    """Replace memory by copies where it is still on loan and in use."""
    with _REPLACING:
        for number in storages:
            if (reference := _LENT.get(number)) is None:
                continue
            storage = storage_of(reference)
            if storage is not None:
                replace_memory(storage)
            _LENT.pop(number, None)


class _Writes(DispatchMode):
    supports_higher_order_operators = True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):  # such as `flex_attention`
            _end_all_loans()
            return func(*args, **kwargs)
        for tensor in written_tensors(func, args, kwargs):
            _end_loan(tensor)
        return func(*args, **kwargs)


class _Exposures(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in _EXPOSING:
            _end_loan(args[0])
        is_flex_attention(func)  # which makes `flex_attention_uncompiled` take effect
        return func(*args, **(kwargs or {}))
