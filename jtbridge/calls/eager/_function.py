"""The user's function for one eager call, as a function of flat tensors."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from jtbridge._compat import (
    DispatchMode,
    FakeTensor,
    HigherOrderOperator,
    address_of,
    innermost,
    is_graph_leaf,
    outside_modes,
    storage_id,
)
from jtbridge.core import random_numbers
from jtbridge.core.array_types import (
    ArrayType,
    OutputTree,
    Tensors,
    array_type,
    as_tensor,
    is_array_leaf,
    is_dense,
    to_bytes,
)
from jtbridge.core.dtypes import canonical_dtype, numpy_dtype, torch_dtype
from jtbridge.core.functions import TorchFunction, TraceCache, TracedFunction
from jtbridge.core.gpu_errors import add_device_note
from jtbridge.core.loans import CopyOnWrite
from jtbridge.core.pytree import flatten_output, holds_derivative, key_order
from jtbridge.core.runner import escaped_tensor_error
from jtbridge.core.torch_state import TorchState
from jtbridge.core.traits import AutogradTraits, FunctionTraits
from jtbridge.core.writes import written_tensors
from jtbridge.errors import DataDependentShapeError, DeviceError, DifferentiationError, OutputMismatchError
from jtbridge.transforms import Jvp, Vjp, Vmap
from jtbridge.triton import intercepted_launches

from ._arrays import MAX_COPIED_BYTES
from ._recorded_run import add_leaf_arguments

# The traits that are assumed for a function that was not traced: its derivatives use only reverse mode, and derivatives
# beyond the first use normalisations composed of simple operators.
_UNKNOWN = FunctionTraits(autograd=AutogradTraits(inner_autograd=True, fused_norm="any"))


# Dtypes that JAX has whether or not x64 is on.
_SAME_IN_JAX = frozenset(
    {torch.bool, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.int32, torch.int16, torch.int8}
    | {torch.uint8}
)


class EagerFunction(TorchFunction):
    """The user's function for the arguments of one call.

    Args:
        name: the function's name, for messages.
        call: a function that takes only the array arguments, as tensors.
        in_types: the types of the array arguments, and of the seed if there is one.
        casts: for each array argument that torch gets in another dtype, its position and that dtype.
        seeded: whether the last input is a seed.
        argument_names: the names of the array arguments if the new values of mutated arguments are results; else None.
        capture: makes the traced function.
        warnings_given: keys of the warnings already given about the function.
        clean_runs: the kinds of batches and derivatives whose last run succeeded without side effects.
        roots: returns the objects through which the function reaches its state, with their names.

    Attributes:
        out_types: the types of the results, once the function has run.
        mutated: the positions of the arguments that the function wrote to, if `argument_names` are given.
        row_by_row: whether the rows of a batch run one after another, because torch.vmap cannot batch the function.
    """

    def __init__(
        self,
        name: str,
        call: Callable[..., Any],
        in_types: tuple[ArrayType, ...] = (),
        casts: tuple[tuple[int, torch.dtype], ...] = (),
        *,
        seeded: bool = False,
        argument_names: tuple[str, ...] | None = None,
        capture: Callable[[], TracedFunction] | None = None,
        warnings_given: set[str] | None = None,
        clean_runs: set[Any] | None = None,
        roots: Callable[[], tuple[tuple[str, Any], ...]] = tuple,
    ):
        self.warnings_given = set() if warnings_given is None else warnings_given
        self.clean_runs = set() if clean_runs is None else clean_runs
        self.roots = roots
        self.name = name
        self.in_types = in_types
        self.argument_names = argument_names
        self.mutated: tuple[int, ...] = ()
        self.row_by_row = False
        self.seeded = seeded
        self._call = call
        self._casts = casts
        self._capture = capture
        self._captured: TracedFunction | None = None
        self._out_types: tuple[ArrayType, ...] | None = None
        self._tree: Any = None
        self._order: Any = None  # see `key_order`
        self._statics: list[Any] = []
        self._positions: list[int] = []
        self.traits = _UNKNOWN

    def __repr__(self) -> str:
        return self.name

    @property
    def base(self) -> EagerFunction:  # type: ignore[override]
        return self

    @functools.cached_property
    def cache(self) -> TraceCache:
        """A cache for the transformations of `jtbridge.transforms`, which derive functions from this one."""
        return TraceCache(reads_graph=True)

    @property
    def seed_position(self) -> int | None:
        """Return the position of the seed among the arguments, the same in every derivative; None without a seed."""
        return len(self.in_types) - 1 if self.seeded else None

    @property
    def order(self) -> int:
        return 0

    @property
    def state(self) -> TorchState:
        return TorchState.current()

    trace_state = state

    @property
    def out_types(self) -> tuple[ArrayType, ...]:  # type: ignore[override]
        assert self._out_types is not None, "the types of the results are known once the function has run"
        return self._out_types

    def promote(self, rows: Sequence[tuple[ArrayType, ...]]) -> None:
        """Set the types of the results: each gets the dtype to which its dtypes in the rows promote."""
        found = []
        for column in zip(*rows, strict=True):
            dtypes = [torch_dtype(type_.dtype, "a result") for type_ in column]
            dtype = functools.reduce(torch.promote_types, dtypes)
            found.append(ArrayType(column[0].shape, numpy_dtype(dtype, "a result")))
        self._out_types = tuple(found)

    def captured(self) -> TracedFunction:
        """Return the same function as a traced function. The first call traces it, with the state at that time."""
        if self._captured is None:
            assert self._capture is not None
            self._captured = self._capture()
            if self._out_types is not None and self._captured.out_types != self._out_types:
                raise OutputMismatchError(
                    f"`{self.name}` has other results under a trace than in the eager call whose derivative is taken: "
                    f"{self._captured.out_types} instead of {self._out_types}. Return the "
                    "same shapes and dtypes in both, or take the derivative under `jax.jit`, where it is only traced."
                )
        return self._captured

    def __call__(self, *tensors: torch.Tensor) -> Tensors:
        with contextlib.ExitStack() as stack:
            stack.enter_context(intercepted_launches())  # so that Triton kernels run without a GPU too
            if self.seeded:
                stack.enter_context(random_numbers.seeded(tensors[-1]))
                tensors = tensors[:-1]
            # Torch refuses writes to a leaf that requires a gradient; the function may write to its arguments.
            inputs = [t.clone() if t.requires_grad and is_graph_leaf(t) else t for t in tensors]
            for i, dtype in self._casts:
                inputs[i] = inputs[i].to(dtype)
            add_leaf_arguments(inputs)
            if self.argument_names is None:
                return self.flatten(self._called(inputs))
            record = stack.enter_context(_WriteRecorder(inputs))
            stack.enter_context(CopyOnWrite())  # it also runs `torch.cond` and its like outside the recorder
            out = self._called(inputs)
            self.mutated = record.written()
            return self.flatten(out, [inputs[i] for i in self.mutated])

    def _called(self, inputs: Sequence[torch.Tensor]) -> Any:
        try:
            return self._call(*inputs)
        except RuntimeError as error:
            add_device_note(error, inputs)
            raise

    def flatten(self, out: Any, mutated: Sequence[torch.Tensor] = ()) -> Tensors:
        """Return the tensors in a result of the function, followed by the mutated arguments."""
        leaves, self._tree = flatten_output(out)
        self._order = None if isinstance(out, torch.Tensor) else key_order(out)
        self._positions = [i for i, leaf in enumerate(leaves) if is_array_leaf(leaf, self.row_by_row)]
        arrays = [self._result(number, leaves[i]) for number, i in enumerate(self._positions)]
        arrays += [self._result(len(arrays) + number, tensor) for number, tensor in enumerate(mutated)]
        self._statics = leaves
        for i in self._positions:
            self._statics[i] = None
        # Under torch.vmap, these are the types of one row.
        self._out_types = tuple(array_type(array, "a result") for array in arrays)
        return tuple(arrays)

    def _result(self, number: int, leaf: Any) -> torch.Tensor:
        """Return a leaf of the result as a tensor whose dtype JAX has under its present x64 setting."""
        tensor = leaf if type(leaf) is torch.Tensor and is_dense(leaf) else as_tensor(leaf)
        if isinstance(tensor, FakeTensor):
            raise escaped_tensor_error(self.name)
        if tensor.device.type not in ("cpu", "cuda"):
            raise DeviceError(
                f"Result {number} of `{self.name}` lies on device `{tensor.device}`, which JAX does not have. Make "
                "tensors inside the function on the device of its arguments (`device=x.device`)."
            )
        dtype = tensor.dtype
        if dtype in _SAME_IN_JAX:
            return tensor
        wanted = canonical_dtype(numpy_dtype(dtype, f"Result {number} of `{self.name}`"))
        return tensor.to(torch_dtype(wanted, "a result"))

    def refuse_hidden_tensors(self) -> None:
        """Raise if the result has an object that JAX treats as a constant and that holds a differentiated tensor.

        Raises:
            DifferentiationError: there is such an object.
        """
        for value in self._statics:
            if holds_derivative(value):
                raise DifferentiationError(
                    f"`{self.name}` returned an object of type `{type(value).__name__}` that holds tensors, and JAX "
                    "does not know its type: their derivative would be lost. Return a dict, a list or a tuple, or "
                    "register the type as a pytree node with JAX."
                )

    def unflatten(self, arrays: Sequence[Any]) -> Any:
        """Return the result for the caller, with arrays in place of tensors."""
        count = len(self._positions)
        tree = OutputTree(self._tree, tuple(self._positions), tuple(self._statics), self._order)
        out = tree.unflatten(arrays[:count])
        if self.argument_names is None:
            return out
        names = [self.argument_names[i] for i in self.mutated]
        return out, dict(zip(names, arrays[count:], strict=True))


@dataclasses.dataclass(frozen=True)
class EagerVmap(Vmap):
    """A batch, computed by one call of torch.vmap; row by row if `row_by_row` is set or each row has its own seed."""

    def __call__(self, *tensors: torch.Tensor) -> Tensors:
        base: Any = self.base
        if self.size == 0:
            return self._of_no_rows(tensors)
        own_seeds = base.seeded and self.dims[base.seed_position] is not None
        if base.row_by_row or own_seeds:
            return self.by_loop(tensors)
        if all(dim is None for dim in self.dims):
            return tuple(y.expand(self.size, *y.shape) for y in self.fn(*tensors))
        # As in torch, rows of a function without a key draw different numbers; with one key for all, the same ones.
        return self.by_torch_vmap(tensors, "same" if base.seeded else "different", has_state=True)

    def by_loop(self, tensors: Tensors) -> Tensors:
        """Run the rows one after another. If the dtype of a result differs between rows, the dtypes are promoted."""
        base: Any = self.base
        rows, types = [], []
        for i in range(self.size):
            rows.append(self.fn(*self._arguments_of_row(tensors, i)))
            types.append(base.out_types)
        if len({len(row) for row in rows}) > 1:
            raise OutputMismatchError(
                f"`{base.name}` returns {len(rows[0])} arrays for row 0 of the batch, and another number of arrays for "
                "another row. Return the same tree for each row."
            )
        columns = list(zip(*rows, strict=True))
        for number, column in enumerate(columns):
            other = next((i for i, y in enumerate(column) if y.shape != column[0].shape), None)
            if other is not None:
                raise DataDependentShapeError(
                    f"Result {number} of `{base.name}` has shape {tuple(column[0].shape)} for row 0 of the batch, and "
                    f"{tuple(column[other].shape)} for row {other}. The rows of a batch are one array, so their sizes "
                    "must be equal. Return an array of a fixed size, or call the function for each row in a loop."
                )
        dtypes = [functools.reduce(torch.promote_types, [y.dtype for y in column]) for column in columns]
        if any(each != types[0] for each in types) and len({len(each) for each in types}) == 1:
            base.promote(types)
        return tuple(torch.stack([y.to(dtype) for y in column]) for column, dtype in zip(columns, dtypes, strict=True))

    def _arguments_of_row(self, tensors: Tensors, i: int) -> list[torch.Tensor]:
        # An argument without a batch axis is copied too, because the row may write to it.
        row = zip(super()._arguments_of_row(tensors, i), self.dims, strict=True)
        return [t.clone() if dim is None else t for t, dim in row]

    def _of_no_rows(self, tensors: Tensors) -> Tensors:
        """Return results without rows. A run on one row of zeros gives their types."""
        row = [
            t if d is None else t.new_zeros((*t.shape[:d], *t.shape[d + 1 :]))
            for t, d in zip(tensors, self.dims, strict=True)
        ]
        return tuple(y.new_empty((0, *y.shape)) for y in self.fn(*row))


@dataclasses.dataclass(frozen=True)
class EagerJvp(Jvp):
    """A Jacobian-vector product by reverse mode. For an untraced function torch's forward mode may be wrong."""

    def __call__(self, *tensors: torch.Tensor) -> Tensors:
        return self.by_reverse_mode(tensors)


