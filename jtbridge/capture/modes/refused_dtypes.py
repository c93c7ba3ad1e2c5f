"""Refusal of dtypes that torch refuses when it computes, and accepts on fake tensors.

``torch.mm`` of float32 and bfloat16 raises in torch. On fake tensors it has a result, and so has a translation to JAX,
which promotes. Kernels check dtypes in their own code, so no schema tells them. The operator itself is run on small
tensors of zeros and ones, and tells.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import torch

from jtbridge._compat import OpOverload, outside_modes, schema_of

_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_MOST = 1 << 16  # elements of the arguments and results of an operator that runs in its real sizes
_LONGEST = 4  # of a dimension, in other sizes
# Their numbers are sizes, or are checked against sizes. A kernel that does neither may read past the end of a smaller
# tensor.
_SIZES = frozenset(
    {
        torch.ops.aten.convolution.default,
        torch.ops.aten.native_group_norm.default,
        torch.ops.aten.native_layer_norm.default,
    }
)

_INDEX_PUTS = frozenset(
    {
        torch.ops.aten.index_put.default,
        torch.ops.aten.index_put_.default,
        torch.ops.aten._index_put_impl_.default,
        torch.ops.aten._unsafe_index_put.default,
    }
)

# A dtype for which torch has no kernel on a CPU. Others may have one: a GPU, or XLA.
_NO_KERNEL = re.compile(r"not implemented for|[Nn]ot supported|doesn't support")


class DtypeChecks:
    """Runs the operators of a trace for the dtypes of their arguments. Equal calls are run once."""

    def __init__(self) -> None:
        self._passed: set[Any] = set()

    def check(self, func: OpOverload, args: tuple, kwargs: dict[str, Any], out: Any) -> None:
        """Raise the exception of torch if it refuses the dtypes of the arguments of an operator.

        An operator is only refused if it accepts the same values in other dtypes. Otherwise the exception may be due to
        the values, which are not those of the program.

        Args:
            func: the operator. It is not checked if it draws or has effects outside of its arguments.
            args: its arguments, which may be fake tensors.
            kwargs: its arguments by name.
            out: its result on fake tensors.
        """
        leaves, tree = jax.tree.flatten((args, kwargs))
        at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        dtypes = tuple(leaves[i].dtype for i in at)
        if not at or (len({*dtypes}) == 1 and dtypes[0] in _FLOATS) or not _is_run(func, leaves, kwargs):
            return
        # A mask may have to select as many elements as there are values, as in `x[mask] = values`.
        if torch.bool in dtypes and func in _INDEX_PUTS:
            _check_write(func, args[0], args[2])
            return
        if torch.bool in dtypes and any(isinstance(size, torch.SymInt) for i in at for size in leaves[i].shape):
            return
        results = [leaf for leaf in jax.tree.leaves(out) if isinstance(leaf, torch.Tensor)]
        shrinks = not _is_small([*(leaves[i] for i in at), *results])
        if shrinks and func not in _SIZES and any(_size(leaf, shrinks) is not leaf for leaf in leaves):
            return
        if shrinks and any(argument.is_out for argument in schema_of(func).arguments):
            return  # torch warns of an `out` that it resizes
        statics = tuple(_size(leaf, shrinks) for leaf in leaves if not isinstance(leaf, torch.Tensor))
        shapes = tuple(tuple(_size(size, shrinks) for size in leaves[i].shape) for i in at)
        made = [*shapes, *([_size(size, shrinks) for size in result.shape] for result in results)]
        if sum(map(math.prod, made)) > _MOST:  # of many dimensions
            return
        key = (func, tree, dtypes, shapes, tuple(map(repr, statics)))
        if key in self._passed:
            return

        def run(dtypes: Sequence[torch.dtype], fill: Callable[[torch.dtype], int] = _zero) -> Exception | None:
            rest = iter(statics)
            try:
                filled = [torch.full(s, fill(dtype), dtype=dtype) for s, dtype in zip(shapes, dtypes, strict=True)]
            except RuntimeError:  # a dtype without numbers, as uint4
                return None
            tensors = iter(filled)
            filled = [next(tensors if isinstance(leaf, torch.Tensor) else rest) for leaf in leaves]
            args, kwargs = jax.tree.unflatten(tree, filled)
            try:
                func(*args, **kwargs)
            except Exception as error:  # noqa: BLE001  (the caller judges it)
                return error
            return None

        with outside_modes(), torch.no_grad():
            error = run(dtypes)
            if (
                error is not None
                and not _is_of_division(error)
                and run(dtypes, _one_unless_index) is not None
                and any(run(other) is None for other in _others(dtypes))
            ):
                wide = tuple(map(_wide, dtypes))
                if not (_NO_KERNEL.search(str(error)) and wide != dtypes and run(wide) is None):
                    raise error
        self._passed.add(key)


def _check_write(func: OpOverload, target: torch.Tensor, values: torch.Tensor) -> None:
    """Raise the exception of torch if it does not write values of one dtype to elements of another.

    It does write a single value through a mask.
    """
    if any(type(size) is not int or size != 1 for size in values.shape):
        with outside_modes(), torch.no_grad():
            first = torch.zeros(1, dtype=torch.int64)
            func(torch.zeros(1, dtype=target.dtype), [first], torch.zeros(1, dtype=values.dtype))


def _is_run(func: OpOverload, leaves: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Return whether it is harmless to run an operator on tensors made for the check: it draws nothing, for example."""
    if func.namespace != "aten" or func.is_view or torch.Tag.nondeterministic_seeded in func.tags:
        return False
    if kwargs.get("device") is not None and torch.device(kwargs["device"]).type != "cpu":
        return False
    return all(leaf.layout is torch.strided for leaf in leaves if isinstance(leaf, torch.Tensor))


def _is_small(leaves: Sequence[Any]) -> bool:
    """Return whether tensors have few elements, and no size that is a symbol."""
    shapes = [leaf.shape for leaf in leaves if isinstance(leaf, torch.Tensor)]
    known = all(isinstance(size, int) for shape in shapes for size in shape)
    return known and sum(map(math.prod, shapes)) <= _MOST


def _size(leaf: Any, shrinks: bool) -> Any:
    """Return a size, or another static argument, for a run in smaller sizes if it `shrinks`."""
    if isinstance(leaf, torch.SymInt) or (shrinks and type(leaf) is int and leaf > _LONGEST):
        return _LONGEST
    return leaf


def _zero(dtype: torch.dtype) -> int:
    del dtype
    return 0


def _one_unless_index(dtype: torch.dtype) -> int:
    return int(dtype.is_floating_point or dtype.is_complex or dtype is torch.bool)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return a dtype of the same kind for which torch has kernels."""
    if dtype.is_floating_point and dtype.itemsize < 4:
        return torch.float32
    return torch.int64 if dtype in (torch.uint16, torch.uint32, torch.uint64) else dtype


def _is_of_division(error: Exception) -> bool:
    """Return whether an operator divided integers by zero. It divides floats by zero without an exception."""
    return "ZeroDivisionError" in str(error)


def _others(dtypes: tuple[torch.dtype, ...]) -> Iterator[tuple[torch.dtype, ...]]:
    """Yield dtypes to try in place of the dtypes of an operator's arguments: one for all, then another for each one."""
    candidates = dict.fromkeys((*dtypes, torch.float32, torch.int64, torch.bool))
    for dtype in candidates:
        yield (dtype,) * len(dtypes)
    for i in range(len(dtypes)):
        for dtype in candidates:
            yield (*dtypes[:i], dtype, *dtypes[i + 1 :])
