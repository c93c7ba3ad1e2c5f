"""A mode for operators that do something else on fake tensors than on real ones (torch 2.13)."""

from __future__ import annotations

from typing import Any

import torch

from jtbridge._compat import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    TorchDispatchMode,
    outside_modes,
)

# Of a sparse fake tensor these are wrong: it has no entries, or those of one of the tensors that it was computed from.
_FACTS_OF_ENTRIES = frozenset({torch.ops.aten._nnz.default, torch.ops.aten.is_coalesced.default})
_PARTS_BY_ENTRIES = frozenset(
    getattr(torch.ops.aten, name).default
    for name in ("values", "_values", "indices", "_indices", "row_indices", "col_indices")
)


class FakeAsReal(TorchDispatchMode):
    """Traces such operators as operators that do the same on both.

    - The lazy zeros of autograd, which the gradient of ``sgn`` returns, are traced as zeros with memory. Torch traces
      operators on lazy zeros for no device.
    - ``native_dropout`` without training returns a copy. On a fake tensor it returns the tensor itself, so that a later
      write to one changes the other.
    - The number of entries of a sparse tensor depends on data. So do the sizes of its indices and values, and whether
      it is coalesced.

    Raises:
        DynamicOutputShapeException, DataDependentOutputException: an operator reads the entries of a sparse tensor.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._efficientzerotensor.default:
            return torch.ops.aten.zeros.default(*args, **(kwargs or {}))
        if func is torch.ops.aten.native_dropout.default and args[2] is False:
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        if func in _PARTS_BY_ENTRIES and args[0].layout is not torch.strided:
            raise DynamicOutputShapeException(func)
        if func in _FACTS_OF_ENTRIES and args[0].layout is not torch.strided:
            if isinstance(args[0], FakeTensor):
                raise DataDependentOutputException(func)
            with outside_modes():
                return func(*args)
        return func(*args, **(kwargs or {}))
