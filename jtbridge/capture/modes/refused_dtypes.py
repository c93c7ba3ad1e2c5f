"""Refusal of dtypes that torch accepts on fake tensors, and refuses on real ones.

``torch.mm`` of float32 and bfloat16 raises in torch. On fake tensors it has a result, and its translation to JAX
promotes the dtypes. Kernels check dtypes in their own code, and no schema describes these checks. So each operator is
run on small tensors of zeros and ones, to see whether it raises.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import torch

from jtbridge._compat import OpOverload, outside_modes, schema_of
from jtbridge.core.pytree import tensor_leaves
from jtbridge.core.signals import raise_if_from_signal

_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_MAX_ELEMENTS = 1 << 16  # the most elements, in all arguments and results, of an operator that is run as a check
_LONGEST = 4  # replaces larger sizes in a run on small tensors
# Operators whose integer arguments are sizes, or are checked against sizes, and so shrink with the tensors. The kernels
# of other operators may read past the end of a smaller tensor.
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

# Operators whose pivots count from 1. LAPACK trusts them, and would write before the start of the memory for zeros.
_BY_PIVOTS = frozenset(
    {
        torch.ops.aten.linalg_ldl_solve.default,
        torch.ops.aten.linalg_lu_solve.default,
        torch.ops.aten.lu_unpack.default,
    }
)

# The messages of torch for a dtype for which it has no CPU kernel. A GPU or XLA may have one.
_NO_KERNEL = re.compile(r"not implemented for|[Nn]ot supported|doesn't support")


class DtypeChecks:
    """Checks by small runs whether torch accepts the dtypes of the operators of a trace. Equal calls are run once."""

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
        if func is torch.ops.aten.scalar_tensor.default:  # the dtype may not hold the number
            if isinstance(args[0], bool | int | float | complex):  # and not a symbol, whose value is unknown
                with outside_modes():
                    func(args[0], **{**kwargs, "device": "cpu", "pin_memory": False})
            return
        leaves, tree = jax.tree.flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        dtypes = tuple(tensor.dtype for tensor in tensors)
        plain = _with_plain_numbers(func, args, kwargs, dtypes)
        is_safe = len({*dtypes}) == 1 and dtypes[0] in _FLOATS and plain is None
        if not tensors or is_safe or not _may_be_run(func, leaves, kwargs):
            return
        # A mask may have to select as many elements as there are values, as in `x[mask] = values`.
        if func in _INDEX_PUTS and any(x is not None and x.dtype is torch.bool for x in args[1]):
            _check_write(func, args[0], args[2])
            return
        if torch.bool in dtypes and any(isinstance(size, torch.SymInt) for x in tensors for size in x.shape):
            return
        numbers = _numbers(func, args, kwargs)
        call = _small_call(func, leaves, tree, out, numbers)
        if call is None:
            return
        key = (func, tree, dtypes, call.shapes, tuple(map(repr, call.statics)))
        if key in self._passed:
            return
        with outside_modes(), torch.no_grad():
            error = _refusal(call, dtypes, plain and _small_call(func, jax.tree.leaves(plain), tree, out, numbers))
        if error is not None:
            raise error
        self._passed.add(key)


class _Call(NamedTuple):
    """A call of an operator on tensors that are made for the check.

    Attributes:
        func: the operator.
        tree: the structure of its arguments.
        are_tensors: for each argument, whether it is a tensor.
        shapes: the shapes of the tensors.
        statics: the other arguments.
    """

    func: OpOverload
    tree: Any
    are_tensors: tuple[bool, ...]
    shapes: tuple[tuple[int, ...], ...]
    statics: tuple[Any, ...]

    def error(
        self, dtypes: Sequence[torch.dtype], fill: Callable[[torch.dtype], int] = lambda dtype: 0
    ) -> Exception | None:
        """Run the operator on tensors of these dtypes; return its exception, or None if it raises none."""
        try:
            filled = [torch.full(s, fill(dtype), dtype=dtype) for s, dtype in zip(self.shapes, dtypes, strict=True)]
        except RuntimeError:  # `full` does not have the dtype, such as uint4
            return None
        tensors, statics = iter(filled), iter(self.statics)
        leaves = [next(tensors if is_tensor else statics) for is_tensor in self.are_tensors]
        args, kwargs = jax.tree.unflatten(self.tree, leaves)
        try:
            self.func(*args, **kwargs)
        except Exception as error:  # noqa: BLE001  (the caller judges it)
            raise_if_from_signal(error)
            return error
        return None


def _small_call(func: OpOverload, leaves: Sequence[Any], tree: Any, out: Any, numbers: frozenset[int]) -> _Call | None:
    """Return a call like the given one, with few elements; None if a smaller call could fail because of its sizes.

    The leaves at the positions `numbers` are not sizes.
    """
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    results = tensor_leaves(out)
    shrinks = not is_small([*tensors, *results])
    sized = [leaf if i in numbers else _reduced_size(leaf, shrinks) for i, leaf in enumerate(leaves)]
    if shrinks and func not in _SIZES and any(map(operator.is_not, sized, leaves)):
        return None
    if shrinks and any(argument.is_out for argument in schema_of(func).arguments):
        return None  # torch warns of an `out` that it resizes
    shapes, result_shapes = (
        tuple(tuple(_reduced_size(size, shrinks) for size in x.shape) for x in group) for group in (tensors, results)
    )
    if sum(map(math.prod, (*shapes, *result_shapes))) > _MAX_ELEMENTS:  # too many dimensions
        return None
    statics = tuple(leaf for leaf in sized if not isinstance(leaf, torch.Tensor))
    return _Call(func, tree, tuple(isinstance(leaf, torch.Tensor) for leaf in leaves), shapes, statics)


def _refusal(call: _Call, dtypes: tuple[torch.dtype, ...], plain: _Call | None) -> Exception | None:
    """Return the exception of torch if it refuses the dtypes; None if it accepts them, or may refuse the values.

    Args:
        call: the call of the operator.
        dtypes: the dtypes of its tensors.
        plain: the same call without Booleans and complex numbers among its numbers, if it has any.
    """
    error = call.error(dtypes)
    # Integers cannot be divided by zero: `call.error` runs the operator on zeros.
    if error is None or "ZeroDivisionError" in str(error) or call.error(dtypes, _one_unless_index) is None:
        return None
    refuses_numbers = plain is not None and any(plain.error(other) is None for other in (dtypes, *_others(dtypes)))
    if not refuses_numbers and all(call.error(other) is not None for other in _others(dtypes)):
        return None
    wide = tuple(map(_wide_dtype, dtypes))
    return None if lacks_kernel(error, dtypes) and call.error(wide) is None else error


def _numbers(func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> frozenset[int]:
    """Return the positions of the argument leaves that the operator's schema declares as numbers, not as sizes."""
    arguments = schema_of(func).arguments
    types = {argument.name: str(argument.type) for argument in arguments}
    kinds = [*(str(argument.type) for argument in arguments[: len(args)]), *(types[name] for name in sorted(kwargs))]
    found, position = set(), 0
    for kind, value in zip(kinds, [*args, *(kwargs[name] for name in sorted(kwargs))], strict=True):
        if "number" in kind and type(value) in (int, float):
            found.add(position)
        position += len(jax.tree.leaves(value))
    return frozenset(found)


