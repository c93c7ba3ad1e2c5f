"""``x[i]`` and ``x[i] = y`` where `i` is a tensor of one integer: torch reads its value, a graph takes the tensor."""

from __future__ import annotations

from typing import Any

import torch

from jtbridge._compat import FakeTensor

from ._packed import noted_values

# Of uint8 torch makes a mask.
_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64)


def _get(x: torch.Tensor, index: Any) -> Any:
    values = noted_values(x)
    if values is not None and type(index) is int:  # the length of a packed sequence, which is needed as a number
        return torch.tensor(values[index])
    places = _places(x, index)
    for dim, place in places:
        x = x.index_select(dim, place)
    return x[_with_zeros(index)] if places else NotImplemented


def _set(x: torch.Tensor, index: Any, value: Any) -> Any:
    places = _places(x, index)
    if not places:
        return NotImplemented
    # Of what lies there in all other dimensions a copy is written to, and put back.
    parts = [x]
    for dim, place in places:
        parts.append(parts[-1].index_select(dim, place))
    parts[-1][_with_zeros(index)] = value
    for (dim, place), whole, part in reversed(list(zip(places, parts[:-1], parts[1:], strict=True))):
        whole.index_copy_(dim, place, part)
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
