"""Torch functions of flat tensors: the parameters of the primitives, which the backends run.

A :class:`TorchFunction` takes and returns tensors of JAX's dtypes, and holds the types of both. The traced function
(:class:`TracedFunction`) is made from the user's function. The derived functions and captured graphs are other torch
functions. Two torch functions are equal if they compute the same from the same traced function, so two traces of one
program give the same program.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import jax.core
import torch

from jtbridge._compat import TRACING, run_outside_transforms, writes
from jtbridge.errors import DeviceError, MutationError, OutputMismatchError

from . import random_numbers
from .array_types import ArrayType, OutputTree, Tensors, as_tensor
from .dtypes import canonical_dtype, numpy_dtype, torch_dtype
from .leaf_arguments import LeafArgumentsMode
from .module_locks import locks_for
from .pytree import flatten_output
from .static import same_static
from .torch_state import TorchState
from .traits import FunctionTraits

SEQUENTIAL = "sequential vmap"  # key of the warning that the rows of a batch run one after another
_CPU = torch.device("cpu")


class TorchFunction:
    """Function from flat tensors to a tuple of tensors, with known types."""

    in_types: tuple[ArrayType, ...]
    out_types: tuple[ArrayType, ...]

    @property
    def names_devices(self) -> bool:
        """Return whether the function is known to make no tensor on torch's default device."""
        return False

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


