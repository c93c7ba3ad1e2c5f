"""Torch functions of flat tensors: the parameters of the primitives, which the backends run.

A :class:`TorchFunction` takes and returns tensors of JAX's dtypes, and holds the types of both. The traced function
(:class:`TracedFunction`) is made from the user's function. The derived functions and captured graphs are other torch
functions. Two torch functions are equal if they compute the same from the same traced function, so two traces of one
program give the same program.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from . import _rng
from ._compat import TRACING
from ._dtypes import canonical_dtype, is_differentiable, numpy_dtype, torch_dtype
from ._pytree import flatten_output
from ._static import same_static
from ._torch_state import TorchState
from .errors import ArgumentError, DeviceError, OutputMismatchError

Tensors = tuple[torch.Tensor, ...]
SEQUENTIAL = "sequential vmap"  # key of the warning that the rows of a batch run one after another
_CPU = torch.device("cpu")


@dataclasses.dataclass(frozen=True)
class ArrayType:
    """Shape and JAX dtype of one flat argument or result."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def differentiable(self) -> bool:
        return is_differentiable(self.dtype)


class TorchFunction:
    """Function from flat tensors to a tuple of tensors, with known types."""

    in_types: tuple[ArrayType, ...]
    out_types: tuple[ArrayType, ...]

    @property
    def base(self) -> TracedFunction:
        """Return the traced function that this function is made from."""
        raise NotImplementedError

    @property
    def state(self) -> TorchState:
        """Return the torch settings under which this function runs."""
        raise NotImplementedError

    @property
    def order(self) -> int:
        """Return the number of nested derivatives in this function."""
        raise NotImplementedError

    def __call__(self, *tensors: torch.Tensor) -> Tensors:
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class OutputTree:
    """Structure of the result of a torch function: its pytree, and which leaves are arrays."""

    tree: Any
    array_positions: tuple[int, ...]
    statics: tuple[Any, ...]  # one entry for each leaf; for a leaf that is no array, its value, which depends on shapes
    order: Any = None  # see `key_order`: the insertion order of the result's dicts, if JAX's order is another

    def unflatten(self, arrays: Sequence[Any]) -> Any:
        """Build a result from its array leaves."""
        leaves = list(self.statics)
        for position, array in zip(self.array_positions, arrays, strict=True):
            leaves[position] = array
        if self.order is None:
            return self.tree.unflatten(leaves)
        structure, numbers = self.order
        return structure.unflatten([leaves[number] for number in numbers])


@dataclasses.dataclass(frozen=True)
class Effects:
    """Side effects of a function.

    Attributes:
        mutated: positions of the arguments that the function writes to.
        random_operator: an operator that draws random numbers, if any.
        launches: a Triton kernel that the function launches, if any.
        modules: weak references to the modules that the function calls.
    """

    mutated: tuple[int, ...] = ()
    random_operator: str | None = None
    launches: str | None = None
    modules: tuple[weakref.ref, ...] = ()


@dataclasses.dataclass(frozen=True)
class AutogradTraits:
    """Facts about a function's use of autograd.

    Attributes:
        switches_grad_mode: the function switches gradient recording on or off.
        inner_autograd: the function takes gradients inside.
        uses_data: the function reads `.data`, a detach that torch.func does not see.
        breaks_inner_graph: the function takes gradients inside, and never with `create_graph=True`.
        fused_norm: an operator that torch differentiates wrongly beyond the first derivative, if any.
        zero_tangent: an operator whose tangent torch's forward mode wrongly computes as 0, if any.
        runs_without_grad: the function gives the same result with gradient recording off, at less cost.
    """

    switches_grad_mode: bool = False
    inner_autograd: bool = False
    uses_data: bool = False
    breaks_inner_graph: bool = False
    fused_norm: str | None = None
    zero_tangent: str | None = None
    runs_without_grad: bool = False


