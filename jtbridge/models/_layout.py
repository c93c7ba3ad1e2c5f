"""The tensors of a torch module, with their names."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from jtbridge._compat import (
    RNN_WEIGHTS,
    computed_attribute,
    forward_pre_hooks,
    non_persistent_buffers,
    registered_buffers,
    registered_modules,
    registered_parameters,
)
from jtbridge.core.containers import entries_of, items_of
from jtbridge.core.definitions import module_of
from jtbridge.core.messages import kind_of
from jtbridge.errors import ModelError


@dataclasses.dataclass(frozen=True)
class TensorEntry:
    """A tensor of a module.

    Attributes:
        name: torch's name of the tensor. A tensor that is stored in a plain attribute is named by the attribute.
        kind: "parameter" if it is a parameter that trains, "frozen" if it is a parameter that does not, "buffer", or
            "attribute".
        tensor: the tensor.
        persistent: whether it is part of the module's ``state_dict``.
    """

    name: str
    kind: str
    tensor: torch.Tensor
    persistent: bool


def entries(
    module: torch.nn.Module,
    *,
    computed: bool = False,
    visited: frozenset[int] = frozenset(),
    ties: dict[str, str] | None = None,
) -> dict[str, TensorEntry]:
    """Return the tensors of a module by name, in torch's order. A tied tensor is listed once, by its first name.

    Args:
        module: the module.
        computed: whether to list tensors in plain attributes that have a `grad_fn`. An earlier call left them there.
        visited: the ids of modules whose tensors are already listed.
        ties: is filled with each further name of a tied tensor, and its first name.

    Raises:
        ModelError: two tensors have the same name.
    """
    found: dict[str, TensorEntry] = {}
    names: dict[int, str] = {}  # by the ids of the tensors

    def add(name: str, kind: str, tensor: Any, persistent: bool) -> None:
        if not isinstance(tensor, torch.Tensor):
            return
        first = names.get(id(tensor))
        if first is None:
            names[id(tensor)] = name
            if name in found:
                raise ModelError(f"Two tensors of the module have the name `{name}`: rename an attribute or a key.")
            found[name] = TensorEntry(name, kind, tensor, persistent)
        elif first != name and ties is not None:
            ties[name] = first

    modules = list(module.named_modules())
    for path, part in modules:
        for key, tensor in registered_parameters(part).items():
            trains = tensor is not None and tensor.requires_grad
            add(_path_of_part(path, key), "parameter" if trains else "frozen", tensor, True)
    for path, part in modules:
        for key, tensor in registered_buffers(part).items():
            add(_path_of_part(path, key), "buffer", tensor, key not in non_persistent_buffers(part))
    ids = visited | {id(part) for _, part in modules}
    for path, part in modules:
        for key, value in plain_attributes(part).items():
            for name, tensor in _tensors_of_attribute(_path_of_part(path, key), value, ids, computed):
                add(name, "attribute", tensor, False)
    return found


NARROWED = {torch.float64: torch.float32, torch.complex128: torch.complex64}  # JAX's dtypes while x64 is off
OF_TORCH = frozenset(vars(torch.nn.Module()))  # the attributes of every module


def plain_attributes(module: torch.nn.Module) -> dict[str, Any]:
    """Return the attributes of a module that a user set, except those that each call computes again."""
    derived = derived_attributes(module) | RNN_WEIGHTS
    return {key: value for key, value in vars(module).items() if key not in OF_TORCH and key not in derived}


def derived_attributes(module: torch.nn.Module) -> set[str]:
    """Return the attributes that are computed from parameters.

    These are `functools.cached_property` attributes, and weights that `torch.nn.utils.weight_norm`, `spectral_norm` and
    `prune` compute in a pre-hook.
    """
    kind = type(module)
    found = {key for key in vars(module) if isinstance(getattr(kind, key, None), functools.cached_property)}
    for hook in forward_pre_hooks(vars(module)):
        if module_of(type(hook)).startswith("torch.nn.utils."):
            found.add(computed_attribute(hook))
    return found


def _tensors_of_attribute(
    name: str, value: Any, registered: frozenset[int], computed: bool, depth: int = 0
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield names and tensors of an attribute: its value, or tensors in its containers and unregistered modules."""
    if isinstance(value, torch.Tensor):
        if computed or value.grad_fn is None:
            yield name, value
    elif depth > 4 or isinstance(value, str):
        return
    elif isinstance(value, list | tuple):
        for position, item in enumerate(items_of(value)):
            yield from _tensors_of_attribute(f"{name}.{position}", item, registered, computed, depth + 1)
    elif isinstance(value, dict):
        for key, item in entries_of(value):
            yield from _tensors_of_attribute(f"{name}.{key}", item, registered, computed, depth + 1)
    elif isinstance(value, torch.nn.Module) and id(value) not in registered:
        ties: dict[str, str] = {}
        found = entries(value, computed=computed, visited=registered, ties=ties)
        for key in [*found, *ties]:
            yield f"{name}.{key}", found[ties.get(key, key)].tensor


