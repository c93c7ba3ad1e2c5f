"""Guard against silent errors of torch.vmap: results that differ from those of single rows (torch 2.13)."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Sequence
from types import EllipsisType
from typing import Any

import jax
import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from jtbridge._compat import (
    DispatchMode,
    StorageWeakRef,
    functorch_depth,
    functorch_level,
    innermost,
    is_shared,
    outside_functorch,
    storage_id,
)
from jtbridge.core.messages import text_of
from jtbridge.core.overlap import shares_other_elements
from jtbridge.core.pytree import tensor_leaves
from jtbridge.core.signals import raise_if_from_signal

# Kinds of calls. A key is the name of a function of torch, of a method, or of an operator of `torch.ops`.
_KINDS = {
    **dict.fromkeys(("reshape", "reshape_as", "flatten", "ravel", "contiguous"), "by strides"),  # a view, or a copy
    **dict.fromkeys(("stride", "is_contiguous", "dim_order"), "tells strides"),
    **dict.fromkeys(("clone", "to", "empty_like", "zeros_like", "ones_like", "full_like"), "keeps strides"),
    **dict.fromkeys(("new_empty", "new_zeros", "new_ones", "new_full"), "keeps strides"),
    **dict.fromkeys(("__getitem__", "lift"), "view"),
    **dict.fromkeys(("__setitem__", "__set__"), "write"),
    **dict.fromkeys(("__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__"), "write"),  # += calls add_
    **dict.fromkeys(("as_strided_scatter", "as_strided_copy", "_reshape_alias"), "wrong"),
    **dict.fromkeys(("resize_", "resize", "resize_as_", "resize_as", "as_strided_", "_version"), "wrong"),
    **dict.fromkeys(("_base", "_is_view"), "tells views"),
    **dict.fromkeys(("__repr__", "__format__"), "shows values"),
    **dict.fromkeys(("requires_grad", "is_leaf", "output_nr", "grad_fn"), "reads graph"),
    "as_strided": "as_strided",
    "_cdist_backward": "wrong for a gradient",
    **dict.fromkeys(("addr", "select_scatter", "linear_cross_entropy"), "wrong"),  # their gradients are wrong
    **dict.fromkeys(("quantize_per_tensor_dynamic", "choose_qparams_optimized"), "wrong"),  # by the batch's range
    **dict.fromkeys(("index_put", "_unsafe_index_put"), "by indices"),
    **dict.fromkeys(("batch_norm", "instance_norm", "native_batch_norm", "cudnn_batch_norm"), "statistics"),
    **dict.fromkeys(("_native_batch_norm_legit", "_batch_norm_with_update", "batch_norm_update_stats"), "statistics"),
}
# For a tensor without dimensions, torch.vmap is wrong for these functions and their in-place forms.
_WRONG_FOR_SCALARS = frozenset({"roll", "index_select", "index_fill"})
# Writes whose second argument is an index.
_WITH_INDICES = frozenset(
    {"__setitem__", "index_put", "index_put_", "_index_put_impl", "_index_put_impl_", "_unsafe_index_put"}
)
# These functions take tensors that belong to a graph, so they cannot be called on other tensors as a test.
_OF_GRAPH = frozenset({"grad", "backward"})


class StoredTensorError(NotImplementedError):
    """A function stored a tensor of a batch of torch.vmap."""

    def __init__(self) -> None:
        super().__init__("the function keeps a tensor of the batch, which belongs to no row")


class VmapGuard(TorchFunctionMode):
    """Mode that raises where torch.vmap would be wrong, so that the rows of the batch run one after another.

    An operator may return a view of its argument for one row and a copy for a batch, or a copy for one row and a view
    for a batch. The values differ once the argument or the result is written to while the other one is in use:

    - ``x[i]`` is a view of `x` for a tensor of one integer, and a copy if the integer differs between the rows.
    - ``x.reshape(...)`` is a view for some strides of `x` and a copy for others, and many operators give a batch other
      strides than a row. The strides are known to be the same for contiguous arguments with the batch axis first, for
      contiguous copies of these, and for contiguous tensors that are made like them.

    A function may also read the strides of `x`, whether it is a view, or its text. If `x` has the strides of a
    contiguous tensor, a row is assumed to have them too, and later writes raise. Otherwise the answer may differ for a
    row, and the mode raises.

    A write such as ``x[1:] += x[:-1]`` reads what it has just written. Torch refuses it for some strides of a row, and
    torch.vmap runs it in another order.

    The result of some operators, such as `where` and `layer_norm`, has the dtype of a batch where a row has another:
    torch gives a tensor without dimensions less weight in the choice of a dtype, and the batch axis is a dimension.
    So an operator that gets several dtypes is compared with its result for a row, on tensors without memory.

    Batch normalisation writes its running statistics to a copy of them unless they are contiguous, with the batch axis
    first.

    A generator that the function seeds gives each row the same numbers, and torch.vmap gives the rows different ones.

    A batched tensor never requires a gradient. The mode returns the attribute of the tensor under it instead, so
    ``if y.requires_grad: y.register_hook(...)`` takes the branch that it takes for a row. The hook itself raises.

    A tensor of the batch cannot be used after the call: every later operation on it fails, or treats it as a tensor of
    another batch. So `check_escaped` raises if the function stored one, in an attribute or a list for example.

    The function may catch an error, as in ``try: n = int(x.sum())``, which a row might not raise. `check_errors` raises
    it again after the function.

    Args:
        tensors: the arguments of torch.vmap.
        dims: their batch axes.
        has_state: whether the function may store tensors. Then the mode records the tensors that the function gets.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], dims: Sequence[int | None], *, has_state: bool = False):
        super().__init__()
        self._has_state = has_state
        self._arguments = tensors, dims
        self._depth = functorch_depth() + 1  # of this call of torch.vmap
        self._pairs: list[_Pair] = []
        self._strides_were_read = False
        self._errors: list[Exception] = []  # that operators raised
        self._seen: dict[int, weakref.ref[torch.Tensor]] = {}  # tensors that the function got, by id

    def check_errors(self, *, is_derivative: bool) -> None:
        """Raise if an operator raised an error that the function caught.

        A derivative catches errors itself, to compute in another way. So for a derivative, the error must be one of
        torch.vmap, whose messages name it.
        """
        errors, self._errors = self._errors, []  # an error holds the frames that hold this mode
        for error in errors:
            if not is_derivative or "vmap" in text_of(error):
                raise NotImplementedError("the function caught an error, which a row might not raise") from error

    def note(self, results: Any) -> None:
        """Record the tensors that the function gets: its arguments, or the results of an operator."""
        if not self._has_state:
            return
        if isinstance(results, torch.Tensor):
            self._seen[id(results)] = weakref.ref(results)
        elif isinstance(results, tuple | list):
            for result in results:
                self.note(result)

    def check_escaped(self) -> None:
        """Raise if a tensor of the batch is still alive after the call.

        Raises:
            StoredTensorError: such a tensor exists.
        """
        for generation in range(3):  # it may be part of a reference cycle that nothing refers to
            if not self._has_any_escaped():
                return
            gc.collect(generation)
        if self._has_any_escaped():
            raise StoredTensorError

    def _has_any_escaped(self) -> bool:
        alive = (ref() for ref in self._seen.values())
        return any(functorch_level(tensor) == self._depth for tensor in alive if tensor is not None)

    @functools.cached_property
    def _same_strides(self) -> dict[int, StorageWeakRef]:
        """The storages of the arguments for which torch.vmap shows the strides of a single row, by `storage_id`.

        A reference to each storage keeps its id from being used again.
        """
        columns = [tensor for tensor, dim in zip(*self._arguments, strict=True) if dim == 0 and tensor.is_contiguous()]
        return dict(map(_referenced_storage, columns))

    def __torch_function__(self, func, types, args=(), kwargs=None):
        try:
            out = self._checked(func, args, kwargs or {})
        except Exception as error:
            self._errors.append(error)
            raise
        self.note(out)
        return out

    def _checked(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kind = _kind(func)
        if kind != "write" and _has_several_dtypes([*args, *kwargs.values()]) and func.__name__ not in _OF_GRAPH:
            return self._compared_with_a_row(kind, func, args, kwargs)
        return self._run(kind, func, args, kwargs)

    def _run(self, kind: str | None, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if kind is None and not kwargs and not _is_wrong_for_scalars(func):
            return func(*args)
        if kind == "wrong" or (
            _is_wrong_for_scalars(func) and any(x.dim() == 0 for x in tensor_leaves((args, kwargs)))
        ):
            raise NotImplementedError(f"torch.vmap is wrong for {func.__name__}")
        if kind == "wrong for a gradient" and [innermost(x) is x for x in args[:3]] == [False, True, True]:
            raise NotImplementedError(f"torch.vmap is wrong for {func.__name__} if only the gradient is a batch")
        if kwargs.get("generator") is not None:  # the function may have seeded it, and each row would do so
            raise NotImplementedError("the rows draw from a generator of the function")
        if func.__name__.partition(".")[0] in _WITH_INDICES and _is_behind_a_slice(args[1]):
            raise NotImplementedError("torch.vmap is wrong for a write at indices behind a slice")
        if kind == "write" or kwargs.get("inplace") or kwargs.get("out") is not None:
            written = (
                _assigned_part(args[0], args[1]) if func.__name__ == "__setitem__" else [*args, *kwargs.values()][:1]
            )
            self._check_write([kwargs.get("out"), written], [args[1:], kwargs])
        elif kind == "statistics":
            statistics = tensor_leaves([args[1:], kwargs])
            if not all(x.is_contiguous() and innermost(x).is_contiguous() for x in statistics):
                raise NotImplementedError(f"{func.__name__} writes to a copy of the running statistics")
        elif kind is not None and args and isinstance(args[0], torch.Tensor):
            return self._call(kind, func, args, kwargs)
        return func(*args, **kwargs)

    def _call(self, kind: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x = args[0]
        if kind == "reads graph":
            # A tensor that an inner torch.func transform of the user wrapped has the same attributes for a row.
            return self._of_graph(func, x) if functorch_level(x) == self._depth else func(x)
        is_batched = innermost(x) is not x
        is_doubtful = is_batched and storage_id(innermost(x)) not in self._same_strides
        name = func.__name__
        if kind == "as_strided" and is_doubtful:
            raise NotImplementedError(f"torch.vmap is wrong for {name}")
        if is_batched and kind == "tells views":
            raise NotImplementedError("the function asks whether a tensor is a view, which may differ for a row")
        if is_batched and kind == "shows values":
            raise NotImplementedError("the function uses the text of a tensor, which differs for a row")
        if kind == "tells strides" and is_doubtful:
            if x.stride() != _contiguous_strides(x.shape):
                raise NotImplementedError("the strides of a row are not known")
            self._strides_were_read = True
        if kind == "by strides" and is_doubtful:
            was_shared = is_shared(innermost(x))
            out = func(*args, **kwargs)
            self._pairs.append(_Pair(x, out, was_shared))
            return out
        out = func(*args, **kwargs)
        if kind == "view" and (name != "__getitem__" or _has_index_tensor(args[1])):
            if storage_id(innermost(x)) != storage_id(innermost(out)):
                self._pairs.append(_Pair(x, out, False))
        elif kind == "keeps strides" and is_batched and not is_doubtful and x.is_contiguous() and out.is_contiguous():
            self._same_strides.update([_referenced_storage(out)])
        return out

    def _compared_with_a_row(
        self, kind: str | None, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        row_args, row_kwargs = jax.tree.map(_without_memory, (args, kwargs))
        try:
            with outside_functorch():  # torch.vmap computes some operators by other operators
                expected = func(*row_args, **row_kwargs)
        except Exception as error:  # the operator cannot run on tensors without memory
            raise_if_from_signal(error)
            raise NotImplementedError("the dtype of a row is not known") from error
        out = self._run(kind, func, args, kwargs)
        for found, right in zip(tensor_leaves(out), tensor_leaves(expected), strict=True):
            if (found.dtype, found.shape) != (right.dtype, right.shape):
                raise NotImplementedError(f"{func.__name__} gives a batch another dtype than a row")
        return out

    def _of_graph(self, get: Callable[..., Any], x: torch.Tensor) -> Any:
        found = get(innermost(x))
        if isinstance(found, torch.autograd.graph.Node):
            raise NotImplementedError("a batched tensor has no grad_fn")
        return found

    def _check_write(self, written: Any, operands: Any) -> None:
        tensors = _strided_tensors(operands)
        for tensor in _strided_tensors(written):
            storage = storage_id(tensor)
            if self._strides_were_read or any(pair.is_seen_in_both(storage) for pair in self._pairs):
                raise NotImplementedError("it writes to memory that may be shared differently for a row")
            if any(storage_id(other) == storage and shares_other_elements(tensor, other) for other in tensors):
                raise NotImplementedError("it writes to memory that it reads as other elements")


class SetGuard(DispatchMode):
    """Mode that raises for ``Tensor.set_`` of a batch, which no :class:`VmapGuard` sees.

    torch.vmap gives other memory to each row of the tensor, and not to the tensor.
    """

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket is torch.ops.aten.set_:
            raise NotImplementedError("the batching rule of set_ is wrong")
        return func(*args, **(kwargs or {}))


class _Pair:
    """Argument and result of an operator that may return a view for a row and a copy for a batch, or vice versa."""

    def __init__(self, x: torch.Tensor, result: torch.Tensor, was_shared: bool):
        self._x = weakref.ref(x)
        self._was_shared = was_shared  # whether x shared its memory with another tensor than the result
        self._storages = [StorageWeakRef(innermost(tensor).untyped_storage()) for tensor in (x, result)]

    def is_seen_in_both(self, storage: int) -> bool:
        """Return whether a write to `storage` can be seen through both tensors of the pair.

        The write changes one of them, and the other one is still alive.
        """
        of_x, of_result = self._storages
        if of_x.cdata == of_result.cdata == storage:
            return self._was_shared or self._x() is not None
        others = [other for own, other in ((of_x, of_result), (of_result, of_x)) if own.cdata == storage]
        return any(not other.expired() for other in others)


def _strided_tensors(tree: Any) -> list[torch.Tensor]:
    """Return the strided tensors of a tree without torch.func's wrappers, so that they have the batch axis."""
    return [leaf for leaf in map(innermost, tensor_leaves(tree)) if leaf.layout is torch.strided]


def _has_several_dtypes(operands: Sequence[Any]) -> bool:
    """Return whether the dtype of a result may depend on which tensors have dimensions."""
    tensors = [x for x in operands if isinstance(x, torch.Tensor)]
    if len(tensors) < 2:
        return False
    dtypes = {x.dtype for x in tensors} - {torch.bool}
    if len(dtypes) < 2 or torch.is_autocast_enabled(tensors[0].device.type):
        return False
    is_scalar_float = any(x.dim() == 0 and not _is_integer(x.dtype) for x in tensors)
    return is_scalar_float or len(dtypes) > len(set(map(_is_integer, dtypes)))


def _is_integer(dtype: torch.dtype) -> bool:
    return not dtype.is_floating_point and not dtype.is_complex


def _without_memory(x: Any) -> Any:
    return torch.empty(x.shape, dtype=x.dtype, device="meta") if isinstance(x, torch.Tensor) else x


def _contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * max(size, 1))
    return tuple(reversed(strides[: len(shape)]))


def _referenced_storage(tensor: torch.Tensor) -> tuple[int, StorageWeakRef]:
    tensor = innermost(tensor)
    return storage_id(tensor), StorageWeakRef(tensor.untyped_storage())


@functools.lru_cache(maxsize=1024)
def _kind(func: Callable[..., Any]) -> str | None:
    name = getattr(func, "__name__", "").partition(".")[0]  # "add_" for "add_.Tensor"
    if name == "__get__":  # of an attribute
        name = getattr(getattr(func, "__self__", None), "__name__", name)
    return _KINDS.get(name, "write" if name.endswith("_") and not name.endswith("__") else None)


@functools.lru_cache(maxsize=1024)
def _is_wrong_for_scalars(func: Callable[..., Any]) -> bool:
    return getattr(func, "__name__", "").partition(".")[0].removesuffix("_") in _WRONG_FOR_SCALARS


def _assigned_part(x: torch.Tensor, index: Any) -> torch.Tensor:
    """Return the tensor that ``x[index] = y`` writes to: ``x[index]``, or `x` for an index that makes a copy."""
    part = x if tensor_leaves(index) else x[index]
    return part if storage_id(innermost(part)) == storage_id(innermost(x)) else x


def _is_behind_a_slice(index: Any) -> bool:
    """Return whether an index has a slice, an ellipsis or None before a tensor or a list."""
    parts = list(index) if isinstance(index, tuple | list) else [index]
    last = max((i for i, part in enumerate(parts) if _is_index_of_elements(part)), default=0)
    return any(part is None or isinstance(part, slice | EllipsisType) for part in parts[:last])


def _is_index_of_elements(part: Any) -> bool:
    return isinstance(part, list | np.ndarray | range) or (isinstance(part, torch.Tensor) and part.dim() > 0)


def _has_index_tensor(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, torch.Tensor) and part.dim() == 0 for part in parts)
