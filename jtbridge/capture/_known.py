"""Values that a function needs to go on, and that come from constants alone.

The shape of ``x[mask]`` depends on values, and ``n.item()`` is one. Where `mask` and `n` come from tensors that the
function closes over, or from factories such as ``torch.arange``, they are the same in every call: they are computed
while it is traced, and what needed them has a shape.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import torch
from torch.utils.weak import WeakTensorKeyDictionary

from jtbridge._compat import FakeTensor, OpOverload, TorchDispatchMode, outside_modes, storage_id

from ._observe import written_tensors

_aten = torch.ops.aten
_NEEDS_VALUES = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)
_PUTS = frozenset({_aten.index_put.default, _aten.index_put_.default, _aten._index_put_impl_.default})


@dataclasses.dataclass(frozen=True)
class _Made:
    """How a tensor was made: as a result of an operator."""

    operator: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: int | None  # which of several


class Known(TorchDispatchMode):
    """While it is active, what needs values that come from constants gets them.

    Args:
        stands_for: the closed-over tensor that a tensor stands for, if it does.

    Attributes:
        read: the closed-over tensors whose values were looked at.
    """

    def __init__(self, stands_for: Callable[[torch.Tensor], torch.Tensor | None] = lambda tensor: None):
        super().__init__()
        self.read: list[torch.Tensor] = []
        self._stands_for = stands_for
        self._made = WeakTensorKeyDictionary()  # tensor -> how it was made, or its value
        # By storage, which lives as long as the tensor: what is in those that were written to, None if it is not known.
        self._memory: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _PUTS and sum(i is not None for i in args[1]) > 1 and self._can_be_positions(args[1]):
            args = (args[0], self._without_masks(args[1]), *args[2:])
        if any(tag in func.tags for tag in _NEEDS_VALUES):
            found = self._by_values(func, args, kwargs)
            if found is not NotImplemented:
                return found
        written = [tensor for tensor in written_tensors(func, args, kwargs) if tensor.layout is torch.strided]
        if written:
            self._write(func, args, kwargs, written)
        out = func(*args, **kwargs)
        if not written and _is_function(func) and self._knows_all((args, kwargs)):
            self._note(func, args, kwargs, out)
        return out

    def _write(self, func: OpOverload, args: tuple, kwargs: dict[str, Any], written: Sequence[torch.Tensor]) -> None:
        """An operator is about to write: what it writes is known if all that it takes is."""
        if not all(isinstance(tensor, FakeTensor) for tensor in written):
            self._made.clear()  # views of a closed-over tensor are not told by its storage
        storages = {storage_id(tensor) for tensor in written}
        with outside_modes(), torch.no_grad():
            self._settle(storages)
            if _is_function(func) and self._knows_all((args, kwargs)) and all(map(self._in_memory, written)):
                self._applied(func, args, kwargs, {})
                return
        self._memory |= {storage_id(tensor): (tensor, None) for tensor in written}

    def _settle(self, storages: set[int]) -> None:
        """Compute now what is made of memory that will be something else."""
        for tensor, made in list(self._made.items()):
            if isinstance(made, _Made) and any(
                isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and storage_id(leaf) in storages
                for leaf in jax.tree.leaves((made.args, made.kwargs))
            ):
                self._made[tensor] = self._value(tensor, {})

    def _in_memory(self, tensor: torch.Tensor) -> bool:
        """Have all that lies behind a tensor in memory of its own, to be written to; False if that cannot be."""
        storage = storage_id(tensor)
        if storage not in self._memory:
            whole = tensor if tensor._base is None else tensor._base
            fills = whole.is_contiguous() and whole.numel() * whole.itemsize == tensor.untyped_storage().nbytes()
            if not (fills and isinstance(whole, FakeTensor) and whole.dtype == tensor.dtype and self._knows(whole)):
                return False
            self._memory[storage] = (tensor, self._value(whole, {}).clone().reshape(-1))
        return self._knows(tensor)

    def _note(self, func: OpOverload, args: tuple, kwargs: dict[str, Any], out: Any) -> None:
        for i, result in enumerate(out) if isinstance(out, tuple | list) else [(None, out)]:
            if isinstance(result, torch.Tensor):
                self._made[result] = _Made(func, args, kwargs, i)

    def _by_values(self, func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
        if func is _aten.index.Tensor:
            x, indices = args
            return func(x, self._without_masks(indices)) if self._can_be_positions(indices) else NotImplemented
        if func is _aten.masked_select.default and self._knows(args[1]):
            shape = torch.broadcast_shapes(args[0].shape, args[1].shape)
            return _aten.index.Tensor(args[0].expand(shape), self._positions(args[1], shape)) if shape else args[0]
        if not self._knows_all((args, kwargs)):
            return NotImplemented
        with outside_modes(), torch.no_grad():
            results = self._applied(func, args, kwargs, {})
        return jax.tree.map(self._new, results)

    def _can_be_positions(self, indices: Sequence[torch.Tensor | None]) -> bool:
        masks = [index for index in indices if _is_mask(index)]
        return bool(masks) and all(mask.dim() and self._knows(mask) for mask in masks)  # type: ignore[union-attr]

    def _without_masks(self, indices: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """The same indices, with the positions of what is true for each mask."""
        found: list[torch.Tensor | None] = []
        for index in indices:
            found += self._positions(index, index.shape) if _is_mask(index) else [index]  # type: ignore[union-attr, arg-type]
        return found

    def _positions(self, mask: torch.Tensor, shape: Sequence[int]) -> list[torch.Tensor]:
        with outside_modes(), torch.no_grad():
            positions = self._value(mask, {}).expand(shape).nonzero().unbind(1)
        return [self._new(position) for position in positions]

    def _new(self, value: Any) -> Any:
        """A value as a new tensor of the function that is traced."""
        if not isinstance(value, torch.Tensor):
            return value
        tensor = _aten.lift_fresh_copy.default(value.contiguous())
        self._made[tensor] = value
        return tensor

    def _knows_all(self, tree: Any) -> bool:
        leaves = jax.tree.leaves(tree)
        if any(isinstance(leaf, torch.SymInt | torch.SymFloat | torch.SymBool) for leaf in leaves):
            return False
        return all(self._knows(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor))

    def _knows(self, tensor: torch.Tensor) -> bool:
        if tensor.layout is not torch.strided:
            return False
        if storage_id(tensor) in self._memory:
            _, memory = self._memory[storage_id(tensor)]
            return memory is not None and memory.dtype == tensor.dtype and not (tensor.is_conj() or tensor.is_neg())
        return not isinstance(tensor, FakeTensor) or tensor in self._made or self._stands_for(tensor) is not None

    def _value(self, tensor: torch.Tensor, values: dict[int, torch.Tensor]) -> torch.Tensor:
        """The value of a tensor that is known; those that it takes are kept in `values`, by identity."""
        _, memory = self._memory.get(storage_id(tensor), (None, None))
        if memory is not None:
            return memory.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        closed_over = self._stands_for(tensor) if isinstance(tensor, FakeTensor) else tensor
        if closed_over is not None:
            self.read.append(closed_over)
            return closed_over.detach().to(tensor.device)
        if id(tensor) not in values:
            made = self._made[tensor]
            if isinstance(made, _Made):
                results = self._applied(made.operator, made.args, made.kwargs, values)
                made = results if made.result is None else results[made.result]
            values[id(tensor)] = made
        return values[id(tensor)]

    def _applied(self, func: OpOverload, args: tuple, kwargs: dict[str, Any], values: dict[int, torch.Tensor]) -> Any:
        def value(leaf: Any) -> Any:
            return self._value(leaf, values) if isinstance(leaf, torch.Tensor) else leaf

        args, kwargs = jax.tree.map(value, (args, kwargs))
        return func(*args, **kwargs)


def _is_mask(index: torch.Tensor | None) -> bool:
    return index is not None and index.dtype is torch.bool


def _is_function(func: OpOverload) -> bool:
    """Whether an operator gives the same whenever it is given the same."""
    return (
        func.namespace == "aten"
        and torch.Tag.nondeterministic_seeded not in func.tags
        and "empty" not in func._schema.name
    )