def _path_of_part(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def has_lazy(found: dict[str, TensorEntry]) -> bool:
    """Return whether a lazy module has parameters or buffers without a shape."""
    return any(isinstance(entry.tensor, UninitializedParameter | UninitializedBuffer) for entry in found.values())


def call_once(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Call a lazy module once, which gives it shapes. The mode is eval, so that no statistics are updated."""
    modes = {part: part.training for part in module.modules()}
    try:
        with torch.no_grad():
            module.eval()(*args, **kwargs)
    finally:
        for part, mode in modes.items():
            part.training = mode


def check_initialized(found: dict[str, TensorEntry]) -> None:
    """Raise an error if a lazy module has parameters or buffers without a shape."""
    for entry in found.values():
        if isinstance(entry.tensor, UninitializedParameter | UninitializedBuffer):
            raise ModelError(
                f"`{entry.name}` has no shape yet: it belongs to a lazy module, which gets its shapes in its first "
                "call. Pass the arguments of a call to `net.init(x)`, or call the torch module once before, "
                "`model(torch.zeros(...))`."
            )


def overlapping(found: dict[str, TensorEntry]) -> set[str]:
    """Return the names of tensors that share memory with a tensor of another name.

    Raises:
        ModelError: one of them is a parameter that trains.
    """
    by_storage: dict[int, list[tuple[int, int, TensorEntry]]] = {}
    for entry in found.values():
        t = entry.tensor
        if t.layout is torch.strided and t.device.type != "meta" and t.numel():
            last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
            span = (t.data_ptr(), t.data_ptr() + (last + 1) * t.element_size(), entry)
            by_storage.setdefault(t.untyped_storage().data_ptr(), []).append(span)
    shared: set[str] = set()
    for spans in by_storage.values():
        spans.sort(key=lambda span: span[:2])
        end, widest = 0, None
        for start, stop, entry in spans:
            if widest is not None and start < end:
                both = (widest, entry)
                if any(one.kind == "parameter" for one in both):
                    raise ModelError(
                        f"`{both[0].name}` and `{both[1].name}` are different tensors over the same memory, so a step "
                        "of an optimizer that writes to one also changes the other, which JAX arrays cannot do. Tie "
                        "them by assigning one `torch.nn.Parameter` to both, or `.clone()` one of them."
                    )
                shared |= {one.name for one in both}
            if stop > end:
                end, widest = stop, entry
    return shared


def locate(module: torch.nn.Module, name: str) -> tuple[Any, Any]:
    """Return the object that holds the tensor of a name, and its key there.

    Raises:
        ModelError: the name leads to no module or container in `module`.
    """
    holder: Any = module
    path = name.split(".")
    while len(path) > 1 and not (isinstance(holder, dict) and ".".join(path) in map(str, holder)):
        holder, path = _next_part(holder, path, name)
    return holder, ".".join(path)


def _next_part(holder: Any, path: list[str], name: str) -> tuple[Any, list[str]]:
    """Return the part of `holder` that the start of a path leads to, and the rest of the path."""
    if isinstance(holder, torch.nn.Module):
        parts = {**vars(holder), **registered_modules(holder)}
        if path[0] in parts:
            return parts[path[0]], path[1:]
    elif isinstance(holder, dict):
        by_text = {str(key): value for key, value in holder.items()}
        for count in range(len(path), 0, -1):  # a key may contain dots
            if ".".join(path[:count]) in by_text:
                return by_text[".".join(path[:count])], path[count:]
    elif isinstance(holder, list | tuple) and path[0].isdigit() and int(path[0]) < len(items_of(holder)):
        return items_of(holder)[int(path[0])], path[1:]
    raise ModelError(
        f"The module has no tensor `{name}`: there is no `{path[0]}` in {kind_of(holder)}. Start from "
        "`params, state = net.init()`."
    )


_SHOWN = 6  # names in a message


def shown(names: Sequence[str]) -> str:
    """Return the first of some names, for a message."""
    rest = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + rest


def refuse_own_class(module: str, name: str, parameter: torch.Tensor) -> None:
    """Raise if the class of a parameter is not torch's or jtbridge's: in a call, the parameter has no such class."""
    kind = type(parameter)
    if module_of(kind).partition(".")[0] not in ("torch", "jtbridge"):
        raise ModelError(
            f"`{name}` of `{module}` is a `{kind.__qualname__}`, and a call would get it as a plain parameter. Make it "
            "a `torch.nn.Parameter` in the torch module. It may have additional attributes."
        )
