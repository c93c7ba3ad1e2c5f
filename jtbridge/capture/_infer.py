"""From a torch function and the types of its arguments to its result types and behaviour.

First on fake tensors, where nothing is computed. A function that reads values (``.item()``, NumPy, branches on data)
or makes tensors whose sizes depend on data cannot be traced so: it is opaque. It is traced with symbols in the place of
these sizes and values (``_unbacked.py``). Where that is not possible either, it runs on several example arguments,
unless its output shapes are given.
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from jtbridge import _rng
from jtbridge._compat import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    asked_whether_fake,
    forget_tensors,
    taken_for_fake,
    tracing,
)
from jtbridge._declared import check_declared, declared_types, wrong_declaration
from jtbridge._dtypes import canonical_dtype, numpy_dtype
from jtbridge._flat import ArrayType, Behaviour, OutputTree, as_tensor, is_array_leaf
from jtbridge._pytree import flatten_output, key_order
from jtbridge._torch_state import TorchState
from jtbridge.errors import (
    DeviceError,
    JtbridgeError,
    MutationError,
    RandomnessError,
    ShapeInferenceError,
)
from jtbridge.state import NO_GUARD, StateGuard, WrittenValues, start_over
from jtbridge.triton import intercepted_launches
from jtbridge.triton.launches import LateScalar, with_late_scalars

from ._branches import Answering, Decisions, only_way
from ._caught import MOST_PLACES, RaisingAt
from ._closed_over import may_be_on_gpu
from ._dependent import DependentTensor, Outcome, agreed, are_possible, without_empty_sizes
from ._examples import example_arguments
from ._exceptions import none_caught
from ._fused_lstm import WithoutFusedLstm
from ._known import Known
from ._observe import Observer
from ._replaced import CopiedTensors, Replaced
from ._trace import line_of
from ._unbacked import PathTrace, explored


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
    guard: StateGuard = NO_GUARD  # puts back what running it changes


def infer(request: Request) -> Inference:
    """Find the result types of a function, and what else it does.

    Raises:
        DataDependentShapeError: the output shape depends on values and `output_shapes` was not given.
        OutputMismatchError: `output_shapes` was given and is wrong.
        ShapeInferenceError: it can neither be traced nor run on example arguments.
        RandomnessError: it draws without a key.
        MutationError: it writes to a closed-over tensor.
    """
    if request.ordered and request.output_shapes is not None:  # every look at it has its effects
        return _as_declared(request.output_shapes, "its side effects are wanted, and its output shapes are given")
    request = _at_home(request, request.device)
    asked_whether_fake()
    try:
        given = request
        request, ((leaves, tree), observer, without_grad) = request.guard.run(lambda: _traced(given))
    except (JtbridgeError, KeyboardInterrupt):
        raise
    except Exception as error:  # noqa: BLE001  (tracing fails in many ways, and running decides)
        return _infer_checking(request, error) or _infer_dependent(request, error) or _infer_opaque(request, error)
    out_tree, out_types = _output_types(request, leaves, tree, observer.result_order, opaque=False)
    if request.output_shapes is not None:
        check_declared(declared_types(request.output_shapes)[0], out_types, request.name)
    is_asked = asked_whether_fake()
    reason = _not_in_a_graph(observer) or _depends_on_what_torch_raises(request, observer)
    if reason is None and is_asked and _differs_if_fake(request):
        reason = "its model (of transformers) computes something else when it is traced"
    behaviour = _behaviour(request, observer, reason, without_grad)
    only_checks = observer.asserts and not observer.sets_data and not observer.own_generator
    return Inference(out_types, out_tree, dataclasses.replace(behaviour, only_checks=only_checks))


def _not_in_a_graph(observer: Observer) -> str | None:
    if observer.sets_data:
        return "it assigns to `.data`, which a graph does not show"
    if observer.own_generator:
        return f"it draws from a torch.Generator of its own ({observer.own_generator})"
    return "it asserts something about values of tensors, which a graph may leave out" if observer.asserts else None


def _depends_on_what_torch_raises(request: Request, observer: Observer) -> str | None:
    """Why a function cannot be traced that goes on after an exception which torch raises for some values; or None."""
    if request.ordered:
        return None
    for place in list(observer.may_raise)[:MOST_PLACES]:
        raising = RaisingAt(place, request.call)
        with contextlib.suppress(Exception):
            attempt = dataclasses.replace(request, call=raising.run)
            request.guard.run(lambda attempt=attempt: _trace_once(attempt, request.state))
        if raising.caught:
            return f"it catches what torch raises for some values ({place})"
    return None


def _differs_if_fake(request: Request) -> bool:
    """Whether a model that asks whether its tensors are fake gives other results if they are, on example arguments."""
    if request.ordered:
        return False
    for inputs in example_arguments(request.shapes, request.dtypes, request.device):
        found = []
        for around in (contextlib.nullcontext(), taken_for_fake()):
            try:
                with around:
                    out, _ = request.guard.run(lambda inputs=inputs: _run_on_values(request, inputs))
            except JtbridgeError:
                raise
            except Exception:  # noqa: BLE001  (not every function takes such arguments)
                break
            found.append([leaf for leaf in flatten_output(out)[0] if isinstance(leaf, torch.Tensor)])
        if len(found) == 2 and not all(map(_nearly_equal, *found)):
            return True
    return False


def _nearly_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two results differ by rounding alone."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not (a.is_floating_point() or a.is_complex()):
        return torch.equal(a, b)
    allowed = max(1e-4, 30 * torch.finfo(a.dtype).eps)
    a, b = a.detach(), b.detach()
    scale = float(a[a.isfinite()].abs().max()) if bool(a.isfinite().any()) else 1.0
    return torch.allclose(a, b, rtol=allowed, atol=allowed * scale, equal_nan=True)


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
        out, observer = with_late_scalars(lambda: _trace_once(request, request.state))
    except (DynamicOutputShapeException, DataDependentOutputException):
        out, observer = _trace_with_replacements(request)
    if not (request.state.grad and _records_graph(out)):
        return out, observer, False
    try:
        again, watched = with_late_scalars(lambda: _trace_once(request, request.state.without_grad(), start=False))
    except Exception:  # noqa: BLE001  (it differentiates inside: recording stays on)
        return out, observer, False
    return out, observer, _same_types(out, again) and watched.calls == observer.calls


def _trace_with_replacements(request: Request, decisions: Decisions | None = None) -> tuple[Any, Observer]:
    """Run on fake tensors, with functions of ours for what has no shape in torch's own way: ctc_loss, x[i]."""
    with Replaced():
        return _trace_once(request, request.state, decisions)


