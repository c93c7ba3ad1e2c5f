"""Replacements of ``x[i]`` and ``x[i] = y`` for a 0-d integer tensor `i`, whose value torch reads."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterable
from typing import Any

import torch

from jtbridge._compat import DataDependentOutputException, FakeTensor, TorchDispatchMode, innermost, storage_id
from jtbridge.core.pytree import tensor_leaves
from jtbridge.core.writes import written_tensors

from .packed import noted_values

# Without uint8, because torch treats a uint8 tensor as a mask.
_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64)


def _get(x: torch.Tensor, index: Any) -> Any:
    values = noted_values(x)
    if values is not None and type(index) is int:  # a length of a packed sequence is needed as a number
        return torch.tensor(values[index])
    places = _places_of_numbers(x, index)
    if not places:
        return NotImplemented
    found = x
    for dim, place in places:
        found = found.index_select(dim, place)
    found = found[_with_zeros(index)]
    if _WATCHING.stack:
        _WATCHING.stack[-1].add(found, x, index)
    return found


class _Watching(threading.local):
    """The `CopiedViews` that are active on this thread."""

    def __init__(self) -> None:
        self.stack: list[CopiedViews] = []


_WATCHING = _Watching()


@dataclasses.dataclass
class _Copy:
    """A copy ``x[i]``, which is a view of `x` in torch.

    Attributes:
        base, index: `x` and `i`.
        storage: the storage of `x`.
        writes: the number of writes to the storage of `x` at the time when the copy was equal to ``x[i]``.
        is_ahead: whether the copy was written to, and ``x[i]`` not yet.
    """

    base: torch.Tensor
    index: Any
    storage: int
    writes: int
    is_ahead: bool = False


class CopiedViews(TorchDispatchMode):
    """Raises where it matters that ``x[i]`` is a copy and not a view, for which the value of `i` would be needed.

    It matters if ``x[i]`` is written to, and if ``x[i]`` is used or returned after a write to `x`. ``x[i] += y`` is
    allowed: Python assigns the written copy to ``x[i]`` before any other code can read it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._copies: dict[int, _Copy] = {}  # by storage
        self._writes: dict[int, int] = {}  # by storage
        self._alive: list[torch.Tensor] = []  # keeps the storages, the keys above, from being reused

    def __enter__(self) -> Any:
        _WATCHING.stack.append(self)
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        _WATCHING.stack.pop()
        ahead = any(copy.is_ahead for copy in self._copies.values())
        self._copies.clear()
        self._alive.clear()
        super().__exit__(*exception)
        if ahead and exception[0] is None:
            raise _needs_value()

    def add(self, tensor: torch.Tensor, base: torch.Tensor, index: Any) -> None:
        """Record that a tensor is a copy where torch has the view ``base[index]``."""
        storage = storage_id(innermost(base))
        self._copies[storage_id(innermost(tensor))] = _Copy(base, index, storage, self._writes.get(storage, 0))
        self._alive += [innermost(tensor), innermost(base)]

    def assign(self, base: torch.Tensor, index: Any, value: Any) -> _Copy | None:
        """Record that ``base[index]`` is about to be assigned; return the copy if the value is a copy of that view."""
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            return None
        copy = self._copies.get(storage_id(innermost(value)))
        if copy is None or copy.base is not base or copy.index is not index:
            return None
        copy.is_ahead = False
        return copy

    def assigned(self, copy: _Copy) -> None:
        """Record that a copy was assigned to the view that it is a copy of."""
        copy.writes = self._writes.get(copy.storage, 0)

    def refuse_stale(self, leaves: Iterable[Any]) -> None:
        """Raise if a result of the function is a copy ``x[i]`` from before a write to `x`."""
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided:
                continue
            copy = self._copies.get(storage_id(innermost(leaf)))
            if copy is not None and self._writes.get(copy.storage, 0) != copy.writes:
                raise _needs_value()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # A view reads no values. An operator of `prim` asks for a tensor's device; raising there ends the process.
        if self._copies and not func.is_view and func.namespace != "prim":
            tensors = tensor_leaves((args, kwargs))
            used = {storage_id(t) for t in tensors if t.layout is torch.strided}
            written = {storage_id(t) for t in written_tensors(func, args, kwargs) if t.layout is torch.strided}
            for storage, copy in self._copies.items():
                if copy.is_ahead and (storage in used or copy.storage in used):
                    raise _needs_value()
                if storage in used and self._writes.get(copy.storage, 0) != copy.writes:
                    raise _needs_value()
                copy.is_ahead = copy.is_ahead or storage in written
            for storage in written:
                self._writes[storage] = self._writes.get(storage, 0) + 1
        return func(*args, **kwargs)


def refuse_stale_copies(leaves: Iterable[Any]) -> None:
    """Raise if a result is a copy where torch has a view, and the memory of that view was written to afterwards."""
    if _WATCHING.stack:
        _WATCHING.stack[-1].refuse_stale(leaves)


def _needs_value() -> DataDependentOutputException:
    return DataDependentOutputException(torch.ops.aten._local_scalar_dense.default)


def _set(x: torch.Tensor, index: Any, value: Any) -> Any:
    places = _places_of_numbers(x, index)
    if not places:
        return NotImplemented
    views = _WATCHING.stack[-1] if _WATCHING.stack else None
    copy = None if views is None else views.assign(x, index, value)
    # Select the written slice of `x`, dimension by dimension, write to this copy, and copy it back into `x`.
    parts = [x]
    for dim, place in places:
        parts.append(parts[-1].index_select(dim, place))
    parts[-1][_with_zeros(index)] = value
    for (dim, place), whole, part in reversed(list(zip(places, parts[:-1], parts[1:], strict=True))):
        whole.index_copy_(dim, place, part)
    if views is not None and copy is not None:
        views.assigned(copy)
    return None


def _places_of_numbers(x: torch.Tensor, index: Any) -> list[tuple[int, torch.Tensor]]:
    """Return the dimension of `x` and the place there for each 0-d integer tensor in an index.

    A place is a tensor of shape ``[1]``. A negative integer is converted to the place from the start.
    """
    parts = index if isinstance(index, tuple) else (index,)
    if not any(map(_is_number, parts)):
        return []
    ellipsis = next((i for i, part in enumerate(parts) if part is Ellipsis), len(parts))
    after = sum(map(_dimensions, parts[ellipsis + 1 :]))
    dim, places = 0, []
    for part in parts:
        if part is Ellipsis:
            dim = x.dim() - after
        elif _is_number(part):
            size = x.shape[dim]
            places.append((dim, torch.where(part < 0, part + size, part).reshape(1)))
        dim += _dimensions(part)
    return places


def _dimensions(part: Any) -> int:
    """Return the number of dimensions that a part of an index selects from."""
    if part is None or part is Ellipsis or isinstance(part, bool):
        return 0
    is_mask = isinstance(part, torch.Tensor) and part.dtype is torch.bool
    return part.dim() if is_mask else 1


def _is_number(part: Any) -> bool:
    return isinstance(part, FakeTensor) and part.dim() == 0 and part.dtype in _INTEGERS


def _with_zeros(index: Any) -> Any:
    if not isinstance(index, tuple):
        return 0
    return tuple(0 if _is_number(part) else part for part in index)


# For each function of torch, a replacement, which returns NotImplemented where torch's own function is to run.
REPLACEMENTS = {torch.Tensor.__getitem__: _get, torch.Tensor.__setitem__: _set}
