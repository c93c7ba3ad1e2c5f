"""Tensors that a call stored in a module and that the module itself does not have: where the next call finds them."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from jtbridge._compat import non_persistent_buffers, registered_buffers
from jtbridge.core.containers import entries_of, items_of
from jtbridge.errors import ModelError

from ._layout import NARROWED, plain_attributes, shown

_PART, _ATTRIBUTE, _BUFFER, _UNSAVED_BUFFER = "part", "attribute", "buffer", "buffer that is not saved"
_DEPTH = 4
# The dtype of a tensor after conversion to JAX and back, while x64 is off.
_AFTER_CONVERSION = {**NARROWED, torch.int32: torch.int64}


@dataclasses.dataclass(frozen=True)
class Step:
    """A step from an object to an object in it.

    Attributes:
        kind: "part" for a submodule, "attribute", one of the two kinds of buffers, or the class of a container.
        key: the name, the position, or the key in a dict.
        length: of a named tuple, and of a list or tuple whose last items are None; else 0.
    """

    kind: Any
    key: Any
    length: int = 0


@dataclasses.dataclass(frozen=True)
class MadeTensor:
    """Where a call stored a tensor: the steps from the module to it, and the dtype, which JAX may not have."""

    name: str
    steps: tuple[Step, ...]
    dtype: torch.dtype


Found = Iterator[tuple[str, tuple[Step, ...], torch.Tensor]]


def made_tensors(module: torch.nn.Module, names: Collection[str]) -> tuple[MadeTensor, ...]:
    """Return where the tensors of some names are, in the order of the module's attributes and of the containers."""
    if not names:
        return ()
    return tuple(MadeTensor(name, steps, x.dtype) for name, steps, x in _of_module("", module, ()) if name in names)


def _of_module(name: str, module: torch.nn.Module, steps: tuple[Step, ...]) -> Found:
    for path, part in module.named_modules():
        start = "".join(f"{text}." for text in (name, path) if text)
        to_part = (*steps, Step(_PART, path))
        for key, tensor in registered_buffers(part).items():
            if tensor is not None:
                kind = _UNSAVED_BUFFER if key in non_persistent_buffers(part) else _BUFFER
                yield f"{start}{key}", (*to_part, Step(kind, key)), tensor
        for key, value in plain_attributes(part).items():
            yield from _of_value(f"{start}{key}", value, (*to_part, Step(_ATTRIBUTE, key)), 0)


def _of_value(name: str, value: Any, steps: tuple[Step, ...], depth: int) -> Found:
    kind = type(value)
    if isinstance(value, torch.Tensor):
        yield name, steps, value
    elif depth > _DEPTH or isinstance(value, str):
        return
    elif isinstance(value, list | tuple):
        items = items_of(value)
        has_fixed_length = isinstance(value, tuple) and kind is not tuple  # a named tuple
        length = len(items) if has_fixed_length or (len(items) and items[-1] is None) else 0
        for position, item in enumerate(items):
            yield from _of_value(f"{name}.{position}", item, (*steps, Step(kind, position, length)), depth + 1)
    elif isinstance(value, dict):
        for key, item in entries_of(value):
            yield from _of_value(f"{name}.{key}", item, (*steps, Step(kind, key)), depth + 1)
    elif isinstance(value, torch.nn.Module):
        yield from _of_module(name, value, steps)


def place_made(module: torch.nn.Module, made: Iterable[MadeTensor], tensors: Mapping[str, torch.Tensor]) -> None:
    """Put tensors that earlier calls stored where these calls stored them.

    Raises:
        ModelError: the module has another object there, or the object there cannot be made again.
    """
    for one in made:
        _with_tensor(module, one.steps, tensors[one.name], one.name)


