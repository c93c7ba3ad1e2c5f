"""A mode for operators that do something else on fake tensors than on real ones (torch 2.13)."""

from __future__ import annotations

from typing import Any

import jax
import torch

from jtbridge._compat import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    OpOverload,
    TorchDispatchMode,
    outside_modes,
    schema_of,
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
    - Some operators, ``max`` among them, refuse a tensor without elements, and have a result for a fake one.
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
        out = func(*args, **(kwargs or {}))
        if args and _is_empty(args[0]):
            _run_on_empty(func, args, kwargs or {})
        return out


def _is_empty(leaf: Any) -> bool:
    """Return whether an argument is a tensor without elements, whatever the values of other sizes are."""
    if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided:
        return False
    sizes = [size for size in leaf.shape if isinstance(size, int)]
    return 0 in sizes and len(sizes) == leaf.dim()


def _run_on_empty(func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> None:
    """Run an operator of torch on tensors without elements if all its tensors are such, to raise what torch raises."""
    is_view = func.is_view or torch.Tag.view_copy in func.tags  # of memory that may have more elements
    if (
        func.namespace != "aten"
        or is_view
        or schema_of(func).is_mutable
        or torch.Tag.nondeterministic_seeded in func.tags
    ):
        return
    leaves = jax.tree.leaves((args, kwargs))
    if any(isinstance(leaf, torch.SymInt | torch.SymFloat | torch.SymBool) for leaf in leaves):
        return
    if any(leaf.device.type != "cpu" or not _is_empty(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)):
        return

    def real(leaf: Any) -> Any:
        return torch.empty(leaf.shape, dtype=leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf

    with outside_modes(), torch.no_grad():
        func(*jax.tree.map(real, args), **jax.tree.map(real, kwargs))
