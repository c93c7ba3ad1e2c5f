"""A recorder of the effects of a torch function: writes, random draws, grad-mode switches, calls of modules."""

from __future__ import annotations

import contextlib
import sys
import time
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import jax
import torch
from torch.overrides import TorchFunctionMode

from jtbridge._compat import (
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    TorchDispatchMode,
    base_of,
    forward_mode,
    function_of_triton_operator,
    inside_mode,
    is_lazy,
    on_meta,
    running_modules,
    schema_of,
    storage_id,
)
from jtbridge.core import random_numbers
from jtbridge.core.array_types import is_dense
from jtbridge.core.inner_autograd import creates_graph, runs_autograd
from jtbridge.core.overlap import overlapping_write_reason
from jtbridge.core.pytree import tensor_leaves
from jtbridge.core.writes import AS_NUMPY, written_tensors
from jtbridge.state import WrittenValues, same_tensors, save_values
from jtbridge.transforms import FUSED

from .branches import ASSERTING
from .call_log import CallLog
from .caught import Place, place_that_may_raise
from .exceptions import refuse_higher_order
from .texts import is_text
from .wrong_forward_mode import has_wrong_forward_mode

# Torch's batching rules for these operators are wrong (torch 2.13). For example, a batched `set_` leaves its tensor
# unchanged.
_UNBATCHABLE = frozenset(
    {
        torch.ops.aten.as_strided_scatter.default,
        torch.ops.aten.choose_qparams_optimized.default,
        torch.ops.aten.quantize_per_tensor_dynamic.default,
        *(getattr(torch.ops.aten.set_, overload) for overload in torch.ops.aten.set_.overloads()),
    }
)

_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]
# After these calls, autograd may have saved a tensor without detecting later writes to it.
_UNWATCHED = (_DATA, torch.kron, torch.Tensor.kron)
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]

# These operators turn a literal into a tensor: their argument is a new tensor, not a closed-over one.
_LIFTS = frozenset(
    {torch.ops.aten.lift.default, torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default}
)

_MAX_READS, _MAX_SECONDS = 5_000, 20.0  # limits of one run on example arguments: reads of values, and seconds
# Functions that read a tensor's values, in addition to the operator `_local_scalar_dense`.
_READING = AS_NUMPY | {torch.Tensor.tolist, torch.Tensor.__dlpack__}


class EndlessLoopError(RuntimeError):
    """A function reads values of example arguments so often that it may never end."""


_Type = tuple[tuple[int, ...], torch.dtype]


class SharedMemoryError(RuntimeError):
    """A trace would assign to the `.data` of a closed-over tensor, or write to memory shared with a NumPy array."""


