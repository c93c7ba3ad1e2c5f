"""Torch's ``state_dict`` of a module with other tensors than its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import torch

from jtbridge._compat import (
    ReleasedTensor,
    VersionedStateDict,
    module_versions,
    registered_buffers,
    registered_parameters,
)
from jtbridge.calls.eager import shared_tensor
from jtbridge.core.convert import to_torch
from jtbridge.core.dtypes import canonical_dtype, numpy_dtype
from jtbridge.errors import ModelError
from jtbridge.state import same_tensors

from ._layout import (
    TensorEntry,
    check_initialized,
    entries,
    locate,
    overlapping,
    shown,
)
from ._made_state import MadeState
from ._placing import converter
from ._python_state import python_changes
from ._run import bound
from ._sharding import Rules

_EXTRA_STATE = "_extra_state"  # the last part of the keys for which modules have `get_extra_state`


def to_state_dict(
    module: torch.nn.Module, arrays: Mapping[str, Any], made: MadeState, *, shared: bool = False
) -> dict[str, Any]:
    """Return the ``state_dict`` of a module with these arrays.

    Args:
        module: the torch module.
        arrays: its tensors by name.
        made: where calls stored tensors that the module does not have.
        shared: whether tensors may share the memory of arrays. Then they must not be written to.
    """
    found = entries(module)
    there = made.of(arrays.keys() - found.keys())
    dtypes = {name: entry.tensor.dtype for name, entry in found.items()} | {one.name: one.dtype for one in there}
    tensors = {}
    for name, array in arrays.items():
        tensor = _shared_or_copied(array) if shared else to_torch(array, copy=True)
        tensors[name] = as_dtype(tensor, dtypes[name]) if name in dtypes else tensor
    return bound(module, found, tensors, there).state_dict()


def from_state_dict(
    module: torch.nn.Module,
    state_dict: Mapping[str, Any],
    *,
    strict: bool,
    mesh: jax.sharding.Mesh | None,
    rules: Rules | None,
    other_names: Mapping[str, str] | None = None,
) -> Any:
    """Return the parameters and the state in a ``state_dict``: see :meth:`jtbridge.JaxModule.from_state_dict`.

    Args:
        module, state_dict, strict, mesh, rules: as for that method.
        other_names: further names for entries of the ``state_dict``. Those that the module does not have are ignored.
    """
    found = entries(module)
    check_initialized(found)
    overlapping(found)  # raises if a parameter shares memory
    copy = _loaded_copy(module, found, state_dict, strict, other_names or {})
    params: dict[str, jax.Array] = {}
    state: dict[str, jax.Array] = {}
    convert = converter(found, mesh, rules)
    for key, entry in found.items():
        tensor = _tensor_at(copy, key)
        if tensor.device.type == "meta":
            tensor = entry.tensor
            if isinstance(tensor, ReleasedTensor):
                raise ModelError(
                    f"`{key}` is not in the `state_dict`, and `{type(module).__name__}` has released its own. Add it "
                    "to the `state_dict`, or give the module its weights with `net.load(params, state)` first."
                )
        (params if entry.kind == "parameter" else state)[key] = convert(key, tensor)
    return params, state


def _loaded_copy(
    module: torch.nn.Module,
    found: Mapping[str, TensorEntry],
    state_dict: Mapping[str, Any],
    strict: bool,
    other_names: Mapping[str, str],
) -> Any:
    """Return a copy of a module with the tensors of a ``state_dict``.

    Tensors that the ``state_dict`` lacks are placeholders without memory.
    """
    name = type(module).__name__
    copy = bound(module, found, {key: _placeholder(entry) for key, entry in found.items()})
    ties = _ties(copy)
    expected = copy.state_dict()
    given = {key: _own_tensor(value) for key, value in state_dict.items()}
    given |= {other: given[first] for other, first in other_names.items() if other in expected.keys() - given}
    _complete(given, expected, ties)
    _check_entries(name, given, expected)
    versions = module_versions(state_dict)
    if versions is not None:
        given = VersionedStateDict(given, versions)
    try:
        copy.load_state_dict(given, strict=strict, assign=True)
    except RuntimeError as error:
        advice = " With `strict=False`, entries may be missing or unknown." if strict else ""
        raise ModelError(f"The `state_dict` does not fit `{name}`. {error}{advice}") from None
    _check_ties(name, copy, ties)
    if any(key.rpartition(".")[2] == _EXTRA_STATE for key in given):
        _check_python_state(module, found, copy)
    return copy


def _check_python_state(module: torch.nn.Module, found: Mapping[str, TensorEntry], copy: torch.nn.Module) -> None:
    """Raise if the extra state of a ``state_dict`` set Python values, which the state of a call cannot hold."""
    replaced = {id(entry.tensor): _tensor_at(copy, key) for key, entry in found.items()}
    for name, before, after in python_changes(module, copy, replaced, {}):
        raise ModelError(
            f"The `{_EXTRA_STATE}` in the `state_dict` sets the attribute `{name}` of `{type(module).__name__}` from "
            f"{before!r} to {after!r}. It is Python state, which `params` and `state` cannot hold. Load it into the "
            "torch module first, `model.load_state_dict(state_dict)`, and then call `jtbridge.module(model).init()`."
        )


def as_dtype(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor in the module's dtype if JAX narrowed that dtype to 32 bits; keep a dtype that the user chose."""
    wide = canonical_dtype(numpy_dtype(dtype, "a tensor")) == numpy_dtype(tensor.dtype, "a tensor")
    return tensor.to(dtype) if wide else tensor


