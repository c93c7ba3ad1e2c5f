"""What a torch function does besides returning a value: writes, random draws, grad-mode switches, modules."""

from __future__ import annotations

import contextlib
import threading
import weakref
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
    function_of_triton_operator,
    storage_id,
)
from jtbridge._composite import FUSED
from jtbridge.errors import MutationError

from ._branches import ASSERTING

# Batch norm writes its running statistics without saying so in its schema.
_UNDECLARED_WRITES: dict[str, tuple[int, tuple[int, ...]]] = {
    # name: (position of `training`, positions written)
    "aten::native_batch_norm": (5, (3, 4)),
    "aten::cudnn_batch_norm": (5, (3, 4)),
    "aten::miopen_batch_norm": (5, (3, 4)),
}

# Torch's batching rule for these is wrong: it applies the strides of one row to the batch (torch 2.13).
_UNBATCHABLE = frozenset({torch.ops.aten.as_strided_scatter.default})

_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]

# These turn a literal into a tensor: what they read is new, not closed over.
_LIFTS = frozenset(
    {torch.ops.aten.lift.default, torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default}
)


class Observer:
    """Records what a function does while it runs inside :meth:`watching`.

    Storages, not tensors, are what is followed: a write through a view, ``.data`` or a slice is still a write.
    """

    def __init__(
        self,
        inputs: Sequence[torch.Tensor],
        fake_mode: FakeTensorMode | None,
        refuse_write: Callable[[str], NoReturn] | None,
    ):
        self.operators = 0
        self.random_operator: str | None = None
        self.own_generator = False
        self.unbatchable: str | None = None
        self.fused_norm: str | None = None
        self.custom_operator: str | None = None
        self.launches: list[str] = []  # Triton kernels
        self.operators_of_kernels: list[str] = []  # made by torch.library.triton_op
        self.switches_grad_mode = False
        self.inner_autograd = False
        self.uses_data = False
        self.sets_data = False
        self.asserts = False
        self.keeps_inner_graph = False
        self.modules: list[torch.nn.Module] = []
        self.read: list[torch.Tensor] = []  # closed-over tensors whose values were looked at
        self._inputs = [_storages(tensor) for tensor in inputs]
        self._keep: list[Any] = list(inputs)  # a storage's address may be reused once it is freed
        self._written: set[int] = set()
        self._closed_over: dict[int, torch.Tensor] = {}  # only while tracing on fake tensors
        self._fake_mode = fake_mode
        self._refuse_write = refuse_write

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Observe everything torch does on this thread until the block ends."""
        thread = threading.get_ident()

        def note_module(module: torch.nn.Module, _: Any) -> None:
            if threading.get_ident() == thread:
                self.modules.append(module)

        hook = torch.nn.modules.module.register_module_forward_pre_hook(note_module)
        try:
            with _Calls(self), _Operators(self):
                yield
        finally:
            hook.remove()
            self._keep.clear()

    def mutated_inputs(self) -> tuple[int, ...]:
        """Positions of the inputs that were written to."""
        return tuple(i for i, storages in enumerate(self._inputs) if storages & self._written)

    def note_call(self, fn: Callable, args: tuple, kwargs: dict[str, Any]) -> None:
        """A torch function was called (before dispatch)."""
        name = getattr(fn, "__name__", "")
        if name == "_set_grad_enabled" and torch.is_grad_enabled() != args[0]:
            self.switches_grad_mode = True
        if fn == _DATA:
            self.uses_data = True
        if fn == _SET_DATA:
            self._note_new_memory(args[0])
        if fn is torch.autograd.grad or fn is torch.Tensor.backward:
            self.inner_autograd = True
            # grad(outputs, inputs, grad_outputs, retain_graph, create_graph); backward(self, g, retain, create)
            position = 4 if fn is torch.autograd.grad else 3
            create_graph = kwargs.get("create_graph", args[position] if len(args) > position else False)
            self.keeps_inner_graph |= bool(create_graph)

    def note_operator(self, fn: OpOverload, args: tuple, kwargs: dict[str, Any]) -> None:
        """An ATen or custom operator is about to run."""
        self.operators += 1
        if self._fake_mode is not None and fn not in _LIFTS:
            self._note_closed_over(self._fake_mode, args, kwargs)
        if torch.Tag.nondeterministic_seeded in fn.tags and draws(fn, args, kwargs):
            self.random_operator = self.random_operator or str(fn)
            if kwargs.get("generator") is not None:
                self.own_generator = True
        if fn.namespace not in ("aten", "prims", "prim"):
            self.custom_operator = str(fn)
            if function_of_triton_operator(fn) is not None:
                self.operators_of_kernels.append(str(fn))
        if fn in ASSERTING:
            self.asserts = True
        if fn in _UNBATCHABLE:
            self.unbatchable = str(fn)
        if fn._schema.name.endswith(FUSED):
            self.fused_norm = str(fn)
        for tensor in written_tensors(fn, args, kwargs):
            self._keep.append(tensor)
            self._written |= _storages(tensor)
            written_to = self._describe_if_closed_over(tensor) if self._refuse_write is not None else None
            if self._refuse_write is not None and written_to is not None:
                self._refuse_write(written_to)

    def _note_new_memory(self, tensor: torch.Tensor) -> None:
        """``tensor.data = ...``: a write that no operator makes, and no graph shows."""
        self.sets_data = True
        written_to = self._describe_if_closed_over(tensor)
        if written_to is None and self._fake_mode is not None and not isinstance(tensor, FakeTensor):
            written_to = f"a closed-over tensor of shape {tuple(tensor.shape)} and dtype {tensor.dtype}"
        if written_to is not None and self._refuse_write is not None:
            self._refuse_write(written_to)
        if written_to is not None and self._fake_mode is not None:
            raise MutationError(f"`.data` of {written_to} is assigned to. Pass `output_shapes=`, or use `.copy_()`.")

    def kept_apart(self, fn: OpOverload, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Arguments for an operator that writes: while tracing, a fake tensor for every closed-over one.

        Fake mode would run it for real if it meets no fake tensor, and change a module's buffers.
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
                # Its views will share the storage of the fake tensor that stands for it.
                fake = fake_mode.from_tensor(leaf)
                self._keep.append(fake)
                for storage in _storages(leaf) | _storages(fake):
                    self._closed_over.setdefault(storage, leaf)

    def _describe_if_closed_over(self, tensor: torch.Tensor) -> str | None:
        """Name the tensor of a module or closure that shares memory with `tensor`, if there is one."""
        storages = _storages(tensor)
        if storages & set().union(*self._inputs):  # functional_call puts arguments in a module's place
            return None
        owned = {
            storage: f"`{type(module).__name__}.{name}`"
            for module in self.modules
            for name, state in [*module.named_buffers(), *module.named_parameters()]
            for storage in _storages(state)
        }
        for storage in storages:
            real = self._closed_over.get(storage)
            for candidate in storages if real is None else _storages(real):
                if candidate in owned:
                    return owned[candidate]
            if real is not None:
                return f"a closed-over tensor of shape {tuple(real.shape)} and dtype {real.dtype}"
        return None


class _Calls(TorchFunctionMode):
    def __init__(self, observer: Observer):
        super().__init__()
        self._observer = observer

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        self._observer.note_call(func, args, kwargs)
        return func(*args, **kwargs)


class _Operators(TorchDispatchMode):
    def __init__(self, observer: Observer):
        super().__init__()
        self._observer = observer

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        self._observer.note_operator(func, args, kwargs)
        args, kwargs = self._observer.kept_apart(func, args, kwargs)
        return func(*args, **kwargs)


def _storages(tensor: torch.Tensor) -> set[int]:
    if tensor.layout is not torch.strided:
        return set()
    return {storage_id(tensor)}


def draws(fn: OpOverload, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether a random operator really draws: dropout of probability 0 and evaluation mode do not."""
    if fn._schema.name == "aten::_fused_sdp_choice":
        return False
    for position, argument in enumerate(fn._schema.arguments):
        value = kwargs.get(argument.name, args[position] if position < len(args) else argument.default_value)
        if argument.name in ("dropout_p", "dropout") and not value:
            return False
        if argument.name in ("train", "training") and value is False:
            return False
    return True


def written_tensors(fn: OpOverload, args: tuple, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The arguments that an operator writes to."""
    written = []
    for position, argument in enumerate(fn._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = kwargs.get(argument.name, args[position] if position < len(args) else None)
            written += [leaf for leaf in jax.tree.leaves(value) if isinstance(leaf, torch.Tensor)]
    training, positions = _UNDECLARED_WRITES.get(fn._schema.name, (0, ()))
    if positions and args[training]:
        written += [args[position] for position in positions if isinstance(args[position], torch.Tensor)]
    return written


def training_guards(modules: Sequence[torch.nn.Module]) -> tuple[tuple[weakref.ref, bool], ...]:
    """The modules a function called, each with its `training` flag: a plan holds while these are unchanged."""
    unique = {id(module): module for module in modules}
    return tuple((weakref.ref(module), module.training) for module in unique.values())
