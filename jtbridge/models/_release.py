"""The weights of a torch module: releasing them, and writing them back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from jtbridge._compat import MODULE_TABLES, ReleasedTensor
from jtbridge.core.containers import entries_of, items_of
from jtbridge.core.convert import to_torch
from jtbridge.core.dtypes import torch_dtype
from jtbridge.core.overlap import may_overlap
from jtbridge.errors import ModelError
from jtbridge.state import same_tensors

from ._layout import OF_TORCH, entries, overlapping
from ._made_state import MadeTensor, place_made
from ._run import place
from ._state_dict import as_dtype


def release_tensor(module: torch.nn.Module, tensor: torch.Tensor) -> None:
    """Replace `tensor` by a tensor without memory everywhere in a module.

    The memory of `tensor` itself is freed too, because an optimizer may refer to it.
    """
    _exchange(module, tensor, ReleasedTensor(tensor))
    with torch.no_grad():
        tensor.data = torch.empty(0, dtype=tensor.dtype)


def load_into(
    module: torch.nn.Module, name: str, arrays: Mapping[str, Any], made: Sequence[MadeTensor]
) -> torch.nn.Module:
    """Copy arrays into the tensors of a module, by name, and return the module.

    `made` says where calls stored tensors that the module does not have.
    """
    found = entries(module)
    for key, array in arrays.items():
        entry = found.get(key)
        if entry is not None and entry.kind != "attribute" and tuple(array.shape) != tuple(entry.tensor.shape):
            raise ModelError(
                f"`{key}` has shape {tuple(array.shape)}, and `{name}` has {tuple(entry.tensor.shape)} in torch. "
                "Nothing was loaded. Start from `params, state = net.init()`."
            )
        if entry is not None and entry.kind != "attribute" and not _can_hold(entry.tensor.dtype, array):
            raise ModelError(
                f"`{key}` is {array.dtype}, and `{name}` has {entry.tensor.dtype} in torch, which cannot hold such "
                f"values. Nothing was loaded. Convert it, such as by `{key.rpartition('.')[2]}.astype(...)`, or make "
                "the torch module in that dtype."
            )
    for key in overlapping(found) & arrays.keys():
        if not same_tensors(found[key].tensor.detach(), as_dtype(to_torch(arrays[key]), found[key].tensor.dtype)):
            raise ModelError(
                f"`{key}` of `{name}` shares memory with another tensor of the module, so no other value of it can be "
                "loaded: it would change the other one as well. Nothing was loaded. Give it its own memory in the "
                "torch module, with `.clone()`."
            )
    dtypes = {one.name: one.dtype for one in made}
    with torch.no_grad():
        for key, array in arrays.items():
            entry = found.get(key)
            if entry is None:
                if key not in dtypes:
                    place(module, key, to_torch(array, copy=True))
                continue
            old = entry.tensor
            if isinstance(old, ReleasedTensor) or (old.shape == tuple(array.shape) and may_overlap(old)):
                # Torch cannot write to a released tensor, nor to an expanded one, whose elements share memory.
                new = as_dtype(to_torch(array, copy=True), old.dtype)
                if isinstance(old, torch.nn.Parameter):
                    new = torch.nn.Parameter(new, requires_grad=old.requires_grad)
                    vars(new).update(vars(old))
                _exchange(module, old, new)
            elif old.shape == tuple(array.shape):
                old.copy_(to_torch(array))
            else:
                place(module, key, to_torch(array, copy=True))
        tensors = {key: as_dtype(to_torch(arrays[key], copy=True), dtype) for key, dtype in dtypes.items()}
        place_made(module, made, tensors)
    return module


def _can_hold(dtype: torch.dtype, array: Any) -> bool:
    """Return whether a dtype can hold the kind of numbers that an array has: complex, real, integer or bool."""
    given = array.dtype if isinstance(array, torch.Tensor) else torch_dtype(array.dtype, "a tensor")
    return torch.can_cast(given, dtype)


def _exchange(module: torch.nn.Module, old: torch.Tensor, new: torch.Tensor) -> None:
    """Replace `old` by `new` in a module: in its attributes, and in the containers and modules there."""
    seen: set[int] = set()

    def exchanged(value: Any) -> Any:
        if value is old:
            return new
        if not isinstance(value, torch.nn.Module | dict | list | tuple) or id(value) in seen:
            return value
        if not isinstance(value, tuple):  # a tuple is rebuilt wherever it occurs
            seen.add(id(value))
        if isinstance(value, torch.nn.Module):
            for table in MODULE_TABLES:
                exchange(vars(value)[table])
            attributes = {key: attribute for key, attribute in vars(value).items() if key not in OF_TORCH}
            exchange(attributes)
            vars(value).update(attributes)
        elif isinstance(value, dict):
            exchange(value)
        else:
            before = items_of(value)
            after = list(map(exchanged, before))
            if any(item is not other for item, other in zip(before, after, strict=True)):
                if isinstance(value, tuple):
                    return value._make(after) if hasattr(value, "_make") else type(value)(after)  # type: ignore[attr-defined]
                list.__setitem__(value, slice(None), after)  # such as the flat weights of an RNN
        return value

    def exchange(held: dict[Any, Any]) -> None:
        for key, value in entries_of(held):
            other = exchanged(value)
            if other is not value:
                held[key] = other

    exchanged(module)