class EffectRecorder:
    """Records the effects of a function that runs inside :meth:`watching`.

    The recorder follows storages, not tensors: a write through a view, ``.data`` or a slice is still a write.
    """

    def __init__(
        self,
        inputs: Sequence[torch.Tensor],
        fake_mode: FakeTensorMode | None,
        refuse_write: Callable[[str], NoReturn] | None,
        saved: WrittenValues | None = None,
    ):
        self.operators = 0
        self._reads = 0
        self._started = time.monotonic()
        self.random_operator: str | None = None
        self.own_generator: str | None = None  # an operator that draws from another generator than torch's default one
        self.has_new_seed = False  # whether torch's default generator was seeded
        self._generators: list[torch.Generator] = []
        self.unbatchable: str | None = None
        self.wrong_forward_mode: str | None = None
        self.fused_norm: str | None = None
        self.custom_operator: str | None = None
        self.launches: list[str] = []  # the Triton kernels that were launched
        self.operators_of_kernels: list[str] = []  # the called operators that torch.library.triton_op made
        self.switches_grad_mode = False
        self.inner_autograd = False
        self.forward_mode: str | None = None
        self.uses_data = False
        self.unseen_write_reason: str | None = None
        self._unwatched: set[int] = set()  # storages
        self._viewed: set[int] = set()  # storages
        self.uses_default_dtype = False
        self._default_dtypes = (torch.get_default_dtype(), torch.get_default_dtype().to_complex())
        self.sets_data = False
        self.asserts = False
        self.reads_repr = False  # whether the text of a fake tensor was taken
        self.may_raise: dict[Place, None] = {}  # where torch may raise inside exception handlers, in order
        self.keeps_inner_graph = False
        self.reshaped: dict[int, _Type] = {}  # the inputs that have another shape or dtype after the run
        self.calls = CallLog(inputs)
        self.result_order: Any = None  # see `key_order`
        self._modules: dict[int, torch.nn.Module] = {}  # by id: the modules that are running when torch is called
        self._base: types.FrameType | None = None
        self._inputs = [_storages(tensor) for tensor in inputs]
        self._input_tensors = list(inputs)
        self._types = _shapes_and_dtypes(inputs)  # the types of the inputs before the run
        self._keep: list[Any] = list(inputs)  # kept alive, because the address of a freed storage may be reused
        self._written: set[int] = set()
        self._closed_over: dict[int, torch.Tensor] = {}  # by storage, only while tracing on fake tensors
        self._shared: set[int] = set()  # storages of the fake tensors that replace tensors from NumPy
        self._fake_mode = fake_mode
        self._refuse_write = refuse_write
        self._saved = saved  # saves tensors before they are written to

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Record all calls and operators of torch on this thread until the block ends."""
        self._base = sys._getframe(2)  # the frame of the `with` statement
        try:
            with _CallRecordingMode(self), _OperatorRecordingMode(self):
                yield
                self.has_new_seed = random_numbers.has_new_seed()
        finally:
            before, after = self._types, _shapes_and_dtypes(self._input_tensors)
            self.reshaped = {i: new for i, (old, new) in enumerate(zip(before, after, strict=True)) if new != old}
            self._base = None
            self._keep.clear()
            self._input_tensors.clear()

    @property
    def modules(self) -> list[torch.nn.Module]:
        """The modules that were called, with their submodules."""
        return list({id(part): part for module in self._modules.values() for part in module.modules()}.values())

    def mutated_inputs(self) -> tuple[int, ...]:
        """Return the positions of the inputs that were written to."""
        return tuple(i for i, storages in enumerate(self._inputs) if storages & self._written)

    def note_unseen_writes(self, before: Sequence[torch.Tensor], after: Sequence[torch.Tensor]) -> None:
        """Record the inputs that have other values after a run: code outside torch may have written to them."""
        for storages, was, now in zip(self._inputs, before, after, strict=True):
            if was.shape == now.shape and not same_tensors(was, now.detach()):
                self._written |= storages

    @property
    def is_tracing(self) -> bool:
        """Whether the function runs on tensors without values."""
        return self._fake_mode is not None

    def keeps_generator(self) -> bool:
        """Return whether a generator that the function drew from still exists, so that it was not made inside."""
        found = not self._generators  # a generator that was not seen may exist after the call
        while self._generators and not found:
            generator = self._generators.pop()
            others = sum(each is generator for each in self._generators)
            found = sys.getrefcount(generator) > others + 2  # `generator`, and the argument of getrefcount
        return found

    def note_call(self, fn: Callable, args: tuple, kwargs: dict[str, Any]) -> None:
        """Record a call of a torch function, before dispatch."""
        self._note_modules()
        if fn in _READING and not self.is_tracing:
            self._note_read()
            if fn is not torch.Tensor.tolist:  # the others return memory, to which code may write
                save_values(args[0])
        if is_text(fn, args):
            self.reads_repr = True
        generator = kwargs.get("generator")  # operators get another Python object for the same generator
        if generator is not None and generator is not torch.default_generator:
            self._generators.append(generator)
        name = getattr(fn, "__name__", "")
        if name == "_set_grad_enabled" and torch.is_grad_enabled() != args[0]:
            self.switches_grad_mode = True
        if fn == _DATA:
            self.uses_data = True
        if fn in _UNWATCHED:
            for tensor in filter(torch.is_tensor, (*args, *kwargs.values())):
                self._keep.append(tensor)
                self._unwatched |= _storages(tensor)
        if fn == _SET_DATA and not _is_same_memory(*args):
            self._note_new_memory(args[0])
        if runs_autograd(fn):
            self.inner_autograd = True
            self.keeps_inner_graph |= creates_graph(fn, args, kwargs)

    def note_operator(self, fn: OpOverload, args: tuple, kwargs: dict[str, Any]) -> None:
        """Record an ATen or custom operator that is about to run.

        Raises:
            RuntimeError: while tracing, the function has set another default dtype. A graph does not contain that.
        """
        self.operators += 1
        if self.is_tracing and torch.get_default_dtype() is not self._default_dtypes[0]:
            torch.set_default_dtype(self._default_dtypes[0])  # the exception ends the function before it does so
            raise RuntimeError("it calls operators while it has set another default dtype of torch")
        if fn is torch.ops.aten._local_scalar_dense.default and not self.is_tracing:
            self._note_read()
        self._note_modules()
        if self._fake_mode is not None and fn not in _LIFTS:
            self._note_closed_over(self._fake_mode, args, kwargs)
        if self.forward_mode != "forward_ad":
            self.forward_mode = forward_mode() or self.forward_mode  # the mode may be that of another thread
        if draws(fn, args, kwargs):
            self._note_draw(fn, kwargs.get("generator"))
        if fn.namespace not in ("aten", "prims", "prim", "profiler"):
            self.custom_operator = str(fn)
            if function_of_triton_operator(fn) is not None:
                self.operators_of_kernels.append(str(fn))
        if fn in ASSERTING:
            self.asserts = True
        if (place := place_that_may_raise(fn, args, kwargs)) is not None:
            self.may_raise[place] = None
        if fn in _UNBATCHABLE or (fn is torch.ops.aten.roll.default and args[0].dim() == 0):  # vmap rolls the batch
            self.unbatchable = str(fn)
        if has_wrong_forward_mode(fn, args):
            self.wrong_forward_mode = str(fn)
        if schema_of(fn).name.endswith(FUSED):
            self.fused_norm = str(fn)
        for tensor in written_tensors(fn, args, kwargs):
            self._note_write(fn, tensor)
        if fn.is_view and fn is not torch.ops.aten.detach.default:
            self._viewed |= _storages(args[0])
        if torch.Tag.inplace_view in fn.tags:
            self._note_new_dimensions(fn, args[0])
        elif overlaps := overlapping_write_reason(fn, args, kwargs):
            self.unseen_write_reason = f"{overlaps} (`{fn}`)"
            self.unbatchable = str(fn)

    def _note_draw(self, fn: OpOverload, generator: torch.Generator | None) -> None:
        if generator is not None and random_numbers.is_seeded_generator(generator):
            self.random_operator = self.random_operator or random_numbers.first_operator_seeded()
        elif generator is None or generator is torch.default_generator:
            self.random_operator = self.random_operator or str(fn)
        else:
            self.own_generator = self.own_generator or str(fn)

    def _note_write(self, fn: OpOverload, tensor: torch.Tensor) -> None:
        """Record that an operator is about to write to a tensor.

        Raises:
            MutationError: the tensor is closed over, and side effects are not allowed.
        """
        self._keep.append(tensor)
        self._written |= _storages(tensor)
        if _storages(tensor) & self._unwatched:
            self.unseen_write_reason = (
                f"it writes to what was read as `.data` or by `torch.kron`, unseen by autograd (`{fn}`)"
            )
        if self._saved is not None:
            self._saved.save(tensor)
        written_to = self._describe_if_closed_over(tensor) if self._refuse_write is not None else None
        if self._refuse_write is not None and written_to is not None:
            self._refuse_write(written_to)
        if _storages(tensor) & self._shared:
            # This trace fails; inference then tries the function on example values.
            raise SharedMemoryError(f"it writes to memory that a tensor shares with a NumPy array (`{fn}`)")

    def note_lift(self, tensor: torch.Tensor, out: torch.Tensor) -> None:
        """Record that the fake tensor `out` replaces `tensor`, if torch does not own the memory of `tensor`.

        Torch does not own the memory of a result of `torch.from_numpy`.
        """
        is_real = isinstance(out, FakeTensor) and not isinstance(tensor, FakeTensor)
        if is_real and not tensor.untyped_storage().resizable():
            self._keep.append(out)
            self._shared |= _storages(out)

    def _note_new_dimensions(self, fn: OpOverload, tensor: torch.Tensor) -> None:
        """Record that an operator is about to change the dimensions of a tensor in place.

        A trace computes views again from their bases. The new view is wrong if the dimensions of the base have changed
        since then, or those of the view itself.
        """
        is_view = base_of(tensor) is not tensor
        if not is_view and _storages(tensor) & self._viewed:
            self.unseen_write_reason = f"it changes the dimensions of a tensor in place, and has views of it (`{fn}`)"
        elif is_view and not torch.is_grad_enabled():
            self.unseen_write_reason = f"it changes the dimensions of a view in place under `no_grad` (`{fn}`)"

    def _note_read(self) -> None:
        """Record that the value of an example argument, or of a tensor computed from one, is read.

        Raises:
            EndlessLoopError: there are too many reads, probably because a loop does not end for the example arguments.
        """
        self._reads += 1
        seconds = time.monotonic() - self._started
        if self._reads > _MAX_READS or (self._reads > _MAX_READS // 100 and seconds > _MAX_SECONDS):
            raise EndlessLoopError(
                f"on example arguments it reads the values of tensors {self._reads} times in {seconds:.0f} s, and may "
                "not end for these"
            )

    def note_result(self, fn: OpOverload, args: tuple, kwargs: dict[str, Any], out: Any) -> None:
        """Record whether a result of an operator may take its dtype from torch's default dtype.

        If this is not known, record that it may. The traced function is then valid for one default dtype only.
        """
        if self.uses_default_dtype:
            return
        if kwargs.get("dtype") in self._default_dtypes:  # it may come from `torch.get_default_dtype()`
            self.uses_default_dtype = True
        elif any(tensor.dtype in self._default_dtypes for tensor in tensor_leaves(out)):
            taken = [tensor.dtype for tensor in tensor_leaves((args, kwargs))]
            has_float = any(dtype.is_floating_point or dtype.is_complex for dtype in taken)
            self.uses_default_dtype = fn in _LIFTS or not has_float

    def _note_modules(self) -> None:
        assert self._base is not None
        for module in running_modules(self._base):
            self._modules[id(module)] = module

    def _note_new_memory(self, tensor: torch.Tensor) -> None:
        """Record ``tensor.data = ...``: a write that no operator makes, and no graph shows."""
        self.sets_data = True
        if any(tensor is each for each in self._input_tensors):
            self._written |= _storages(tensor)
        if self._saved is not None:
            self._saved.save_memory(tensor)
        written_to = self._describe_if_closed_over(tensor)
        if written_to is None and self._fake_mode is not None and not isinstance(tensor, FakeTensor):
            written_to = f"a closed-over tensor of shape {tuple(tensor.shape)} and dtype {tensor.dtype}"
        if written_to is not None and self._refuse_write is not None:
            self._refuse_write(written_to)
        if written_to is not None and self._fake_mode is not None:
            # This trace fails; inference then tries the function on example values.
            raise SharedMemoryError(f"`.data` of {written_to} is assigned to")

    def as_fakes(self, fn: OpOverload, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Return the arguments for an operator, as fake tensors if the operator writes to a closed-over tensor.

        Without a fake tensor among the arguments, fake mode would run the operator for real and change a module's
        buffers. Outside a trace the arguments stay as they are.
        """
        mode = self._fake_mode
        if mode is None or not any(not isinstance(t, FakeTensor) for t in written_tensors(fn, args, kwargs)):
            return args, kwargs

        def fake(leaf: Any) -> Any:
            return mode.from_tensor(leaf) if isinstance(leaf, torch.Tensor) else leaf

        return jax.tree.map(fake, (args, kwargs))

    def _note_closed_over(self, fake_mode: FakeTensorMode, args: tuple, kwargs: dict[str, Any]) -> None:
        for leaf in jax.tree.leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor) and not isinstance(leaf, FakeTensor):
                # Views of the closed-over tensor share the storage of this fake tensor.
                fake = fake_mode.from_tensor(leaf)
                self._keep.append(fake)
                for storage in _storages(leaf) | _storages(fake):
                    self._closed_over.setdefault(storage, leaf)

    def _describe_if_closed_over(self, tensor: torch.Tensor) -> str | None:
        """Describe the closed-over tensor that shares memory with `tensor`; None if no such tensor is known."""
        storages = _storages(tensor)
        if storages & set().union(*self._inputs):  # functional_call puts arguments into modules
            return None
        for storage in storages:
            real = self._closed_over.get(storage)
            if real is None and isinstance(tensor, FakeTensor):
                continue  # made in this run, and put into a module
            owner = self._owner_of(storages if real is None else _storages(real))
            if owner is not None:
                return owner
            if real is not None:
                return f"a closed-over tensor of shape {tuple(real.shape)} and dtype {real.dtype}"
        return None

    def _owner_of(self, storages: set[int]) -> str | None:
        """Return the name of a parameter or buffer of a called module in one of the storages; None if there is none."""
        for recurse in (False, True):  # the parts of a module that are not called themselves come second
            for module in self.modules:
                for name, state in [*module.named_buffers(recurse=recurse), *module.named_parameters(recurse=recurse)]:
                    if storages & _storages(state):
                        return f"`{type(module).__name__}.{name}`"
        return None


