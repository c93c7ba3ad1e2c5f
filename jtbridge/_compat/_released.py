"""A tensor without memory, which takes the place of a released tensor."""

from __future__ import annotations

from typing import Any

import torch

from jtbridge.errors import ModelError

_ALLOWED = frozenset(
    {
        *(torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.nelement, torch.Tensor.stride),
        *(torch.Tensor.element_size, torch.Tensor.is_floating_point, torch.Tensor.is_complex, torch.Tensor.__hash__),
        *(torch.is_floating_point, torch.is_complex, torch.numel, torch.Tensor.requires_grad_, torch.Tensor.__len__),
    }
)
_ALLOWED_ATTRIBUTES = frozenset(
    {"shape", "dtype", "device", "layout", "requires_grad", "is_leaf", "grad", "grad_fn", "ndim", "itemsize", "nbytes",
     "is_meta", "is_sparse", "is_quantized", "is_nested", "is_mkldnn", "is_cpu", "is_cuda", "_backward_hooks"}
)  # fmt: skip


def reads_no_values(func: Any) -> bool:
    """Return whether a function that a torch function mode receives reads only the shape or the dtype of a tensor."""
    if func in _ALLOWED:
        return True
    is_attribute = getattr(func, "__name__", "") in ("__get__", "__set__")
    return is_attribute and getattr(getattr(func, "__self__", None), "__name__", "") in _ALLOWED_ATTRIBUTES


class ReleasedTensor(torch.Tensor):
    """A tensor that has a shape and a dtype, and raises an error wherever its values are used.

    Tried on torch 2.13. `torch.nn.Parameter` itself uses `_make_subclass`; `_is_param` makes a tensor of
    another class a parameter for `isinstance`.
    """

    @staticmethod
    def __new__(cls, tensor: torch.Tensor) -> ReleasedTensor:
        empty = torch.empty_like(tensor, device="meta", requires_grad=False)
        found = torch.Tensor._make_subclass(cls, empty, tensor.requires_grad)
        vars(found).update(vars(tensor))  # attributes that the user set
        found._is_param = isinstance(tensor, torch.nn.Parameter)
        return found

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if reads_no_values(func):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise ModelError(
            "The weights of the torch module were released by `net.init(release=True)`, so it cannot be used. Call "
            "`net(params, state, ...)`, or give the module its weights again with `net.load(params, state)`."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> ReleasedTensor:
        return memo.setdefault(id(self), _unpickled(*self.__reduce_ex__(2)[1]))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _unpickled, (tuple(self.shape), self.dtype, self.requires_grad, self._is_param)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"<released tensor of shape {tuple(self.shape)}, {self.dtype}>"


def _unpickled(shape: tuple[int, ...], dtype: torch.dtype, requires_grad: bool, is_parameter: bool) -> ReleasedTensor:
    empty = torch.empty(shape, dtype=dtype, device="meta", requires_grad=requires_grad)
    found = ReleasedTensor(empty)
    found._is_param = is_parameter
    return found