def _trace_once(
    request: Request,
    state: TorchState,
    decisions: Decisions | None = None,
    *,
    path: PathTrace | None = None,
    start: bool = True,
) -> tuple[Any, Observer]:
    """Run on fake tensors: the leaves and the tree of the result, of which only types count, and what was observed.

    With `path`, sizes and values that depend on data are symbols. With `start` it runs from the state that the function
    had, else from that which an earlier attempt left.
    """
    # Nothing is known of what a function with side effects keeps: it may be something else in the next call.
    known = Known(answers=not request.ordered)
    if start:
        start_over()
    mode = FakeTensorMode(allow_non_fake_inputs=True) if path is None else path.mode
    try:
        with mode as known.mode, tracing(), _rng.tracing(), state.applied():
            inputs = [
                torch.empty(shape, dtype=dtype, device=request.device)
                for shape, dtype in zip(request.shapes, request.dtypes, strict=True)
            ]
            observer = Observer(inputs, known.mode, _write_refusal(request))
            answering = contextlib.nullcontext() if decisions is None else Answering(decisions)
            following = contextlib.nullcontext() if path is None else path.watching()
            with (
                WithoutFusedLstm(only_with_projections=True),
                observer.watching(),
                intercepted_launches() as observer.launches,
                answering,
                following,
                known,
                CopiedTensors(),
                none_caught(),
            ):
                out = request.call(*inputs)
                leaves, tree = flatten_output(out)
                observer.calls.add_results(leaves)
                observer.result_order = key_order(out)
        leaves = [_type_of(leaf) if path is None else path.type_of(leaf) for leaf in leaves]
    finally:
        known.settle()
        forget_tensors(mode)
    for number, leaf in enumerate(leaves):
        if isinstance(leaf, LateScalar):
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
        (leaves, tree), observer = request.guard.run(
            lambda: only_way(lambda decisions: _trace_with_replacements(request, decisions))
        )
    except Exception:  # noqa: BLE001  (then it is opaque, and running decides)
        return None
    if observer.inner_autograd:  # whose graphs are looked at where there are some
        return None
    out_tree, out_types = _output_types(request, leaves, tree, observer.result_order, opaque=True)
    behaviour = _behaviour(request, observer, _reason(cause), False)
    return Inference(out_types, out_tree, dataclasses.replace(behaviour, only_checks=True))


def _infer_dependent(request: Request, cause: Exception) -> Inference | None:
    """Infer the types of a function inside which sizes or values depend on data; None if it cannot be traced so."""
    if not isinstance(cause, DataDependentOutputException | DynamicOutputShapeException):
        return None

    def run(path: PathTrace) -> Outcome:
        with Replaced():
            (leaves, tree), observer = _trace_once(request, request.state, path=path)
        return Outcome(leaves, tree, _behaviour(request, observer, _reason(cause), False), observer.result_order)

    try:
        outcomes = request.guard.run(lambda: explored(run, 1) if request.ordered else explored(run))
    except JtbridgeError:
        raise
    except Exception:  # noqa: BLE001  (then it runs on example arguments)
        return None
    return _joined(request, outcomes)