class _CallRecordingMode(TorchFunctionMode):
    """Passes calls of torch functions to an :class:`EffectRecorder`."""

    def __init__(self, recorder: EffectRecorder):
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        self._recorder.note_call(func, args, kwargs)
        return func(*args, **kwargs)


class _OperatorRecordingMode(TorchDispatchMode):
    """Passes operators to an :class:`EffectRecorder`."""

    supports_higher_order_operators = True

    def __init__(self, recorder: EffectRecorder):
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        refuse_higher_order(func)
        self._recorder.note_operator(func, args, kwargs)
        args, kwargs = self._recorder.as_fakes(func, args, kwargs)
        if self._recorder.is_tracing and kwargs.get("generator") is not None:
            kwargs = {**kwargs, "generator": None}  # not needed to run on fakes, whose cache would keep it alive
        with inside_mode():
            out = func(*args, **kwargs)
        self._recorder.calls.add(func, args, kwargs, out, lifts=func in _LIFTS)
        self._recorder.note_result(func, args, kwargs, out)
        if func in _LIFTS:
            self._recorder.note_lift(args[0], out)
        return out


def _storages(tensor: torch.Tensor) -> set[int]:
    if tensor.layout is not torch.strided:
        return set()
    return {storage_id(tensor)}


def _is_same_memory(tensor: torch.Tensor, value: Any) -> bool:
    """Return whether ``tensor.data = value`` changes nothing, as in ``module.to(dtype)`` of a module of this dtype."""
    if not all(isinstance(x, torch.Tensor) and is_dense(x) and not is_lazy(x) for x in (tensor, value)):
        return False
    places = [(storage_id(x), x.storage_offset(), x.shape, x.stride(), x.dtype) for x in (tensor, value)]
    return places[0] == places[1]


def _shapes_and_dtypes(tensors: Sequence[torch.Tensor]) -> list[_Type]:
    return [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]


def draws(fn: Any, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Return whether a call draws random numbers. Torch tags the operators that may draw.

    Dropout of probability 0 or in evaluation mode draws nothing, and nothing is drawn on the meta device.
    """
    if not isinstance(fn, OpOverload) or torch.Tag.nondeterministic_seeded not in fn.tags:
        return False
    operands = [x.meta.get("val") if isinstance(x, torch.fx.Node) else x for x in (*args, *kwargs.values())]
    if schema_of(fn).name == "aten::_fused_sdp_choice" or on_meta(operands, kwargs.get("device")):
        return False
    for position, argument in enumerate(schema_of(fn).arguments):
        value = kwargs.get(argument.name, args[position] if position < len(args) else argument.default_value)
        if argument.name in ("dropout_p", "dropout") and not value:
            return False
        if argument.name in ("train", "training") and value is False:
            return False
    return True