def as_captured(fn: TorchFunction) -> TorchFunction:
    """Return the same transformations of the captured function, for a traced program."""
    match fn:
        case EagerFunction():
            return fn.captured()
        case Vmap():
            return Vmap(as_captured(fn.fn), fn.dims, fn.size, fn.summed)
        case Jvp():
            return Jvp(as_captured(fn.fn), fn.wrt, fn.outs)
        case Vjp():
            return Vjp(as_captured(fn.fn), fn.wrt, fn.outs)
    raise TypeError(f"{fn!r} is not made from an eager function")


class _WriteRecorder(DispatchMode):
    """A mode that records which of some tensors are written to: by operators, or without operators, as by NumPy.

    A small tensor is compared with its bytes at the start. The address of a large tensor is compared: the tensor shares
    the memory of an argument, which `CopyOnWrite` replaces before a write and before code gets access to the memory.
    """

    supports_higher_order_operators = True

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._tensors = [innermost(tensor) for tensor in tensors]
        self._before = _contents(self._tensors)
        self._written: set[int] = set()
        self._alive: list[torch.Tensor] = []  # a freed storage's address may be reused

    def written(self) -> tuple[int, ...]:
        """Return the positions of the tensors that were written to."""
        pairs = zip(self._before, _contents(self._tensors), strict=True)
        return tuple(
            i
            for i, ((before, after), tensor) in enumerate(zip(pairs, self._tensors, strict=True))
            if storage_id(tensor) in self._written or before != after
        )

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):  # such as `flex_attention`, which writes to no argument
            return func(*args, **kwargs)
        for tensor in written_tensors(func, args, kwargs):
            if tensor.layout is torch.strided:
                self._alive.append(tensor)
                self._written.add(storage_id(tensor))
        return func(*args, **kwargs)


def _contents(tensors: Sequence[torch.Tensor]) -> list[Any]:
    """Return the bytes of small tensors, and the addresses of large ones."""
    with outside_modes(), torch.no_grad():
        return [
            address_of(tensor)
            if tensor.numel() * tensor.itemsize > MAX_COPIED_BYTES
            else to_bytes(tensor.detach().cpu()).numpy().tobytes()
            for tensor in tensors
        ]
