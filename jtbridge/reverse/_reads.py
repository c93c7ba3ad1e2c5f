"""Torch tensors that a JAX function reads while JAX traces it: its program holds their values as constants."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from jtbridge._compat import is_of_outer_trace, reads_no_values
from jtbridge.core.array_types import has_values
from jtbridge.core.containers import tensors_in
from jtbridge.core.jax_calls import called_function
from jtbridge.core.messages import warn_user
from jtbridge.core.nested_calls import is_inside
from jtbridge.errors import ConstantsWarning, JaxCallError

_DETACHING = (torch.Tensor.detach, torch.Tensor.data.__get__)  # type: ignore[attr-defined]
# Functions by which the values of a tensor that requires a gradient leave torch. `to_jax` calls `aten.detach`.
_LEAVING = {
    *(torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.__float__, torch.Tensor.__int__, torch.Tensor.__bool__),
    *(torch.Tensor.__complex__, torch.Tensor.__index__, torch.ops.aten.detach.default),
}


class TensorReads:
    """The tensors with values that the traces of a JAX function have read, as long as these tensors exist.

    Attributes:
        derived: the shapes of tensors that torch computed from others, and whose values JAX got without a `detach`.
    """

    def __init__(self) -> None:
        self._found: dict[int, weakref.ref[torch.Tensor]] = {}
        self._attached: dict[int, weakref.ref[torch.Tensor]] = {}  # the ones whose values JAX got without a `detach`
        self.derived: list[tuple[int, ...]] = []

    def __bool__(self) -> bool:
        return bool(self._found)

    def add(self, func: Any, tensors: Iterable[torch.Tensor]) -> None:
        """Record the tensors among the arguments of a torch function."""
        leaves = torch.is_grad_enabled() and (func in _LEAVING or (is_inside() and func not in _DETACHING))
        for tensor in tensors:
            if has_values(tensor):
                self._found[id(tensor)] = weakref.ref(tensor)
                if leaves and tensor.requires_grad:
                    self._attached[id(tensor)] = weakref.ref(tensor)
                    if tensor.grad_fn is not None and not is_inside():
                        self.derived.append(tuple(tensor.shape))

    def include(self, reads: TensorReads) -> None:
        """Record the reads of a JAX function that this JAX function calls through torch."""
        self._found.update(reads._found)
        self._attached.update(reads._attached)
        self.derived += reads.derived

    def forget_deleted(self) -> None:
        """Forget the tensors that no longer exist, such as temporary ones of a trace."""
        for table in (self._found, self._attached):
            for key in [key for key, reference in table.items() if reference() is None]:
                del table[key]

    def tensors(self) -> list[torch.Tensor]:
        """Return the recorded tensors that still exist."""
        return _alive(self._found)

    def without_gradient(self) -> list[torch.Tensor]:
        """Return the tensors that require a gradient, and whose values JAX got without a `detach`."""
        return [tensor for tensor in _alive(self._attached) if tensor.requires_grad]


def _alive(table: dict[int, weakref.ref[torch.Tensor]]) -> list[torch.Tensor]:
    return [tensor for reference in list(table.values()) if (tensor := reference()) is not None]


class RecordReads(TorchFunctionMode):
    """A mode that records the tensors among the arguments of torch functions, and refuses those without values.

    Args:
        name: the name of the JAX function.
        reads: where the mode records the tensors.

    Raises:
        JaxCallError: a torch function gets a tensor of a trace or a transform around the call of the JAX function.
    """

    def __init__(self, name: str, reads: TensorReads):
        super().__init__()
        self._name = name
        self._reads = reads

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if not reads_no_values(func):
            tensors = list(tensors_in(args, kwargs.values()))
            if any(map(is_of_outer_trace, tensors)):
                raise JaxCallError(
                    f"`{self._name}`, a JAX function, closes over a tensor that has no values here, because torch "
                    f"traces or transforms the code that calls `{self._name}`. Pass the tensor to `{self._name}` as an "
                    "argument."
                )
            self._reads.add(func, tensors)
        result = func(*args, **kwargs)
        inner = called_function(func, args)
        if inner is not None:
            self._reads.include(inner.reads)
        return result

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._reads.forget_deleted()


def refuse_arguments(name: str, reads: TensorReads) -> None:
    """Raise if a JAX function, inside a wrapped function, closes over a tensor that may depend on the arguments.

    Parameters that a wrapped function closes over are constants anyway.

    Args:
        name: the name of the JAX function.
        reads: the tensors that it reads.

    Raises:
        JaxCallError: it closes over such a tensor, and the tensor requires a gradient.
    """
    found = [tuple(x.shape) for x in reads.without_gradient() if not isinstance(x, torch.nn.Parameter)]
    shapes = [*found, *reads.derived]
    if shapes:
        raise JaxCallError(
            f"`{name}`, a JAX function, closes over a tensor of shape {shapes[0]} that requires a gradient, and gets "
            f"none from it. Pass the tensor to `{name}` as an argument; or, if no gradient is wanted, close over its "
            "`.detach()`."
        )


def warn_of_missing_gradients(name: str, reads: TensorReads) -> bool:
    """Warn if a JAX function reads tensors that require a gradient; return whether it does.

    Args:
        name: the name of the function.
        reads: the tensors that it reads.
    """
    shapes = [*(tuple(x.shape) for x in reads.without_gradient()), *reads.derived]
    if not shapes:
        return False
    shown = ", ".join(map(str, shapes[:3])) + ", ..." * (len(shapes) > 3)
    what = "a torch tensor that requires" if len(shapes) == 1 else f"{len(shapes)} torch tensors that require"
    warn_user(
        f"`{name}`, a JAX function, closes over {what} a gradient (shape {shown}). JAX gives no gradient to what a "
        "function closes over. Pass an argument instead: for the weights of a module, by `jtbridge.module`. If no "
        "gradient is wanted, say so: `tensor.detach()`, `module.requires_grad_(False)`, or a call under "
        "`torch.no_grad()`.",
        ConstantsWarning,
    )
    return True
