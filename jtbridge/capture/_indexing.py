"""``x[i]`` and ``x[i] = y`` where `i` is a tensor of one integer: torch reads its value, a graph takes the tensor."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import jax
import torch

from jtbridge._compat import DataDependentOutputException, FakeTensor, TorchDispatchMode, innermost, storage_id
from jtbridge._writes import written_tensors

from ._packed import noted_values

# Of uint8 torch makes a mask.
_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64)


def _get(x: torch.Tensor, index: Any) -> Any:
    values = noted_values(x)
    if values is not None and type(index) is int:  # the length of a packed sequence, which is needed as a number
        return torch.tensor(values[index])
    places = _places(x, index)
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
    """The modes that are active on this thread."""

    def __init__(self) -> None:
        self.stack: list[CopiedViews] = []


_WATCHING = _Watching()


@dataclasses.dataclass
class _Copy:
    """A copy ``x[i]``, which is a view of `x` in torch.

    Attributes:
        base, index: `x` and `i`.
        storage: that of `x`.
        writes: how often the storage of `x` was written to when the two were equal.
        is_ahead: whether the copy was written to, and `x` not yet.
    """

    base: torch.Tensor
    index: Any
    storage: int
    writes: int
    is_ahead: bool = False


class CopiedViews(TorchDispatchMode):
    """While it is active, code for which it matters that ``x[i]`` is a copy raises: torch needs the value of `i`.

    That is a write to ``x[i]``, and a use of it after a write to `x`. ``x[i] += y`` is allowed: Python assigns the
    written copy to ``x[i]`` before anything else can see it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._copies: dict[int, _Copy] = {}  # by storage
        self._writes: dict[int, int] = {}  # by storage
        self._alive: list[torch.Tensor] = []  # so that no storage is used twice

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
        """Note that a tensor is a copy where torch has the view ``base[index]``."""
        storage = storage_id(innermost(base))
        self._copies[storage_id(innermost(tensor))] = _Copy(base, index, storage, self._writes.get(storage, 0))
        self._alive += [innermost(tensor), innermost(base)]

    def assign(self, base: torch.Tensor, index: Any, value: Any) -> _Copy | None:
        """Note that a value is about to be assigned to ``base[index]``; the copy that it is, if it is one of that."""
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            return None
        copy = self._copies.get(storage_id(innermost(value)))
        if copy is None or copy.base is not base or copy.index is not index:
            return None
        copy.is_ahead = False
        return copy

    def assigned(self, copy: _Copy) -> None:
        """Note that a copy was assigned to what it is a copy of."""
        copy.writes = self._writes.get(copy.storage, 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # A view shows no values, and `prim` asks for the device of a tensor, where raising ends the process.
        if self._copies and not func.is_view and func.namespace != "prim":
            tensors = [t for t in jax.tree.leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
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


def _needs_value() -> DataDependentOutputException:
    return DataDependentOutputException(torch.ops.aten._local_scalar_dense.default)


def _set(x: torch.Tensor, index: Any, value: Any) -> Any:
    places = _places(x, index)
    if not places:
        return NotImplemented
    views = _WATCHING.stack[-1] if _WATCHING.stack else None
    copy = None if views is None else views.assign(x, index, value)
    # Of what lies there in all other dimensions a copy is written to, and put back.
    parts = [x]
    for dim, place in places:
        parts.append(parts[-1].index_select(dim, place))
    parts[-1][_with_zeros(index)] = value
    for (dim, place), whole, part in reversed(list(zip(places, parts[:-1], parts[1:], strict=True))):
        whole.index_copy_(dim, place, part)
    if views is not None and copy is not None:
        views.assigned(copy)
    return None


def _places(x: torch.Tensor, index: Any) -> list[tuple[int, torch.Tensor]]:
    """For each tensor of one integer in an index, the dimension of `x` that it is for, and the place there, as [1]."""
    parts = index if isinstance(index, tuple) else (index,)
    if not any(map(_is_number, parts)):
        return []
    after = sum(_dimensions(part) for part in parts[_ellipsis(parts) + 1 :])
    dim, places = 0, []
    for part in parts:
        if part is Ellipsis:
            dim = x.dim() - after
        elif _is_number(part):
            size = x.shape[dim]
            places.append((dim, torch.where(part < 0, part + size, part).reshape(1)))
        dim += _dimensions(part)
    return places


def _ellipsis(parts: tuple[Any, ...]) -> int:
    """The position of the ellipsis in an index; the last one if there is none."""
    return next((i for i, part in enumerate(parts) if part is Ellipsis), len(parts) - 1)


def _dimensions(part: Any) -> int:
    """How many dimensions a part of an index is for."""
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


# By torch's functions: the same, or NotImplemented where it is left to torch.
REPLACEMENTS = {torch.Tensor.__getitem__: _get, torch.Tensor.__setitem__: _set}
