"""From a torch function and the types of its arguments to its result types and behaviour.

First on fake tensors, where nothing is computed. A function that reads values (``.item()``, NumPy, branches on data)
cannot be traced so: it is opaque, and runs once on zeros instead, unless its output shapes are given.
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from jtbridge import _rng
from jtbridge._compat import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode, tracing
from jtbridge._dtypes import canonical_dtype, numpy_dtype
from jtbridge._flat import ArrayType, Behaviour, OutputTree, as_tensor, is_array_leaf
from jtbridge._pytree import flatten_output
from jtbridge._torch_state import TorchState, version_of
from jtbridge.errors import (
    DataDependentShapeError,
    DeviceError,
    JtbridgeError,
    MutationError,
    OutputMismatchError,
    RandomnessError,
    ShapeInferenceError,
)
from jtbridge.launches import DeferredNumber, deferring_numbers, routed

from ._branches import Answering, Decisions, only_way
from ._closed_over import may_be_on_gpu
from ._known import Known
from ._observe import Observer, training_guards
from ._replaced import Replaced
from ._trace import line_of


@dataclasses.dataclass(frozen=True)
class Inference:
    """What one look at a function tells."""

    out_types: tuple[ArrayType, ...]
    out_tree: OutputTree
    behaviour: Behaviour


@dataclasses.dataclass(frozen=True)
class Request:
    """One function and signature to look at."""

    name: str
    call: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    state: TorchState
    seeded: bool
    ordered: bool  # side effects are wanted: drawing and writing to closed-over state are allowed
    output_shapes: Any | None
    device: str = "cpu"  # the type of the devices that what it closes over lies on


def infer(request: Request) -> Inference:
    """Find the result types of a function, and what else it does.

    Raises:
        DataDependentShapeError: the output shape depends on values and `output_shapes` was not given.
        ShapeInferenceError: it can neither be traced nor run on zeros.
        RandomnessError: it draws without a key.
        MutationError: it writes to a closed-over tensor.
    """
    if request.ordered and request.output_shapes is not None:  # every look at it has its effects
        return _as_declared(request.output_shapes, "its side effects are wanted, and its output shapes are given")
    request = _at_home(request, request.device)
    try:
        request, ((leaves, tree), observer, without_grad) = _traced(request)
    except (JtbridgeError, KeyboardInterrupt):
        raise
    except Exception as error:  # noqa: BLE001  (tracing fails in many ways, and running decides)
        return _infer_checking(request, error) or _infer_opaque(request, error)
    out_tree, out_types = _output_types(request, leaves, tree, opaque=False)
    if request.output_shapes is not None:
        declared_types, _ = _declared(request.output_shapes)
        if declared_types != out_types:
            raise OutputMismatchError(
                f"`output_shapes` of `{request.name}` declares {_show(declared_types)}, "
                f"but for these arguments it returns {_show(out_types)}. Leave `output_shapes` out, or correct it."
            )
    behaviour = _behaviour(request, observer, _not_in_a_graph(observer), without_grad)
    only_checks = observer.asserts and not observer.sets_data
    return Inference(out_types, out_tree, dataclasses.replace(behaviour, only_checks=only_checks))


def _not_in_a_graph(observer: Observer) -> str | None:
    if observer.sets_data:
        return "it assigns to `.data`, which a graph does not show"
    return "it asserts something about values of tensors, which a graph may leave out" if observer.asserts else None


def _at_home(request: Request, device: str) -> Request:
    """On a device, where new tensors go too unless the function was made under another default."""
    if device == "cpu" or request.state.device is not None:
        return dataclasses.replace(request, device=device)
    state = dataclasses.replace(request.state, device=torch.device(device))
    return dataclasses.replace(request, device=device, state=state)


def _traced(request: Request) -> tuple[Request, tuple[Any, Observer, bool]]:
    """On the CPU, or on a GPU where the function makes tensors of its own there."""
    try:
        return request, _trace(request)
    except Exception:
        if request.device != "cpu" or not may_be_on_gpu():
            raise
        elsewhere = _at_home(request, "cuda")
        with contextlib.suppress(Exception):
            return elsewhere, _trace(elsewhere)
        raise


def _trace(request: Request) -> tuple[Any, Observer, bool]:
    """Run on fake tensors; once more without gradients if closed-over weights would record a graph."""
    try:
        out, observer = deferring_numbers(lambda: _trace_once(request, request.state))
    except (DynamicOutputShapeException, DataDependentOutputException):
        out, observer = _trace_with_replacements(request)
    if not (request.state.grad and _records_graph(out)):
        return out, observer, False
    try:
        again, _ = deferring_numbers(lambda: _trace_once(request, request.state.without_grad()))
    except Exception:  # noqa: BLE001  (it differentiates inside: recording stays on)
        return out, observer, False
    return out, observer, _same_types(out, again)


def _trace_with_replacements(request: Request, decisions: Decisions | None = None) -> tuple[Any, Observer]:
    """Run on fake tensors, with functions of ours for what has no shape in torch's own way: ctc_loss, x[i]."""
    with Replaced():
        return _trace_once(request, request.state, decisions)