def _with_tensor(holder: Any, steps: Sequence[Step], tensor: torch.Tensor, name: str) -> Any:
    """Put a tensor into an object; return the object, or the one that replaces it."""
    if not steps:
        return tensor
    step, rest = steps[0], steps[1:]
    if step.kind == _PART:
        _with_tensor(holder.get_submodule(step.key), rest, tensor, name)
    elif step.kind == _ATTRIBUTE:
        vars(holder)[step.key] = _with_tensor(vars(holder).get(step.key), rest, tensor, name)
    elif step.kind in (_BUFFER, _UNSAVED_BUFFER):
        registered_buffers(holder)[step.key] = tensor  # not `register_buffer`, which refuses an array
        if step.kind == _UNSAVED_BUFFER:
            non_persistent_buffers(holder).add(step.key)
    elif issubclass(step.kind, dict):
        holder = _container_at(holder, dict, step, name)
        holder[step.key] = _with_tensor(dict.get(holder, step.key), rest, tensor, name)
    elif issubclass(step.kind, list):
        holder = _container_at(holder, list, step, name)
        _fill(holder, step)
        list.__setitem__(holder, step.key, _with_tensor(list.__getitem__(holder, step.key), rest, tensor, name))
    else:
        items = list(items_of(holder)) if isinstance(holder, tuple) else []
        _fill(items, step)
        items[step.key] = _with_tensor(items[step.key], rest, tensor, name)
        return step.kind._make(items) if hasattr(step.kind, "_make") else step.kind(items)
    return holder


def _fill(items: list[Any], step: Step) -> None:
    """Append None for each item before the step's position, and up to its length: a call stored no others."""
    items.extend([None] * (max(step.key + 1, step.length) - len(items)))


def _container_at(holder: Any, kind: type, step: Step, name: str) -> Any:
    """Return the container at a step: the module's own, or a new one."""
    if isinstance(holder, kind):
        return holder
    try:
        return step.kind()
    except TypeError as error:
        raise ModelError(
            f"`{name}` is in a `{step.kind.__qualname__}` that a call made, and the next call cannot make it again "
            f"({error}). Store the tensor in a list, a tuple or a dict."
        ) from error


class MadeState:
    """Where the calls of a module stored tensors, by name, in the order in which they first did."""

    def __init__(self, made: Iterable[MadeTensor] = ()) -> None:
        self._made = {one.name: one for one in made}

    def __iter__(self) -> Iterator[MadeTensor]:
        return iter(self._made.values())

    def of(self, *groups: Collection[str]) -> tuple[MadeTensor, ...]:
        """Return where the tensors are whose names are in one of some groups of names."""
        return tuple(one for one in self if any(one.name in names for names in groups))

    def add(self, module: str, made: Sequence[MadeTensor]) -> None:
        """Add what a call stored.

        Raises:
            ModelError: an earlier call stored a tensor of the same name elsewhere, or in another order.
        """
        for one in made:
            known = self._made.get(one.name, one)
            if known.steps != one.steps or _same_in_jax(known.dtype, one.dtype):
                raise ModelError(
                    f"A call of `{module}` stores `{one.name}` otherwise than an earlier call did: "
                    f"{_kind_and_place(one)} instead of {_kind_and_place(known)}. The state does not say which of them "
                    "it has. Always store it the same way, or under another name."
                )
        merged = self._made | {one.name: one for one in made}
        for prefix, keys in _keys_of_dicts(made).items():
            before = [key for key in _keys_of_dicts(merged.values())[prefix] if key in keys]
            if before != keys:
                raise ModelError(
                    f"A call of `{module}` stores entries of a dict in the order {shown([repr(k) for k in keys])}, and "
                    f"an earlier call in the order {shown([repr(k) for k in before])}. The state does not say which of "
                    "them it has. Always store them in one order."
                )
        self._made = merged


def _same_in_jax(dtype: torch.dtype, other: torch.dtype) -> bool:
    """Return whether two dtypes differ, and JAX may have one dtype for both."""
    return dtype != other and _AFTER_CONVERSION.get(dtype, dtype) == _AFTER_CONVERSION.get(other, other)


def _kind_and_place(made: MadeTensor) -> str:
    kinds = [f"in a `{step.kind.__name__}`" for step in made.steps if isinstance(step.kind, type)]
    last = made.steps[-1]
    own = f"under the key {last.key!r}" if isinstance(last.kind, type) else f"as {last.kind}"
    return " ".join([f"{made.dtype}", own, *kinds])


def _keys_of_dicts(made: Iterable[MadeTensor]) -> dict[tuple[Step, ...], list[Any]]:
    """Return the keys of each dict in which tensors are, in order, by the steps to the dict."""
    found: dict[tuple[Step, ...], dict[Any, None]] = {}
    for one in made:
        for i, step in enumerate(one.steps):
            if isinstance(step.kind, type) and issubclass(step.kind, dict):
                found.setdefault(one.steps[:i], {})[step.key] = None
    return {steps: list(keys) for steps, keys in found.items()}