def _with_plain_numbers(
    func: OpOverload, args: tuple, kwargs: dict[str, Any], dtypes: Sequence[torch.dtype]
) -> tuple[tuple, dict] | None:
    """Return the arguments with 1 for each number that torch may refuse; None if there is no such number.

    These are Booleans, complex numbers, and numbers that are too large for one of the dtypes.
    """

    def is_odd(value: Any) -> bool:
        return type(value) in (bool, complex) or (type(value) in (int, float) and _overflows(value, dtypes))

    if not any(map(is_odd, (*args, *kwargs.values()))):
        return None
    types = {argument.name: str(argument.type) for argument in schema_of(func).arguments}

    def plain(kind: str, value: Any) -> Any:
        may_be_number = "number" in kind or "Tensor" in kind  # as in `aten.sub.Tensor(x, True)`
        return 1 if may_be_number and is_odd(value) else value

    found = [plain(kind, value) for kind, value in zip(types.values(), args, strict=False)]
    named = {name: plain(types[name], value) for name, value in kwargs.items()}
    is_same = all(map(operator.is_, found, args)) and all(named[name] is kwargs[name] for name in kwargs)
    return None if is_same else ((*found,), named)


def _overflows(number: float, dtypes: Sequence[torch.dtype]) -> bool:
    """Return whether a number is finite and too large for one of some dtypes."""
    if not math.isfinite(number):
        return False
    limits = [
        torch.finfo(dtype) if dtype.is_floating_point or dtype.is_complex else torch.iinfo(dtype)
        for dtype in dtypes
        if dtype is not torch.bool
    ]
    return any(not limit.min <= number <= limit.max for limit in limits)