def _trace_once(request: Request, state: TorchState, decisions: Decisions | None = None) -> tuple[Any, Observer]:
    """Run on fake tensors: the leaves and the tree of the result, of which only types count, and what was observed."""
    # Nothing is known of what a function with side effects keeps: it may be something else in the next call.
    known = Known(answers=not request.ordered)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as known.mode, tracing(), state.applied():
            inputs = [
                torch.empty(shape, dtype=dtype, device=request.device)
                for shape, dtype in zip(request.shapes, request.dtypes, strict=True)
            ]
            observer = Observer(inputs, known.mode, _write_refusal(request))
            answering = contextlib.nullcontext() if decisions is None else Answering(decisions)
            with observer.watching(), routed() as observer.launches, answering, known:
                leaves, tree = flatten_output(request.call(*inputs))
        leaves = [_type_of(leaf) for leaf in leaves]
    finally:
        known.settle()
    observer.read = known.read
    for number, leaf in enumerate(leaves):
        if isinstance(leaf, DeferredNumber):
            raise DataDependentOutputException(torch.ops.aten._local_scalar_dense.default)
        if isinstance(leaf, torch.Tensor) and leaf.device.type != request.device:
            raise DeviceError(
                f"Result {number} of `{request.name}` lies on device `{leaf.device}`, but its arguments are on "
                f"`{request.device}`. Make tensors inside the function on the device of its arguments "
                "(`device=x.device`)."
            )
    return (leaves, tree), observer


def _type_of(leaf: Any) -> Any:
    """A tensor of the same type, which belongs to no graph; anything else as it is."""
    if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided:
        return leaf
    with FakeTensorMode():
        made = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device)
    return made.requires_grad_(leaf.requires_grad)


def _infer_checking(request: Request, cause: Exception) -> Inference | None:
    """For a function that needs the values of tensors only to raise if they are wrong; None if that is not all."""
    if not isinstance(cause, DataDependentOutputException):
        return None
    try:
        (leaves, tree), observer = only_way(lambda decisions: _trace_with_replacements(request, decisions))
    except Exception:  # noqa: BLE001  (then it is opaque, and running decides)
        return None
    if observer.inner_autograd:  # whose graphs are looked at where there are some
        return None
    out_tree, out_types = _output_types(request, leaves, tree, opaque=True)
    behaviour = _behaviour(request, observer, _reason(cause), False)
    return Inference(out_types, out_tree, dataclasses.replace(behaviour, only_checks=True))


def _infer_opaque(request: Request, cause: Exception) -> Inference:
    reason = _reason(cause)
    if request.output_shapes is not None:
        return _as_declared(request.output_shapes, reason)
    if isinstance(cause, DynamicOutputShapeException):
        raise DataDependentShapeError(
            f"The output shape of `{request.name}` depends on the values of its arguments (operator "
            f"{cause.args[0] if cause.args else 'unknown'}), and a JAX program needs it before it runs. Pad to a "
            "fixed size inside the function, or pass `output_shapes=` if you know the shape."
        ) from cause
    try:
        with _rng.preserved_state(), request.state.applied():
            types = zip(request.shapes, request.dtypes, strict=True)
            inputs = [torch.zeros(shape, dtype=dtype, device=request.device) for shape, dtype in types]
            observer = Observer(inputs, None, _refuse_write_of_zeros(request) or _write_refusal(request))
            with observer.watching(), routed() as observer.launches:
                out = request.call(*inputs)
    except JtbridgeError:
        raise
    except Exception as error:
        if type(error) is type(cause):  # a plain mistake in the function or its arguments
            error.add_note(f"(raised while finding the output shapes of `{request.name}`)")
            raise
        raise ShapeInferenceError(
            f"No output shapes could be inferred for `{request.name}`: on fake tensors it raised "
            f"{type(cause).__name__}: {reason}; run on zeros it raised {type(error).__name__}: "
            f"{_first_line(error)}. Pass `output_shapes=`, a tree of `jax.ShapeDtypeStruct`."
        ) from error
    leaves, tree = flatten_output(out)
    out_tree, out_types = _output_types(request, leaves, tree, opaque=True)
    return Inference(out_types, out_tree, _behaviour(request, observer, reason, False))