def _shared_or_copied(array: Any) -> torch.Tensor:
    is_local = isinstance(array, jax.Array) and len(array.sharding.device_set) == 1
    return shared_tensor(array) if is_local and array.device.platform == "cpu" else to_torch(array, copy=True)  # type: ignore[union-attr]


def _own_tensor(value: Any) -> Any:
    if isinstance(value, jax.Array | np.ndarray):
        return to_torch(np.asarray(value) if isinstance(value, np.ndarray) else value, copy=True)
    return value


def _placeholder(entry: TensorEntry) -> torch.Tensor:
    """Return a tensor without memory, of the shape and dtype of a tensor of the module."""
    empty = torch.empty(tuple(entry.tensor.shape), dtype=entry.tensor.dtype, device="meta")
    if isinstance(entry.tensor, torch.nn.Parameter):
        return torch.nn.Parameter(empty, requires_grad=entry.tensor.requires_grad)
    return empty


def _ties(copy: torch.nn.Module) -> list[list[str]]:
    """Return the groups of names in the ``state_dict`` of a module that stand for the same tensor."""
    groups: dict[int, list[str]] = {}
    for key, tensor in copy.state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.Tensor):
            groups.setdefault(id(tensor), []).append(key)
    return [names for names in groups.values() if len(names) > 1]


def _complete(given: dict[str, Any], expected: Mapping[str, Any], ties: list[list[str]]) -> None:
    """Add tied entries that are missing."""
    for names in ties:
        values = [given[name] for name in names if name in given]
        for name in names:
            if name not in given and values and name in expected:
                given[name] = values[0]


def _check_entries(module: str, given: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    wrong = [
        f"`{key}` is {value.dtype}, expected {expected[key].dtype}"
        for key, value in given.items()
        if isinstance(value, torch.Tensor)
        and isinstance(expected.get(key), torch.Tensor)
        and value.dtype != expected[key].dtype
        and canonical_dtype(numpy_dtype(expected[key].dtype, key)) != numpy_dtype(value.dtype, key)
    ]
    if wrong:
        raise ModelError(
            f"The `state_dict` has other dtypes than `{module}`: {shown(wrong)}. Convert it first, by "
            "`{key: value.to(model_dtype) for key, value in state_dict.items()}`, or make the module in that dtype, "
            "with `model.to(dtype)`."
        )


def _check_ties(module: str, copy: torch.nn.Module, ties: list[list[str]]) -> None:
    loaded = copy.state_dict()
    for first, *others in ties:
        if loaded[first].device.type == "meta":  # it is missing, and that is allowed
            continue
        for other in others:
            if not same_tensors(loaded[first], loaded[other]):
                raise ModelError(
                    f"`{first}` and `{other}` are one tensor in `{module}`, and the `state_dict` has two different "
                    "ones. Untie them in the torch module, or drop one of the entries."
                )


def _tensor_at(copy: torch.nn.Module, name: str) -> torch.Tensor:
    holder, key = locate(copy, name)
    if isinstance(holder, torch.nn.Module):
        return next(
            held[key]
            for held in (registered_parameters(holder), registered_buffers(holder), vars(holder))
            if key in held
        )
    if isinstance(holder, dict):
        return next(value for known, value in holder.items() if str(known) == key)
    return holder[int(key)]
