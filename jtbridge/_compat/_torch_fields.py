"""Private attributes of torch's tensors and operators. Tried on torch 2.11, 2.13 and 2.15."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.modules.module as modules
import torch.optim.optimizer as optimizers
from torch._ops import OpOverload

# The getter and the setter of `torch.Tensor._backward_hooks`, as a `TorchFunctionMode` receives them. Code can store
# hooks there without `register_hook`.
BACKWARD_HOOKS: tuple[Any, Any] = (
    torch.Tensor._backward_hooks.__get__,  # type: ignore[attr-defined]
    torch.Tensor._backward_hooks.__set__,  # type: ignore[attr-defined]
)


# Operators of batch normalisation that write to running statistics, which their schemas do not declare. For each one:
# the position of the argument that says whether it writes (None: it always does), and the positions of the statistics.
_UNDECLARED_WRITES: dict[str, tuple[int | None, tuple[int, int]]] = {
    "aten::native_batch_norm": (5, (3, 4)),
    "aten::cudnn_batch_norm": (5, (3, 4)),
    "aten::miopen_batch_norm": (5, (3, 4)),
    "aten::batch_norm_update_stats": (None, (1, 2)),
    "aten::batch_norm_gather_stats": (None, (3, 4)),
    "aten::batch_norm_gather_stats_with_counts": (None, (3, 4)),
}


def undeclared_writes(operator: OpOverload, args: Sequence[Any]) -> tuple[int, ...]:
    """Return the positions of the arguments that an operator writes to, though its schema does not say so."""
    training, positions = _UNDECLARED_WRITES.get(operator._schema.name, (None, ()))
    return positions if training is None or args[training] else ()


def schema_of(operator: Any) -> Any:
    """Return an operator's schema: its name, and the aliasing of its arguments and results. It has no public API."""
    return operator._schema


def overload_name(operator: OpOverload) -> str:
    """Return the name of an overload, such as "Tensor_mode" for ``aten.div.Tensor_mode``."""
    return operator._overloadname


def overload_of(operator: Any) -> OpOverload:
    """Return the overload, as it appears in graphs, that a function of `torch.library.custom_op` calls."""
    return operator._opoverload


def base_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the base of a view; for any other tensor, the tensor itself."""
    with torch._C.DisableTorchFunction():  # a mode must not attribute this access to user code
        return tensor if tensor._base is None else tensor._base


def write_count(tensor: torch.Tensor) -> int:
    """Return how often a tensor's memory was written to. Only torch's notes on autograd mention `_version`.

    Raises:
        RuntimeError: the tensor was made in inference mode, where torch does not count; `writes` returns 0 then.
    """
    return tensor._version


def tensor_of_class(subclass: type[torch.Tensor]) -> torch.Tensor:
    """Return an empty tensor of a subclass, without memory."""
    return torch.Tensor._make_wrapper_subclass(subclass, (0,))  # type: ignore[attr-defined]


_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def hooks_of_leaf(tensor: torch.Tensor) -> dict[str, dict[int, Any]]:
    """Return the hooks of a leaf of autograd by the names of their attributes. Tried on torch 2.13; no public query."""
    return {name: dict(getattr(tensor, name) or {}) for name in _HOOKS}


def set_hooks_of_leaf(tensor: torch.Tensor, hooks: dict[str, dict[int, Any]]) -> None:
    """Set the hooks of a leaf of autograd to `hooks`, which `hooks_of_leaf` returned earlier."""
    for name, table in hooks.items():
        present = getattr(tensor, name)
        if present is None and table:
            setattr(tensor, name, collections.OrderedDict(table))
        elif present is not None:  # changed in place: handles that remove hooks refer to it
            present.clear()
            present.update(table)


_TABLES_OF_HOOKS = {
    name: table
    for module in (modules, optimizers)
    for name, table in vars(module).items()
    if name.startswith("_global_") and isinstance(table, Mapping)
}


def global_hooks() -> dict[str, Mapping[Any, Any]]:
    """Return the hooks that torch calls for all modules, optimizers and saved tensors, in tables by name.

    Tried on torch 2.13; no public query.
    """
    of_saved_tensors = torch._C._autograd._top_saved_tensors_default_hooks(True)  # type: ignore[attr-defined]
    return {**_TABLES_OF_HOOKS, "saved_tensors_hooks": dict(enumerate(of_saved_tensors or ()))}


def has_gradient_hooks(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor.register_hook`` was called and not undone. Tried on torch 2.13; no public query."""
    return bool(tensor._backward_hooks)