def _as_declared(output_shapes: Any, reason: str) -> Inference:
    """What is known of a function that is not looked at."""
    out_types, tree = _declared(output_shapes)
    positions = tuple(range(len(out_types)))
    return Inference(out_types, OutputTree(tree, positions, (None,) * len(out_types)), Behaviour(opaque=reason))


def _refuse_write_of_zeros(request: Request) -> Callable[[str], NoReturn] | None:
    """What to do when a function that may write to what it closes over does so in the run on zeros."""
    if not request.ordered:
        return None

    def refuse(written_to: str) -> NoReturn:
        raise ShapeInferenceError(
            f"`{request.name}` keeps state in {written_to} and needs values of tensors, so its output shapes cannot "
            "be found without spoiling that state. Pass `output_shapes=`, a tree of `jax.ShapeDtypeStruct`."
        )

    return refuse


def _write_refusal(request: Request) -> Callable[[str], NoReturn] | None:
    """What to do when a function writes to a tensor that it closes over: raise, unless side effects are wanted."""
    if request.ordered:
        return None

    def refuse(written_to: str) -> NoReturn:
        raise MutationError(
            f"`{request.name}` writes to {written_to}, which is not one of its arguments; in a JAX program nobody "
            "could tell when or how often. Pass it as an argument and use `return_mutated=True`, call `.eval()` on the "
            'module if it keeps running statistics, or wrap with `effects="ordered"`.'
        )

    return refuse


def _behaviour(request: Request, observer: Observer, opaque: str | None, without_grad: bool) -> Behaviour:
    if not request.ordered:
        if observer.own_generator:
            raise RandomnessError(
                f"`{request.name}` draws from a torch.Generator of its own ({observer.random_operator}), whose state "
                "a JAX program cannot carry. Draw from torch's default generator and pass a JAX key as `rng=`."
            )
        if observer.random_operator is not None and not request.seeded:
            raise RandomnessError(_rng.without_key(request.name, observer.random_operator))
    return Behaviour(
        mutated=observer.mutated_inputs(),
        random_operator=observer.random_operator,
        operators=observer.operators,
        switches_grad_mode=observer.switches_grad_mode,
        inner_autograd=observer.inner_autograd,
        uses_data=observer.uses_data,
        breaks_inner_graph=observer.inner_autograd and not observer.keeps_inner_graph,
        custom_operator=observer.custom_operator,
        unbatchable=observer.unbatchable,
        fused_norm=observer.fused_norm,
        opaque=opaque,
        launches=next(iter([*observer.launches, *observer.operators_of_kernels]), None),
        runs_without_grad=without_grad,
        guards=training_guards(observer.modules),
        read=tuple((weakref.ref(tensor), version_of(tensor)) for tensor in observer.read),
    )


def _output_types(
    request: Request, leaves: Sequence[Any], tree: Any, opaque: bool
) -> tuple[OutputTree, tuple[ArrayType, ...]]:
    positions = tuple(i for i, leaf in enumerate(leaves) if is_array_leaf(leaf, opaque))
    types = []
    for number, position in enumerate(positions):
        tensor = as_tensor(leaves[position])
        dtype = numpy_dtype(tensor.dtype, f"Result {number} of `{request.name}`")
        types.append(ArrayType(tuple(tensor.shape), canonical_dtype(dtype)))
    statics = tuple(None if i in positions else leaf for i, leaf in enumerate(leaves))
    return OutputTree(tree, positions, statics), tuple(types)


def _declared(output_shapes: Any) -> tuple[tuple[ArrayType, ...], Any]:
    leaves, tree = flatten_output(output_shapes)
    for leaf in leaves:
        if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
            raise ShapeInferenceError(
                f"`output_shapes` must be a tree of `jax.ShapeDtypeStruct` (or arrays), but holds {leaf!r}."
            )
    return tuple(ArrayType(tuple(x.shape), canonical_dtype(x.dtype)) for x in leaves), tree


def _records_graph(out: Any) -> bool:
    leaves, _ = out
    return any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves)


def _same_types(a: Any, b: Any) -> bool:
    def types(out: Any) -> Any:
        leaves, tree = out
        return tree, [(x.shape, x.dtype) if isinstance(x, torch.Tensor) else x for x in leaves]

    return types(a) == types(b)


def _reason(cause: Exception) -> str:
    """Why a function could not be traced, and where in the user's code."""
    operator = str(cause.args[0]) if isinstance(cause, DataDependentOutputException) and cause.args else ""
    line = line_of(cause)
    text = f"it needs the values of tensors (operator `{operator}`)" if operator else _first_line(cause)
    return f"{text} ({line})" if line else text


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _show(types: Sequence[ArrayType]) -> str:
    return "(" + ", ".join(f"{t.dtype}{list(t.shape)}" for t in types) + ")"