@dataclasses.dataclass(frozen=True)
class FunctionTraits:
    """Facts about a function that its trace shows, besides its types.

    Attributes:
        effects: the side effects of the function.
        autograd: the function's use of autograd.
        operators: the number of operators that the function runs.
        custom_operator: an operator that is not torch's own, if any.
        unbatchable: an operator that torch.vmap computes wrongly, if any.
        untraceable: why the function cannot be traced on fake tensors; None if it can be.
        only_branches: the function is untraceable only because it reads values to branch on them or to assert something
            about them, so it can be translated.
        uses_default_dtype: the function may depend on torch's default dtype, so the traced function is valid for one
            default dtype only.
    """

    effects: Effects = Effects()
    autograd: AutogradTraits = AutogradTraits()
    operators: int = 0
    custom_operator: str | None = None
    unbatchable: str | None = None
    untraceable: str | None = None
    only_branches: bool = False
    uses_default_dtype: bool = True

    @property
    def untranslatable(self) -> str | None:
        """Return why the function cannot be translated, as far as its trace shows; None if no reason is known."""
        return None if self.only_branches else self.untraceable


@dataclasses.dataclass(eq=False, repr=False)
class TracedFunction(TorchFunction):
    """Record of the user's torch function for one signature, callable on flat tensors of JAX's dtypes."""

    name: str
    call: Callable[..., Any]  # takes only the array arguments, as tensors of torch's dtypes
    argument_names: tuple[str, ...]
    in_types: tuple[ArrayType, ...]  # of the arguments, then of `constants`, then of the seed
    in_torch_dtypes: tuple[torch.dtype, ...]  # of the arguments
    out_types: tuple[ArrayType, ...]
    out_tree: OutputTree
    trace_state: TorchState
    traits: FunctionTraits
    seeded: bool  # the last input is a seed
    return_mutated: bool
    residuals: str
    # Closed-over tensors that are inputs too, for backends that translate. A call of torch ignores these inputs.
    constants: tuple[torch.Tensor, ...] = ()
    graph: Any = None  # the captured graph, if there is one already
    notices: set[str] = dataclasses.field(default_factory=set)  # keys of the warnings already given
    guard: Any = None  # a `StateGuard`: restores the state that the function changes while it is traced
    trials: Sequence[Any] = ()  # the strategies tried to find the result types, for `explain`

    def __post_init__(self) -> None:
        self.constant_arrays: tuple[Any, ...] = ()  # the values of `constants` when the graph was captured
        if not self.traits.uses_default_dtype:
            self.trace_state = self.trace_state.for_any_default_dtype()
        self.symbolic: Any = None  # the program for symbolic sizes, if this record is of example sizes
        self.translations: dict[tuple[TorchFunction, bool, str], Any] = {}  # JAX programs, or the errors of translation
        self.sequential: set[TorchFunction] = set()  # batches that torch.vmap cannot run
        self.checked_graphs: set[tuple[int, ...]] = set()  # differentiated inputs whose autograd graph was examined
        self.verified = False  # the first result was compared with torch's
        self.reads_graph = False  # the function reads autograd's graph or adds hooks to it
        self.once_differentiable: str | None = None  # the name of an autograd.Function with no second derivative
        self.nonlinearities: dict[tuple[TorchFunction, tuple[int, ...]], str | None] = {}  # results of `nonlinearity`
        self.probed: set[TorchFunction] = set()  # batches that `probe_vmap` has examined
        self.double_reverse: set[TorchFunction] = set()  # JVPs that take two reverse modes
        self.differentiable_statistics = False  # running statistics are among the differentiated inputs
        self.splits: dict[Any, Any] = {}  # the results of `split`
        self.compiled: dict[Any, Any] = {}  # compiled programs of eager calls, see `run_now`
        self._copied = (
            tuple(range(len(self.in_torch_dtypes))) if self.traits.untraceable else self.traits.effects.mutated
        )
        self._cast = tuple(
            (i, dtype)
            for i, (dtype, type_) in enumerate(zip(self.in_torch_dtypes, self.in_types, strict=False))
            if torch_dtype(type_.dtype, self.argument_names[i]) is not dtype
        )
        self._locks = _locks_for(self.traits)
        self._out_dtypes = tuple(
            torch_dtype(type_.dtype, f"result {i} of `{self.name}`") for i, type_ in enumerate(self.out_types)
        )
        self._single = len(self.out_types) == 1 and self.out_tree.tree.num_nodes == 1
        self._plain = not (self._copied or self._cast or self._locks or self.seeded or self.traits.untraceable)
        # Whether `call` takes the tensors unchanged and returns a single tensor, so a backend may call it directly.
        self.direct = self._plain and self._single and not self.constants

    def __repr__(self) -> str:
        return self.name  # shown in a printed jaxpr

    @property
    def base(self) -> TracedFunction:
        return self

    @property
    def state(self) -> TorchState:
        state = self.trace_state
        return state.without_grad() if self.traits.autograd.runs_without_grad else state

    @property
    def order(self) -> int:
        return 0

    def guarded(self, look: Callable[[], Any]) -> Any:
        """Return the result of `look`, which traces this function or a derivative; restore the state it changes."""
        with TRACING, self.locked():
            return look() if self.guard is None else self.guard.run(look)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the locks of the modules that this function calls: another thread may have exchanged their parameters.

        The locks are taken after `TRACING` and before the lock of forward mode.
        """
        with contextlib.ExitStack() as stack:
            for lock in self._locks:
                stack.enter_context(lock)
            yield

    @property
    def first_constant(self) -> int:
        """Return the position of the first constant among the inputs."""
        return len(self.in_torch_dtypes)

    def __call__(self, *tensors: torch.Tensor) -> Tensors:
        if self.constants:
            first = self.first_constant
            tensors = (*tensors[:first], *tensors[first + len(self.constants) :])
        if self._plain:
            return self.checked(self.call(*tensors), tensors)
        return self._run(tensors, self.checked)

    def of_symbolic_sizes(self, *tensors: torch.Tensor) -> Tensors:
        """Run the function on tensors with symbolic sizes, without a check of the result shapes."""

        def cast(out: Any, inputs: Sequence[torch.Tensor]) -> Tensors:
            arrays = self._arrays(out, inputs)
            return tuple(x.to(dtype) for x, dtype in zip(arrays, self._out_dtypes, strict=True))

        return self._run(tensors, cast)

    def _run(self, tensors: Tensors, finish: Callable[[Any, Sequence[torch.Tensor]], Tensors]) -> Tensors:
        with contextlib.ExitStack() as stack:
            for lock in self._locks:
                stack.enter_context(lock)
            if self.seeded:
                stack.enter_context(_rng.seeded(tensors[-1]))
                tensors = tensors[:-1]
            elif self.traits.untranslatable:  # no trace has shown whether it draws
                stack.enter_context(_rng.refused(self.name))
            inputs = list(tensors)
            for i, dtype in self._cast:
                inputs[i] = inputs[i].to(dtype)
            for i in self._copied:
                inputs[i] = inputs[i].clone()
            return finish(self.call(*inputs), inputs)

    def is_expected(self, out: Any) -> bool:
        """Return whether a result of a `direct` function is a CPU tensor of the expected type, ready to copy out."""
        return (
            type(out) is torch.Tensor
            and out.is_cpu
            and out.dtype is self._out_dtypes[0]
            and out.shape == self.out_types[0].shape
        )

    def checked(self, out: Any, inputs: Sequence[torch.Tensor] = ()) -> Tensors:
        """Flatten a result, check it against the traced result, and cast it to JAX's dtypes."""
        device = inputs[0].device if inputs else _CPU
        if self._single and isinstance(out, torch.Tensor):
            return (self._checked(0, out, device),)
        return tuple(self._checked(i, array, device) for i, array in enumerate(self._arrays(out, inputs)))

    def _arrays(self, out: Any, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        arrays = self._array_leaves(*flatten_output(out))
        return arrays + [inputs[i] for i in self.traits.effects.mutated] if self.return_mutated else arrays

    def _array_leaves(self, leaves: list[Any], tree: Any) -> list[torch.Tensor]:
        expected = self.out_tree
        if tree != expected.tree:
            raise OutputMismatchError(
                f"`{self.name}` returned the tree {tree} but was traced with {expected.tree}. "
                "A function inside a JAX program must return the same tree for the same argument shapes."
            )
        positions = set(expected.array_positions)
        for i, (leaf, static) in enumerate(zip(leaves, expected.statics, strict=True)):
            if i not in positions and not same_static(leaf, static):
                raise OutputMismatchError(
                    f"`{self.name}` returned {leaf!r} where it returned {static!r} when it was traced. "
                    "Return it as a tensor if it depends on the values of the arguments."
                )
        return [as_tensor(leaves[i]) for i in expected.array_positions]

    def _checked(self, i: int, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        expected = self.out_types[i]
        if tensor.shape != expected.shape:
            raise OutputMismatchError(
                f"Result {i} of `{self.name}` has shape {tuple(tensor.shape)} but {expected.shape} was expected"
                f" for these arguments. Check `output_shapes=`, or what the shape depends on besides shapes."
            )
        if tensor.device != device and self.in_torch_dtypes:
            raise DeviceError(
                f"Result {i} of `{self.name}` lies on device `{tensor.device}`, but its arguments are on `{device}`. "
                "Make tensors inside the function on the device of its arguments (`device=x.device`)."
            )
        wanted = self._out_dtypes[i]
        if tensor.dtype is wanted:
            return tensor
        if canonical_dtype(numpy_dtype(tensor.dtype, f"Result {i} of `{self.name}`")) != expected.dtype:
            raise OutputMismatchError(
                f"Result {i} of `{self.name}` has dtype {tensor.dtype} but {wanted} was expected for these "
                "arguments. Check `output_shapes=`, or what the dtype depends on besides dtypes."
            )
        return tensor.to(wanted)


_MODULE_LOCKS: weakref.WeakKeyDictionary[torch.nn.Module, threading.RLock] = weakref.WeakKeyDictionary()


def _locks_for(traits: FunctionTraits) -> tuple[Any, ...]:
    """Return the locks of the modules that a function calls, in a fixed order.

    XLA runs calls of several devices at once, and torch.func.functional_call exchanges a module's parameters in place
    while it runs. A function that calls no module takes no lock.
    """
    return module_locks([module for ref in traits.effects.modules if (module := ref()) is not None])


def module_locks(modules: Sequence[torch.nn.Module]) -> tuple[Any, ...]:
    """Return the locks of the outermost modules: the modules that are not part of another one in `modules`."""
    children = {id(child) for module in modules for child in module.modules() if child is not module}
    roots = sorted((module for module in modules if id(module) not in children), key=id)
    return tuple(_MODULE_LOCKS.setdefault(module, threading.RLock()) for module in roots)


def is_array_leaf(leaf: Any, untraceable: bool) -> bool:
    """Return whether an output leaf becomes a JAX array.

    A Python number that a traceable function returns depends on shapes alone and stays a number. A Python number that
    an untraceable function returns may depend on the data and becomes an array.
    """
    if isinstance(leaf, torch.Tensor | np.ndarray | np.generic):
        return True
    return untraceable and isinstance(leaf, bool | int | float | complex)


def as_tensor(leaf: Any) -> torch.Tensor:
    """Return an output leaf as a tensor; convert NumPy arrays and Python numbers."""
    if isinstance(leaf, torch.Tensor):
        if leaf.layout is not torch.strided:
            raise ArgumentError(
                f"A result has layout {leaf.layout}, which JAX does not have. Return `.to_dense()` of it."
            )
        return leaf
    if isinstance(leaf, bool):
        return torch.tensor(leaf)
    if isinstance(leaf, float | complex):
        return torch.tensor(leaf, dtype=torch.complex128 if isinstance(leaf, complex) else torch.float64)
    return torch.as_tensor(leaf)
