"""Evaluation of operations on constants while a function is traced.

The shape of ``x[mask]`` depends on the values of `mask`, and ``n.item()`` is a value. If `mask` and `n` come only from
tensors that the function closes over, or from factories such as ``torch.arange``, their values are the same in every
call. They are computed at trace time, so the operation that needs them has a shape.

A function may also store a tensor for later calls, in an attribute of a module or by ``functools.cache``. A tensor
made during the trace is a fake tensor without values. If its values come from constants, it gets them when the trace
ends.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import torch
from torch.utils.weak import WeakTensorKeyDictionary

from jtbridge._compat import (
    DynamicOutputShapeException,
    FakeTensor,
    OpOverload,
    TorchDispatchMode,
    base_of,
    outside_modes,
    schema_of,
    show_as_real,
    storage_id,
)
from jtbridge.core.array_types import SYMBOLIC_NUMBERS
from jtbridge.core.pytree import tensor_leaves
from jtbridge.core.runner import escaped_tensor_error
from jtbridge.core.signals import raise_if_from_signal
from jtbridge.core.writes import written_tensors
from jtbridge.state import PoisonTensor, poison_tensor, replace

from .refused_shapes import check_masks

_aten = torch.ops.aten
_NEEDS_VALUES = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)
_PUTS = frozenset({_aten.index_put.default, _aten.index_put_.default, _aten._index_put_impl_.default})
_MAX_TRACKED_BYTES = 1 << 26  # bytes: the contents of written storages up to this size are tracked
# The results of these operators do not depend on the values of their first argument.
_LIKES = frozenset({"zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full"})


@dataclasses.dataclass(frozen=True)
class _Recipe:
    """How to compute a tensor: as a result of an operator."""

    operator: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: int | None  # its index among several results; None for a single result
    storages: frozenset[int]  # the storages of the arguments


@dataclasses.dataclass(frozen=True)
class _TensorRef:
    """A reference that does not keep a tensor alive.

    Attributes:
        shape, stride, offset: those of the tensor.
        number: the index of its recipe or value in `ConstantEvalMode._made`.
        memory: its storage, if the contents are in `ConstantEvalMode._memory`.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    number: int | None = None
    memory: int | None = None


@dataclasses.dataclass(frozen=True)
class _ClosedOver:
    """A closed-over tensor, and the device on which the traced function uses it."""

    tensor: torch.Tensor
    device: torch.device