def _check_write(func: OpOverload, target: torch.Tensor, values: torch.Tensor) -> None:
    """Raise the exception of torch if it refuses to write values of one dtype through a mask to elements of another.

    Torch accepts a single value of any dtype.
    """
    if any(type(size) is not int or size != 1 for size in values.shape):
        with outside_modes(), torch.no_grad():
            first = torch.zeros(1, dtype=torch.int64)
            func(torch.zeros(1, dtype=target.dtype), [first], torch.zeros(1, dtype=values.dtype))


def _may_be_run(func: OpOverload, leaves: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Return whether it is harmless to run an operator on tensors made for the check: it draws nothing, for example."""
    if func.namespace != "aten" or func.is_view or torch.Tag.nondeterministic_seeded in func.tags:
        return False
    if func in _BY_PIVOTS:
        return False
    return is_for_cpu(kwargs) and all(leaf.layout is torch.strided for leaf in leaves if isinstance(leaf, torch.Tensor))


def lacks_kernel(error: Exception, dtypes: Sequence[torch.dtype]) -> bool:
    """Return whether a CPU has no kernel for dtypes for which a GPU or XLA may have one."""
    return bool(_NO_KERNEL.search(str(error))) and any(_wide_dtype(dtype) is not dtype for dtype in dtypes)


def is_for_cpu(kwargs: dict[str, Any]) -> bool:
    """Return whether an operator makes its result on a CPU, or on the device of its tensors."""
    return kwargs.get("device") is None or torch.device(kwargs["device"]).type == "cpu"


def is_small(leaves: Sequence[Any]) -> bool:
    """Return whether the tensors among some leaves have few elements, and no size that is a symbol."""
    shapes = [leaf.shape for leaf in leaves if isinstance(leaf, torch.Tensor)]
    known = all(isinstance(size, int) for shape in shapes for size in shape)
    return known and sum(map(math.prod, shapes)) <= _MAX_ELEMENTS


def _reduced_size(leaf: Any, shrinks: bool) -> Any:
    """Return a size, or another static argument, for a run in smaller sizes if it `shrinks`."""
    if isinstance(leaf, torch.SymInt) or (shrinks and type(leaf) is int and leaf > _LONGEST):
        return _LONGEST
    return leaf


def _one_unless_index(dtype: torch.dtype) -> int:
    return int(dtype.is_floating_point or dtype.is_complex or dtype is torch.bool)


def _wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return a dtype of the same kind for which torch has kernels."""
    if dtype.is_floating_point and dtype.itemsize < 4:
        return torch.float32
    return torch.int64 if dtype in (torch.uint16, torch.uint32, torch.uint64) else dtype


def _others(dtypes: tuple[torch.dtype, ...]) -> Iterator[tuple[torch.dtype, ...]]:
    """Yield dtypes to try in place of the dtypes of an operator's arguments: one for all, then another for each one."""
    candidates = dict.fromkeys((*dtypes, torch.float32, torch.int64, torch.bool))
    for dtype in candidates:
        yield (dtype,) * len(dtypes)
    for i in range(len(dtypes)):
        for dtype in candidates:
            yield (*dtypes[:i], dtype, *dtypes[i + 1 :])