@dataclasses.dataclass(eq=False)
class TraceCache:
    """Results that a traced function stores, so that nothing is examined, translated or compiled twice.

    Attributes:
        translations: JAX programs, or the errors of translation, by function, use of kernels, matmul precision, and
            whether choices may have been tuned.
        compiled: compiled programs of eager calls, see `run_now`.
        splits: the results of `split`.
        cut_backwards: the results of `without_cotangents`, by backward and inputs.
        probed: the batches that `probe_vmap` has examined.
        sequential: the batches that torch.vmap cannot run.
        checked_graphs: the differentiated inputs whose autograd graph was examined.
        nonlinear_reasons: the results of `nonlinear_reason`.
        double_reverse: the JVPs that are computed by two reverse modes because forward mode fails.
        reads_graph: whether the function reads autograd's graph or adds hooks to it.
        once_differentiable: the name of an autograd.Function without a second derivative, if the function uses one.
        differentiable_statistics: whether running statistics are among the differentiated inputs.
        verified: whether the first result was compared with torch's.
    """

    translations: dict[tuple[TorchFunction, bool | frozenset[str], str, bool], Any] = dataclasses.field(
        default_factory=dict
    )
    compiled: dict[Any, Any] = dataclasses.field(default_factory=dict)
    splits: dict[Any, Any] = dataclasses.field(default_factory=dict)
    cut_backwards: dict[Any, Any] = dataclasses.field(default_factory=dict)
    probed: set[TorchFunction] = dataclasses.field(default_factory=set)
    sequential: set[TorchFunction] = dataclasses.field(default_factory=set)
    checked_graphs: set[tuple[int, ...]] = dataclasses.field(default_factory=set)
    nonlinear_reasons: dict[tuple[TorchFunction, tuple[int, ...]], str | None] = dataclasses.field(default_factory=dict)
    double_reverse: set[TorchFunction] = dataclasses.field(default_factory=set)
    reads_graph: bool = False
    once_differentiable: str | None = None
    differentiable_statistics: bool = False
    verified: bool = False


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
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
    repeated_blocks: str = "inline"  # how equal blocks of its graphs are translated
    # Which nodes torch may run inside its translated programs. "never": no nodes; "needed": nodes without a lowering;
    # "faster": nodes that torch runs faster than XLA; "auto": both.
    islands: str = "never"
    # The type of the device for which its called graphs are captured, because graphs differ between devices. With
    # ordered effects: the type of the device on which the function runs.
    device: str = "cpu"
    # Closed-over tensors that are inputs too, for backends that translate. A call of torch ignores these inputs.
    constants: tuple[torch.Tensor, ...] = ()
    graph: Any = None  # the captured graph, if there is one already
    batched: tuple[int, ...] = ()  # inputs whose first axis is a batch of independent rows; all results have it then
    fuses_chains: bool = False  # whether chains of operators in its graphs become fused operators, for kernels
    warnings_given: set[str] = dataclasses.field(default_factory=set)  # keys of the warnings already given
    guard: Any = None  # a `StateGuard`: restores the state that the function changes while it is traced
    trials: Sequence[Any] = ()  # the strategies tried to find the result types, for `explain`

    constant_arrays: tuple[Any, ...] = ()  # the values of `constants` when the graph was captured
    symbolic: Any = None  # the program for symbolic sizes, if this record is of example sizes
    cache: TraceCache = dataclasses.field(default_factory=TraceCache, init=False)

    @functools.cached_property
    def _copied(self) -> tuple[int, ...]:
        """The positions of the arguments that are copied before each run, because the function may write to them."""
        return (
            tuple(range(len(self.in_torch_dtypes))) if self.traits.untraceable_reason else self.traits.effects.mutated
        )

    @functools.cached_property
    def _cast(self) -> tuple[tuple[int, torch.dtype], ...]:
        """The positions of the arguments that the function gets in another dtype, with that dtype."""
        return tuple(
            (i, dtype)
            for i, (dtype, type_) in enumerate(zip(self.in_torch_dtypes, self.in_types, strict=False))
            if torch_dtype(type_.dtype, self.argument_names[i]) is not dtype
        )

    @functools.cached_property
    def _locks(self) -> tuple[Any, ...]:
        return locks_for(self.traits)

    @functools.cached_property
    def _out_dtypes(self) -> tuple[torch.dtype, ...]:
        return tuple(torch_dtype(type_.dtype, f"result {i} of `{self.name}`") for i, type_ in enumerate(self.out_types))

    @functools.cached_property
    def _single(self) -> bool:
        """Whether the function returns a single tensor."""
        return len(self.out_types) == 1 and self.out_tree.tree.num_nodes == 1

    @functools.cached_property
    def _plain(self) -> bool:
        """Whether `call` takes the tensors unchanged."""
        traits = self.traits
        changes = self._copied or self._cast or self._locks or self.seeded
        return not (changes or traits.untraceable_reason or traits.autograd.inner_autograd)

    @functools.cached_property
    def direct(self) -> bool:
        """Whether `call` takes the tensors unchanged and returns a single tensor, so a backend may call it directly."""
        return self._plain and self._single and not self.constants and not self.traits.custom_operator

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

    @run_outside_transforms
    def guarded(self, trace: Callable[[], Any], *, of_trace: bool = False, examines: bool = False) -> Any:
        """Return the result of `trace`, which traces this function or a derivative; restore the state that it changes.

        With `of_trace`, `trace` sees the state with which this function was traced. A translated derivative may be
        traced much later, and must be the derivative of the translated function. A called function reads state when it
        runs. With `examines`, `trace` only finds facts about the function, and a change of state is no error.
        """
        with TRACING, self.locked():
            if self.guard is None:
                return trace()
            with self.guard.remembered_state() if of_trace else contextlib.nullcontext():
                return self.guard.run(trace, examines=examines)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the locks of the modules that this function calls: another thread may be exchanging their parameters.

        The locks are taken after `TRACING` and before `FORWARD_MODE`, which is held too if the function uses it.
        """
        with contextlib.ExitStack() as stack:
            for lock in self._locks:
                stack.enter_context(lock)
            yield

    @property
    def untranslatable_reason(self) -> str | None:
        """Return why no graph of this function can be translated, as far as its trace shows; None if it may be."""
        needs_regions = self.traits.has_dynamic_sizes and self.islands != "needed"
        return self.traits.untraceable_reason if needs_regions else self.traits.untranslatable_reason

    @property
    def first_constant(self) -> int:
        """Return the position of the first constant among the inputs."""
        return len(self.in_torch_dtypes)

    @property
    def seed_position(self) -> int | None:
        """Return the position of the seed among the arguments, the same in every derivative; None without a seed."""
        return len(self.in_types) - 1 if self.seeded else None

    def __call__(self, *tensors: torch.Tensor) -> Tensors:
        if self.constants:
            first = self.first_constant
            tensors = (*tensors[:first], *tensors[first + len(self.constants) :])
        if self._plain and not self.cache.reads_graph:
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
                stack.enter_context(random_numbers.seeded(tensors[-1]))
                tensors = tensors[:-1]
            elif self.traits.untranslatable_reason:  # no trace has shown whether it draws
                stack.enter_context(random_numbers.refused(self.name))
            inputs = list(tensors)
            for i, dtype in self._cast:
                inputs[i] = inputs[i].to(dtype)
            for i in self._copied:
                inputs[i] = inputs[i].clone()
            before = [writes(tensor) for tensor in inputs] if self._may_write_more else []
            if (self.traits.autograd.inner_autograd or self.cache.reads_graph) and torch.is_grad_enabled():
                stack.enter_context(LeafArgumentsMode(inputs))
            out = self.call(*inputs)
            for i, count in enumerate(before):
                if i not in self.traits.effects.mutated and writes(inputs[i]) != count:
                    self._refuse_write(i)
            return finish(out, inputs)

    @property
    def _may_write_more(self) -> bool:
        """Return whether a run may write to, and must return, arguments that no run on example values wrote to."""
        return self.return_mutated and self.traits.untraceable_reason is not None

    def _refuse_write(self, position: int) -> NoReturn:
        name = self.argument_names[position]
        raise MutationError(
            f"`{self.name}` writes to its argument `{name}` for these values, and did not for example values, so the "
            "program cannot return it. Write to it for all values (`torch.where`), or return the new value as a "
            "result. (With `output_shapes=` no example values are tried.)"
        )

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
            if i in positions or same_static(leaf, static):
                continue
            if isinstance(leaf, jax.core.Tracer):
                raise OutputMismatchError(
                    f"`{self.name}` returned an array that it made with JAX while JAX traced it: {leaf!r}. Make it "
                    "with torch, or call the JAX function through `jtbridge.to_torch_function`."
                )
            raise _other_constant_error(self.name, leaf, static)
        return [as_tensor(leaves[i]) for i in expected.array_positions]

    def _checked(self, i: int, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        expected = self.out_types[i]
        if tensor.shape != expected.shape and i >= len(self.out_tree.array_positions):
            written = self.argument_names[self.traits.effects.mutated[i - len(self.out_tree.array_positions)]]
            raise OutputMismatchError(
                f"`{self.name}` left its argument `{written}` with the shape {tuple(tensor.shape)} instead of "
                f"{expected.shape}, the shape in its trace. With `return_mutated=True` that shape may not depend on "
                "values: return the tensor instead of changing its shape in place."
            )
        if tensor.shape != expected.shape:
            raise OutputMismatchError(
                f"Result {i} of `{self.name}` has shape {tuple(tensor.shape)} but {expected.shape} was expected"
                " for these arguments. Correct `output_shapes=`, or let the shape depend on the arguments' shapes "
                "alone, and not on their values or on `requires_grad`. If an integer argument, or one in the `state` "
                "of a module, gives a size, close over it, so that its value is known when JAX traces."
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
                "arguments. Correct `output_shapes=`, or make the dtype depend on the dtypes of the arguments alone."
            )
        return tensor.to(wanted)


def _other_constant_error(name: str, now: Any, traced: Any) -> OutputMismatchError:
    """Return the error for a result that is a constant of the program, and is another object than in the trace."""
    if repr(now) == repr(traced):
        return OutputMismatchError(
            f"`{name}` returned {now!r}, of the type `{type(now).__name__}`, which JAX does not know. In a JAX program "
            "it would be a constant, but each trace makes another one. Return its tensors in a dict, a list or a "
            "tuple, or register the type as a pytree node with JAX."
        )
    return OutputMismatchError(
        f"`{name}` returned {now!r} where it returned {traced!r} when it was traced. "
        "Return it as a tensor if it depends on the values of the arguments."
    )
