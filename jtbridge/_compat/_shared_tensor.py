"""A read-only tensor over the memory of a JAX array."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import torch

from jtbridge.errors import MutationError

from ._torch_fields import undeclared_writes


class SharedTensor(torch.Tensor):
    """A read-only tensor: in-place operators on the tensor or on its views raise.

    Tried on torch 2.13. Torch has no read-only tensors, and its copy-on-write storages refuse foreign memory.
    """

    _inner: torch.Tensor

    @staticmethod
    def __new__(cls, tensor: torch.Tensor) -> SharedTensor:
        shared = torch.Tensor._make_subclass(cls, tensor, tensor.requires_grad)
        shared._inner = tensor
        return shared

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[override]
        kwargs = kwargs or {}
        undeclared = [args[position] for position in undeclared_writes(func, args)]
        if func.overloadpacket is torch.ops.aten.set_:  # another tensor gets the memory of the source
            undeclared += args[1:2]
        if any(isinstance(x, SharedTensor) for x in undeclared):
            raise _write_error(func)
        aliases = False
        for position, argument in enumerate(func._schema.arguments):
            value = kwargs.get(argument.name, args[position] if position < len(args) else None)
            if argument.alias_info is None or not any(isinstance(x, SharedTensor) for x in jax.tree.leaves(value)):
                continue
            aliases = True
            if argument.alias_info.is_write:
                raise _write_error(func)
        out = func(*_unshare(args), **_unshare(kwargs))
        return jax.tree.map(lambda x: cls(x) if isinstance(x, torch.Tensor) else x, out) if aliases else out

    def __repr__(self) -> str:  # type: ignore[override]
        return repr(self._inner)

    def __format__(self, spec: str) -> str:
        return format(self._inner, spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """Return a copy in new memory, which may be written to."""
        return memo.setdefault(id(self), self._inner.clone())

    def __dlpack__(self, **options: Any) -> Any:
        """Return a capsule of a copy: a consumer could write to the memory of the array."""
        return self._inner.clone().__dlpack__(**options)

    def tolist(self) -> Any:
        """Return the values as nested lists (torch refuses this for subclasses)."""
        return self._inner.tolist()

    def numpy(self, *, force: bool = False) -> np.ndarray:
        """Return a read-only NumPy view."""
        array = self._inner.numpy(force=force)
        array.flags.writeable = False
        return array


def _write_error(operator: Any) -> MutationError:
    return MutationError(
        f"`{operator}` writes to a tensor that shares the memory of a JAX array, which never changes, or gives its "
        "memory to another tensor. Write to a `.clone()` of it, or convert with `jtbridge.to_torch(x, copy=True)`."
    )


def _unshare(tree: Any) -> Any:
    return jax.tree.map(lambda x: x._inner if isinstance(x, SharedTensor) else x, tree)
