"""Torch tensors that a JAX function reads while JAX traces it: its program holds their values as constants."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from jtbridge._compat import has_plain_memory, is_of_outer_trace, reads_no_values
from jtbridge.core.containers import tensors_in
from jtbridge.core.messages import warn_user
from jtbridge.core.nested_calls import is_inside
from jtbridge.errors import ConstantsWarning, JaxCallError

_DETACHING = (torch.Tensor.detach, torch.Tensor.data.__get__)  # type: ignore[attr-defined]


class TensorReads:
    """The tensors with values that the traces of a JAX function have read, as long as these tensors exist.

    Attributes:
        is_told: whether the user was warned that some of them get no gradient.
    """

    def __init__(self) -> None:
        self._found: dict[int, tuple[weakref.ref[torch.Tensor], bool]] = {}  # with whether it was read as it is
        self.is_told = False

    def __bool__(self) -> bool:
        return bool(self._found)

    def add(self, func: Any, tensors: Iterable[torch.Tensor]) -> None:
        """Record the tensors that a torch function gets."""
        for tensor in tensors:
            if has_plain_memory(tensor):
                before = self._found.get(id(tensor))
                as_it_is = func not in _DETACHING or (before is not None and before[0]() is tensor and before[1])
                self._found[id(tensor)] = weakref.ref(tensor), as_it_is

    def forget_deleted(self) -> None:
        """Forget the tensors that a trace made for a while."""
        self._found = {key: entry for key, entry in self._found.items() if entry[0]() is not None}

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors."""
        return [tensor for reference, _ in list(self._found.values()) if (tensor := reference()) is not None]

    def without_gradient(self) -> list[torch.Tensor]:
        """Return the tensors that require a gradient, and that code read without detaching them."""
        found = list(self._found.values())
        return [x for reference, as_it_is in found if as_it_is and (x := reference()) is not None and x.requires_grad]


class RecordReads(TorchFunctionMode):
    """A mode that records the tensors which torch functions get, and refuses those without values.

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
        return func(*args, **kwargs)

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._reads.forget_deleted()


def check_gradients(name: str, reads: TensorReads) -> None:
    """Warn once, or raise inside a wrapped function, if a JAX function reads tensors that require a gradient.

    Parameters that a wrapped function closes over are constants anyway.

    Args:
        name: the name of the JAX function.
        reads: the tensors that it reads.

    Raises:
        JaxCallError: a tensor may depend on the arguments of the wrapped function.
    """
    if reads.is_told or not (tensors := reads.without_gradient()):
        return
    if is_inside():
        tensors = [tensor for tensor in tensors if not isinstance(tensor, torch.nn.Parameter)]
        if tensors:
            raise JaxCallError(
                f"`{name}`, a JAX function, closes over a tensor of shape {tuple(tensors[0].shape)} that requires a "
                f"gradient, and gets none from it. Pass the tensor to `{name}` as an argument; or, if no gradient is "
                "wanted, close over its `.detach()`."
            )
        return
    reads.is_told = True
    shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors[:3]) + ", ..." * (len(tensors) > 3)
    what = "a torch tensor that requires" if len(tensors) == 1 else f"{len(tensors)} torch tensors that require"
    warn_user(
        f"`{name}`, a JAX function, closes over {what} a gradient (shape {shapes}). JAX gives no gradient to what a "
        "function closes over. Pass an argument instead: for the weights of a module, by `jtbridge.module`. If no "
        "gradient is wanted, say so: `tensor.detach()`, `module.requires_grad_(False)`, or a call under "
        "`torch.no_grad()`.",
        ConstantsWarning,
    )
