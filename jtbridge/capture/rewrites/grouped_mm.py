"""``torch._grouped_mm``, the product of each group of rows with its own matrix, as an operator that can be traced.

Torch's fake kernel of ``torch._grouped_mm`` refuses float32, and shapes whose rows do not begin at multiples of 16
bytes. Torch's CPU kernel accepts both.
"""

from __future__ import annotations

import torch

from jtbridge._compat import OpOverload, TorchDispatchMode, overload_of

_TORCH = torch.ops.aten._grouped_mm.default


@torch.library.custom_op("jtbridge::grouped_mm", mutates_args=())
def grouped_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    offs: torch.Tensor | None,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype | None,
) -> torch.Tensor:
    """Return ``torch._grouped_mm(a, b, offs, bias, out_dtype)``."""
    return _TORCH(a, b, offs, bias, out_dtype).clone(memory_format=torch.contiguous_format)


@grouped_mm.register_fake
def _(a, b, offs, bias, out_dtype):
    groups = (offs if offs is not None else a).shape[0]
    shape = (a.shape[-2], b.shape[-1])
    return a.new_empty((groups, *shape) if a.dim() == b.dim() else shape, dtype=out_dtype or a.dtype)


_OURS = overload_of(grouped_mm)


class GroupedProducts(TorchDispatchMode):
    """Replaces ``torch._grouped_mm`` by :func:`grouped_mm`, after autograd has applied torch's own derivative."""

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        kwargs = kwargs or {}
        return _OURS(*_all_arguments(*args, **kwargs)) if func is _TORCH else func(*args, **kwargs)


def _all_arguments(
    a: torch.Tensor,
    b: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple:
    return a, b, offs, bias, out_dtype