def _infer_opaque(request: Request, cause: Exception) -> Inference:
    """Run a function that cannot be traced on example arguments. Its effects, if they are wanted, happen once."""
    reason = _reason(cause)
    if request.output_shapes is not None:
        return _as_declared(request.output_shapes, reason)
    outcomes: list[Outcome] = []
    errors: list[Exception] = []
    examples = list(example_arguments(request.shapes, request.dtypes, request.device))
    for inputs in examples:
        try:
            out, observer = request.guard.run(
                lambda inputs=inputs: _run_on_values(request, inputs),
                again=lambda: _run_on_values(request, examples[1]),
            )
        except JtbridgeError:
            raise
        except Exception as error:  # noqa: BLE001  (not every function takes such arguments)
            errors.append(error)
        else:
            (leaves, tree), order = flatten_output(out), key_order(out)
            # XLA drops a call whose results have no elements: that they have none must be certain.
            if not request.ordered and all(map(torch.Size.numel, map(torch.Size, request.shapes))):
                leaves = [without_empty_sizes(leaf) for leaf in leaves]
            outcomes.append(Outcome(leaves, tree, _behaviour(request, observer, reason, False), order))
        if request.ordered or not request.shapes:
            break
    if not outcomes:
        _refuse_without_outcome(request, cause, errors[0])
    return _joined(request, outcomes)


def _refuse_without_outcome(request: Request, cause: Exception, error: Exception) -> NoReturn:
    """Raise for a function that could not be traced for a `cause`, and on example arguments raised an `error`."""
    if type(error) is type(cause):  # a plain mistake in the function or its arguments
        error.add_note(f"(raised while finding the output shapes of `{request.name}`)")
        raise error
    raise ShapeInferenceError(
        f"No output shapes could be inferred for `{request.name}`: on fake tensors it raised "
        f"{type(cause).__name__}: {_reason(cause)}; run on zeros it raised {type(error).__name__}: "
        f"{_first_line(error)}. Pass `output_shapes=`, a tree of `jax.ShapeDtypeStruct`."
    ) from error


def _joined(request: Request, outcomes: Sequence[Outcome]) -> Inference:
    """The one type that all outcomes have, or that is declared where they differ."""
    outcome = agreed(request.name, outcomes, declared=request.output_shapes is not None)
    out_tree, out_types = _output_types(request, outcome.leaves, outcome.tree, outcome.order, opaque=True)
    if request.output_shapes is not None:
        declared, _ = declared_types(request.output_shapes)
        if not are_possible(declared, out_types):
            raise wrong_declaration(request.name, declared, out_types)
        out_types = declared
    return Inference(out_types, out_tree, outcome.behaviour)


def _run_on_values(request: Request, inputs: Sequence[torch.Tensor]) -> tuple[Any, Observer]:
    """Run on copies of some tensors: the result, and what was observed."""
    saved = WrittenValues() if request.ordered else None
    try:
        with _rng.seeded_by(0, 0), request.state.applied():
            copies = [tensor.clone() for tensor in inputs]
            observer = Observer(copies, None, _write_refusal(request), saved)
            with observer.watching(), intercepted_launches() as observer.launches:
                return request.call(*copies), observer
    finally:
        if saved is not None:
            with request.state.without_grad().applied():
                saved.restore()


def _as_declared(output_shapes: Any, reason: str) -> Inference:
    """What is known of a function that is not looked at."""
    out_types, tree = declared_types(output_shapes)
    positions = tuple(range(len(out_types)))
    return Inference(out_types, OutputTree(tree, positions, (None,) * len(out_types)), Behaviour(opaque=reason))


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
        if observer.own_generator and observer.keeps_generator():
            raise RandomnessError(
                f"`{request.name}` draws from a torch.Generator of its own ({observer.own_generator}), whose state "
                "a JAX program cannot carry. Draw from torch's default generator and pass a JAX key as `rng=`, or make "
                "and seed the generator inside the function, which then draws the same numbers in each call."
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
        uses_default_dtype=observer.uses_default_dtype or opaque is not None,
        launches=next(iter([*observer.launches, *observer.operators_of_kernels]), None),
        runs_without_grad=without_grad,
        modules=tuple({id(module): weakref.ref(module) for module in observer.modules}.values()),
    )


def _output_types(
    request: Request, leaves: Sequence[Any], tree: Any, order: Any, opaque: bool
) -> tuple[OutputTree, tuple[ArrayType, ...]]:
    positions = tuple(
        i for i, leaf in enumerate(leaves) if isinstance(leaf, DependentTensor) or is_array_leaf(leaf, opaque)
    )
    types = []
    for number, position in enumerate(positions):
        leaf = leaves[position]
        tensor = leaf if isinstance(leaf, DependentTensor) else as_tensor(leaf)
        dtype = numpy_dtype(tensor.dtype, f"Result {number} of `{request.name}`")
        types.append(ArrayType(tuple(tensor.shape), canonical_dtype(dtype)))  # type: ignore[arg-type]  (or a str)
    statics = tuple(None if i in positions else leaf for i, leaf in enumerate(leaves))
    return OutputTree(tree, positions, statics, order), tuple(types)


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
    operator = str(cause.args[0]) if cause.args else ""
    line = line_of(cause)
    if isinstance(cause, DynamicOutputShapeException):
        text = f"it makes tensors whose sizes depend on the values of its arguments (operator `{operator}`)"
    elif isinstance(cause, DataDependentOutputException) and operator:
        text = f"it needs the values of tensors (operator `{operator}`)"
    else:
        text = _first_line(cause)
    return f"{text} ({line})" if line else text


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