@dataclasses.dataclass(frozen=True)
class _TensorType:
    """The type of a tensor. It replaces an argument whose values do not matter, such as that of ``zeros_like``."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class ConstantEvalMode(TorchDispatchMode):
    """Evaluates operations that depend on the values of constants alone.

    Args:
        answers: whether operations that need values are evaluated. If not, values are only tracked for the tensors
            that the function stores.
        symbols: whether the result of an operator may have a size that depends on values, as a symbol. In a graph that
            torch runs it may not: where the result is broadcast, torch assumes that the symbol equals the other size.
        stands_for: returns the closed-over tensor that a tensor stands for, or None.

    Attributes:
        mode: the fake mode of the trace. Fake tensors of another mode were stored in an earlier trace, and are refused.
    """

    def __init__(
        self,
        *,
        answers: bool = True,
        symbols: bool = True,
        stands_for: Callable[[torch.Tensor], torch.Tensor | None] = lambda tensor: None,
    ):
        super().__init__()
        self.mode: Any = None
        self._answers = answers
        self._symbols = symbols
        self._stands_for = stands_for
        self._numbers = WeakTensorKeyDictionary()  # tensor -> its number in `_made`; None if its value is unknown
        self._made: list[_Recipe | torch.Tensor | None] = []  # recipe or value; None if it can no longer be computed
        # By written storage: a tensor that keeps the storage alive, and the contents (None if they are unknown).
        self._memory: dict[int, tuple[torch.Tensor | None, torch.Tensor | None]] = {}

    def __enter__(self) -> Any:
        show_as_real(self._knows)
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        show_as_real(None)
        super().__exit__(*exception)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = tensor_leaves((args, kwargs))
        for tensor in tensors:
            if isinstance(tensor, FakeTensor):
                self.mode = self.mode or tensor.fake_mode
                if tensor.fake_mode is not self.mode:
                    raise escaped_tensor_error()
        if self._answers and func in _PUTS and sum(i is not None for i in args[1]) > 1 and self._are_masks(args[1]):
            args = (args[0], self._without_masks(args[1]), *args[2:])
        if self._answers and any(tag in func.tags for tag in _NEEDS_VALUES):
            found = self._by_values(func, args, kwargs)
            if found is not NotImplemented:
                return found
        written = [tensor for tensor in written_tensors(func, args, kwargs) if tensor.layout is torch.strided]
        if written:
            self._write(func, args, kwargs, written)
        out = func(*args, **kwargs)
        if not self._symbols and _has_symbols(out):
            raise DynamicOutputShapeException(func)
        self._note(func, args, kwargs, out, tensors, changes=bool(written))
        return out

    def _note(
        self, func: OpOverload, args: tuple, kwargs: dict[str, Any], out: Any, tensors: Sequence[Any], *, changes: bool
    ) -> None:
        """Record how the results of an operator can be computed, if the values of its arguments are known."""
        known = not changes and _is_function(func)
        is_like = known and schema_of(func).name.removeprefix("aten::") in _LIKES
        if is_like and args[0].layout is torch.strided and not _has_symbols((args, kwargs)):
            like = args[0]
            type_ = _TensorType(tuple(like.shape), like.stride(), like.dtype, like.device)
            args, tensors = (type_, *args[1:]), ()
        elif known:
            known = self._knows_all((args, kwargs))
        storages = frozenset(storage_id(tensor) for tensor in tensors) if known else frozenset()
        if known:
            args, kwargs = jax.tree.map(self._held, (args, kwargs))
        for i, result in enumerate(out) if isinstance(out, tuple | list) else [(None, out)]:
            if isinstance(result, FakeTensor) and result not in self._numbers:
                self._numbers[result] = len(self._made) if known else None
                if known:
                    self._made.append(_Recipe(func, args, kwargs, i, storages))

    def _write(self, func: OpOverload, args: tuple, kwargs: dict[str, Any], written: Sequence[torch.Tensor]) -> None:
        """Record that an operator is about to write to tensors.

        The written values are known if the values of all arguments are known. The operator then also runs on the
        copies in `_memory`.
        """
        if not all(isinstance(tensor, FakeTensor) for tensor in written):
            self._numbers = WeakTensorKeyDictionary()  # the storage of a closed-over tensor does not identify its views
        storages = {storage_id(tensor) for tensor in written}
        small = not _has_symbols(written) and all(_bytes(tensor) <= _MAX_TRACKED_BYTES for tensor in written)
        for number, made in enumerate(self._made):  # evaluate recipes that read the memory, before it changes
            if isinstance(made, _Recipe) and made.storages & storages:
                self._made[number] = self._tried(lambda number=number: self._value_of(number, {})) if small else None
        if small and _is_function(func) and self._knows_all((args, kwargs)) and all(map(self._in_memory, written)):
            held = jax.tree.map(self._held, (args, kwargs))
            if self._tried(lambda: (self._applied(func, *held, values={}),)) is not None:
                return
        self._memory |= {storage_id(tensor): (tensor, None) for tensor in written}

    def _tried(self, compute: Callable[[], Any]) -> Any:
        """Return the result of `compute` on real tensors; None if it raises."""
        try:
            with outside_modes(), torch.no_grad():
                return compute()
        except Exception as error:  # noqa: BLE001  (then it is not known, as it would be without a value)
            raise_if_from_signal(error)
            return None

    def _in_memory(self, tensor: torch.Tensor) -> bool:
        """Copy the known contents of a tensor's storage to `_memory`; return whether they are there."""
        storage = storage_id(tensor)
        if storage not in self._memory:
            whole = base_of(tensor)
            fills = whole.is_contiguous() and whole.numel() * whole.itemsize == _bytes(tensor)
            if not (fills and isinstance(whole, FakeTensor) and whole.dtype == tensor.dtype and self._knows(whole)):
                return False
            held = self._held(whole)
            self._memory[storage] = (tensor, self._tried(lambda: self._value(held, {}).clone().reshape(-1)))
        return self._knows(tensor)

    def _by_values(self, func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Return the result of an operator that needs values; NotImplemented if the values are unknown."""
        if func is _aten.index.Tensor:
            x, indices = args
            if not self._are_masks(indices):
                return NotImplemented
            check_masks(x, indices)
            return func(x, self._without_masks(indices))
        if func is _aten.masked_select.default and self._knows(args[1]):
            shape = torch.broadcast_shapes(args[0].shape, args[1].shape)
            return _aten.index.Tensor(args[0].expand(shape), self._positions(args[1], shape)) if shape else args[0]
        if not self._knows_all((args, kwargs)):
            return NotImplemented
        held = jax.tree.map(self._held, (args, kwargs))
        results = self._tried(lambda: self._applied(func, *held, values={}))
        return NotImplemented if results is None else jax.tree.map(self._new, results)

    def _are_masks(self, indices: Sequence[torch.Tensor | None]) -> bool:
        """Return whether there are masks among the indices, and the values of all of them are known."""
        masks = [index for index in indices if _is_boolean_index(index)]
        return bool(masks) and all(mask.dim() and self._knows(mask) for mask in masks)  # type: ignore[union-attr]

    def _without_masks(self, indices: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Return the indices, with each mask replaced by the positions of its True elements."""
        found: list[torch.Tensor | None] = []
        for index in indices:
            found += self._positions(index, index.shape) if _is_boolean_index(index) else [index]  # type: ignore[union-attr, arg-type]
        return found

    def _positions(self, mask: torch.Tensor, shape: Sequence[int]) -> list[torch.Tensor]:
        with outside_modes(), torch.no_grad():
            positions = self._value(self._held(mask), {}).expand(shape).nonzero().unbind(1)
        return [self._new(position) for position in positions]

    def _new(self, value: Any) -> Any:
        """Return a new traced tensor with the values of a real tensor; return other objects unchanged."""
        if not isinstance(value, torch.Tensor):
            return value
        tensor = _aten.lift_fresh_copy.default(value.contiguous())
        self._numbers[tensor] = len(self._made)
        self._made.append(value)
        return tensor

    def _knows_all(self, tree: Any) -> bool:
        return not _has_symbols(tree) and all(map(self._knows, tensor_leaves(tree)))

    def _knows(self, tensor: torch.Tensor) -> bool:
        if tensor.layout is not torch.strided:
            return False
        if storage_id(tensor) in self._memory:
            _, memory = self._memory[storage_id(tensor)]
            return memory is not None and memory.dtype == tensor.dtype and not (tensor.is_conj() or tensor.is_neg())
        if not isinstance(tensor, FakeTensor) or self._stands_for(tensor) is not None:
            return True
        number = self._numbers.get(tensor)
        return number is not None and self._made[number] is not None

    def _held(self, leaf: Any) -> Any:
        """Return a reference, for :meth:`_value`, to a tensor with known values; return other leaves unchanged.

        The reference does not keep a fake tensor alive.
        """
        if not isinstance(leaf, torch.Tensor):
            return leaf
        closed_over = self._stands_for(leaf) if isinstance(leaf, FakeTensor) else leaf
        if closed_over is not None:
            return _ClosedOver(closed_over, leaf.device)
        storage = storage_id(leaf)
        place = {"memory": storage} if storage in self._memory else {"number": self._numbers[leaf]}
        return _TensorRef(tuple(leaf.shape), leaf.stride(), int(leaf.storage_offset()), **place)

    def _value(self, held: Any, values: dict[int, torch.Tensor], *, graph: bool = False) -> Any:
        """Return the value behind a reference that :meth:`_held` returned.

        Args:
            held: the reference. Any other object is returned unchanged.
            values: a cache of values by number, to which the values computed here are added.
            graph: whether autograd may record from closed-over tensors, which are detached otherwise.
        """
        match held:
            case _ClosedOver():
                return (held.tensor if graph else held.tensor.detach()).to(held.device)
            case _TensorType():
                return torch.empty_strided(held.shape, held.stride, dtype=held.dtype, device=held.device)
            case _TensorRef(memory=int() as storage):
                memory = self._memory[storage][1]
                return memory.as_strided(held.shape, held.stride, held.offset)  # type: ignore[union-attr]
            case _TensorRef(number=int() as number):
                return self._value_of(number, values, graph=graph)
        return held

    def _value_of(self, number: int, values: dict[int, torch.Tensor], *, graph: bool = False) -> torch.Tensor:
        if number not in values:
            made = self._made[number]
            if isinstance(made, _Recipe):
                results = self._applied(made.operator, made.args, made.kwargs, values=values, graph=graph)
                made = results if made.result is None else results[made.result]
            values[number] = made  # type: ignore[assignment]
        return values[number]

    def _applied(
        self,
        func: OpOverload,
        args: tuple,
        kwargs: dict[str, Any],
        *,
        values: dict[int, torch.Tensor],
        graph: bool = False,
    ) -> Any:
        args, kwargs = jax.tree.map(lambda held: self._value(held, values, graph=graph), (args, kwargs))
        return func(*args, **kwargs)

    def materialize(self) -> bool:
        """Replace the fake tensors that the function stored, when the trace is over.

        A stored tensor gets its value. If the value is unknown, a :class:`PoisonTensor` takes its place, which raises
        when it is used.

        Returns:
            Whether there is a poison tensor.
        """
        self._memory = {storage: (None, memory) for storage, (_, memory) in self._memory.items()}
        escaped = self._escaped()
        has_state = any(isinstance(value, PoisonTensor) for _, value in escaped)
        replace(escaped)
        return has_state

    def _escaped(self) -> list[tuple[FakeTensor, torch.Tensor]]:
        """Return the tensors that are still alive, each with its replacement, and drop all references to them."""
        alive = [tensor for tensor in self._numbers if tensor.layout is torch.strided]
        held = [self._held(tensor) if self._knows(tensor) else None for tensor in alive]
        self._numbers = WeakTensorKeyDictionary()
        values: dict[bool, dict[int, torch.Tensor]] = {True: {}, False: {}}
        escaped = []
        for tensor, place in zip(alive, held, strict=True):
            value = self._final(place, values[tensor.requires_grad], graph=tensor.requires_grad)
            escaped.append((tensor, _in_place_of(tensor, value)))
        return escaped

    def _final(self, place: Any, values: dict[int, torch.Tensor], *, graph: bool) -> torch.Tensor:
        """Return the replacement of a stored tensor: the value behind the reference `place`, or a poison tensor."""
        if place is None:
            return poison_tensor()
        try:
            with outside_modes(), torch.set_grad_enabled(graph):
                value = self._value(place, values, graph=graph)
                return value if graph else value.clone()
        except Exception as error:  # noqa: BLE001  (whatever torch cannot compute)
            raise_if_from_signal(error)
            return poison_tensor()


def _in_place_of(fake: FakeTensor, value: torch.Tensor) -> torch.Tensor:
    """Return a value as a parameter, as a buffer or as a leaf that requires a gradient, if the fake tensor is one."""
    if isinstance(value, PoisonTensor):
        return value
    if isinstance(fake, torch.nn.Parameter):
        return torch.nn.Parameter(value.detach(), requires_grad=fake.requires_grad)
    if isinstance(fake, torch.nn.Buffer):
        return torch.nn.Buffer(value.detach(), persistent=fake.persistent)  # type: ignore[attr-defined]
    return value.detach().requires_grad_() if fake.is_leaf and fake.requires_grad else value


def _bytes(tensor: torch.Tensor) -> int:
    """Return the size of a tensor's storage in bytes."""
    return tensor.untyped_storage().nbytes()


def _has_symbols(tree: Any) -> bool:
    """Return whether there are symbolic numbers, or tensors of symbolic sizes, in a tree."""
    leaves = jax.tree.leaves(tree)
    sizes = [size for leaf in leaves if isinstance(leaf, torch.Tensor) for size in leaf.shape]
    return any(isinstance(leaf, SYMBOLIC_NUMBERS) for leaf in (*leaves, *sizes))


def _is_boolean_index(index: torch.Tensor | None) -> bool:
    return index is not None and index.dtype is torch.bool


def _is_function(func: OpOverload) -> bool:
    """Return whether an operator gives the same results whenever it gets the same arguments."""
    return (
        func.namespace == "aten"
        and torch.Tag.nondeterministic_seeded not in func.tags
        and "empty" not in schema_of(func).name
    )
