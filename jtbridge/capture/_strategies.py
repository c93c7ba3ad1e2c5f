"""The strategies that find the result types of a function, in the order in which inference tries them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import torch

from jtbridge._compat import (
    DataDependentOutputException,
    was_answered_fake,
)
from jtbridge.core.array_types import OutputTree, as_tensor, is_array_leaf
from jtbridge.core.forward_mode import named_forward_mode
from jtbridge.core.messages import first_line, text_of
from jtbridge.core.nested_calls import refusing_jax_in_program
from jtbridge.core.output_shapes import check_declared, declared_types, wrong_declaration
from jtbridge.core.pytree import flatten_output, key_order
from jtbridge.core.signals import failures_ignored, raise_if_from_signal
from jtbridge.core.static import same_static
from jtbridge.core.traits import AutogradTraits, FunctionTraits
from jtbridge.errors import DeviceError, JtbridgeError, ShapeInferenceError
from jtbridge.triton.launches import late_scalars, may_need_late_scalars

from ._abstract import ResultOnGpu, output_types, run_on_fakes, run_on_values, traits_of
from ._branches_on_fake import differs_if_fake
from ._causes import depends_on_data, reads_memory, reason_of
from ._examples import example_arguments
from ._path_outcomes import PathOutcome, agreed, are_possible, without_empty_sizes
from ._request import AbstractResult, TraceRequest
from ._unbacked import PathTrace, explored
from .modes.branches import BranchOracle, all_paths
from .modes.caught import InjectedErrorMode, Place, with_different_handlers
from .modes.closed_over import may_be_on_gpu
from .modes.effects import EffectRecorder, SharedMemoryError
from .modes.overrides import OverrideMode
from .modes.texts import AlteredReprMode

_DIFFERS_IF_FAKE = "its model (of transformers) computes something else when it is traced"
_RunRecord = tuple[Any, EffectRecorder]  # the leaves and the tree of the result, and the record of effects


@dataclasses.dataclass(frozen=True)
class Strategy:
    """One way to find the result types of a function.

    Attributes:
        name: the name that `explain` shows.
        applies: whether to try it, given the error that the trace on fake tensors raised (None before it is tried).
        run: returns the result, or raises: a `JtbridgeError` ends inference (unless late scalars may avoid it), any
            other exception means that the strategy failed.
        is_trace: whether it traces the function as it is, so that its error says why the function is untraceable.
    """

    name: str
    applies: Callable[[TraceRequest, Exception | None], bool]
    run: Callable[[TraceRequest, Exception | None], AbstractResult]
    is_trace: bool = False


class StrategyError(Exception):
    """A strategy does not fit a function; the text says why."""


# --- on fake tensors, where nothing is computed ---------------------------------------------------------------------


def _traced_unchanged(request: TraceRequest, cause: Exception | None) -> AbstractResult:
    """Trace the function as it is."""
    del cause
    return _inferred_from_trace(request, contextlib.nullcontext)


def _traced_with_late_scalars(request: TraceRequest, cause: Exception | None) -> AbstractResult:
    """Trace the function; its kernels read the numbers that it takes from tensors and passes to them."""
    assert cause is not None
    try:
        return _inferred_from_trace(request, late_scalars)
    except Exception as error:
        raise_if_from_signal(error)
        if isinstance(cause, JtbridgeError):  # a kernel needs a number, and cannot read it itself
            raise cause from None
        raise


def _overridden(request: TraceRequest, cause: Exception | None) -> AbstractResult:
    """Trace with overrides of the functions that torch itself cannot trace: `ctc_loss`, `x[i]` and others."""
    del cause
    return _inferred_from_trace(request, OverrideMode)


def _overridden_on_gpu(request: TraceRequest, cause: Exception | None) -> AbstractResult:
    """Trace with the arguments on a GPU, and with overrides.

    Raises:
        DeviceError: the function has results on a GPU even for CPU arguments, and cannot be traced with GPU arguments.
    """
    try:
        return _overridden(request.on_device("cuda"), cause)
    except Exception as error:
        raise_if_from_signal(error)
        if isinstance(cause, ResultOnGpu):
            raise DeviceError(
                f"`{request.name}`: {cause}, and with its arguments there it cannot be traced ({reason_of(error)}). "
                "Make tensors inside the function on the device of its arguments (`device=x.device`)."
            ) from error
        raise


def _with_overrides(request: TraceRequest, oracle: BranchOracle) -> _RunRecord:
    with OverrideMode():
        return run_on_fakes(request, request.state, oracle)


def _inferred_from_trace(
    request: TraceRequest, mode: Callable[[], contextlib.AbstractContextManager]
) -> AbstractResult:
    """Infer the result from a trace; mark the function as untraceable if a graph would not do the same.

    Args:
        request: the function.
        mode: makes a new mode for each trace.
    """
    (leaves, tree), recorder, without_grad = request.guard.run(
        lambda: _with_least_recording(request, mode),
        on_values=refusing_jax_in_program(lambda: _on_example_values(request)),
    )

    def trace(attempt: TraceRequest) -> _RunRecord:
        with mode():
            return run_on_fakes(attempt, request.state)

    _refuse_used_text(request, [((leaves, tree), recorder)], lambda: [trace(request)])
    out_tree, out_types = output_types(request, leaves, tree, recorder.result_order, untraceable=False)
    if request.output_shapes is not None:
        check_declared(declared_types(request.output_shapes)[0], out_types, request.name)
    is_asked = was_answered_fake()
    reason = _untraceable_reason(recorder) or _caught_error_reason(request, recorder.may_raise, trace)
    if reason is None and is_asked and differs_if_fake(request):
        reason = _DIFFERS_IF_FAKE
    traits = traits_of(request, recorder, reason, without_grad)
    only_asserts = recorder.asserts and not recorder.sets_data and not recorder.own_generator
    return AbstractResult(out_types, out_tree, dataclasses.replace(traits, only_branches=only_asserts))


def _on_example_values(request: TraceRequest) -> list[Any]:
    """Run the function on example values, and return its results."""
    *_, inputs = example_arguments(request.shapes, request.dtypes, request.device)
    return flatten_output(run_on_values(request, inputs)[0])[0]


def _with_least_recording(
    request: TraceRequest, mode: Callable[[], contextlib.AbstractContextManager]
) -> tuple[Any, EffectRecorder, bool]:
    """Trace a function; trace it again with gradient recording off if closed-over weights would record a graph.

    Returns:
        The result of the first trace, its record of effects, and whether the second trace is the same.
    """
    with mode():
        out, recorder = run_on_fakes(request, request.state)
    if not (request.state.grad and any(isinstance(x, torch.Tensor) and x.requires_grad for x in out[0])):
        return out, recorder, False
    try:
        with mode():
            again, watched = run_on_fakes(request, request.state.without_grad())
    except Exception as error:  # noqa: BLE001  (it differentiates inside: recording stays on)
        raise_if_from_signal(error)
        return out, recorder, False
    return out, recorder, _same_trace((out, recorder), (again, watched))


def _same_types(a: Any, b: Any) -> bool:
    def types(out: Any) -> Any:
        leaves, tree = out
        return tree, [(x.shape, x.dtype) if isinstance(x, torch.Tensor) else x for x in leaves]

    return types(a) == types(b)


def _untraceable_reason(recorder: EffectRecorder) -> str | None:
    """Return why a graph does not show all effects of a function; None if it shows them."""
    checks = "it asserts something about values of tensors, which a graph may leave out" if recorder.asserts else None
    return _data_or_draw_reason(recorder) or checks


def _data_or_draw_reason(recorder: EffectRecorder) -> str | None:
    if recorder.sets_data:
        return "it assigns to `.data`, which a graph does not show"
    if recorder.own_generator:
        return f"it draws from a torch.Generator of its own ({recorder.own_generator})"
    return None


def _caught_error_reason(
    request: TraceRequest, places: Iterable[Place], trace: Callable[[TraceRequest], object]
) -> str | None:
    """Return why a function is untraceable if it catches an error that torch raises for some values; otherwise None.

    Args:
        request: the function.
        places: where the function calls operators that may raise, inside exception handlers.
        trace: runs a request on fake tensors.
    """
    if request.ordered:
        return None
    for place in with_different_handlers(places):
        raising = InjectedErrorMode(place, request.call)
        with failures_ignored():
            attempt = dataclasses.replace(request, call=raising.run)
            request.guard.run(lambda attempt=attempt: trace(attempt))
        if raising.caught:
            return f"it catches what torch raises for some values ({place.line})"
    return None


def _refuse_used_text(
    request: TraceRequest, traces: Sequence[_RunRecord], once_more: Callable[[], list[_RunRecord]]
) -> None:
    """Raise if a function uses the text of a tensor for more than printing or logging.

    Args:
        request: the function.
        traces: one trace for each path through the function.
        once_more: traces the same paths again.

    Raises:
        StrategyError: the function uses the text.
    """
    if request.ordered or not any(recorder.reads_repr for _, recorder in traces):
        return
    again: Sequence[_RunRecord] = ()
    with failures_ignored(), AlteredReprMode():
        again = request.guard.run(once_more)
    if len(again) != len(traces) or not all(map(_same_trace, traces, again)):
        raise StrategyError("it uses the text of a tensor (`repr`, `str` or an f-string), which shows values")


def _same_trace(a: _RunRecord, b: _RunRecord) -> bool:
    return _same_types(a[0], b[0]) and a[1].calls == b[1].calls


def _branching(request: TraceRequest, cause: Exception | None) -> AbstractResult:
    """Trace every path through a function that reads values only to branch on them.

    All paths must have results of the same types. A path that raises, such as a failed check of an argument, has no
    result.
    """
    assert cause is not None

    def trace(attempt: TraceRequest) -> list[_RunRecord]:
        return all_paths(lambda oracle: _with_overrides(attempt, oracle))

    runs: list[Callable[[], Any]] = []

    def guarded(oracle: BranchOracle) -> _RunRecord:  # one guard for all paths would miss an earlier path's writes
        def again() -> _RunRecord:
            return _with_overrides(request, BranchOracle(oracle.given))

        runs.append(again)
        return request.guard.run(
            lambda: _with_overrides(request, oracle),
            again=again,
            on_values=refusing_jax_in_program(lambda: _on_example_values(request)),
        )

    try:
        with request.guard.same_constants(runs):
            paths = all_paths(guarded)
    except JtbridgeError as error:  # perhaps no values of the arguments lead to the path that raised
        raise StrategyError(str(error)) from error
    _refuse_used_text(request, paths, lambda: trace(request))
    recorders = [recorder for _, recorder in paths]
    if any(recorder.inner_autograd for recorder in recorders):
        raise StrategyError("it differentiates inside")
    reason = next(filter(None, map(_data_or_draw_reason, recorders)), None)
    if reason is None and not _have_one_type(paths):
        reason = "it branches to results of different types"
    if reason is None:
        places = dict.fromkeys(place for recorder in recorders for place in recorder.may_raise)
        reason = _caught_error_reason(request, places, trace)
    if reason is None and was_answered_fake() and differs_if_fake(request):
        reason = _DIFFERS_IF_FAKE
    if reason is not None:
        raise StrategyError(reason)
    outcomes = [
        PathOutcome(leaves, tree, traits_of(request, recorder, reason_of(cause), False), recorder.result_order)
        for (leaves, tree), recorder in paths
    ]
    found = _common_result(request, outcomes)
    return dataclasses.replace(found, traits=dataclasses.replace(found.traits, only_branches=True))


def _have_one_type(paths: Sequence[_RunRecord]) -> bool:
    """Return whether the results of all paths have the same tree, types and static values."""
    ((first, tree), recorder), *others = paths

    def kind(leaf: Any) -> Any:
        tensor = as_tensor(leaf)
        return tuple(tensor.shape), tensor.dtype

    def same(ours: Any, theirs: Any) -> bool:
        if is_array_leaf(ours, True) and is_array_leaf(theirs, True):
            return kind(ours) == kind(theirs)
        return same_static(ours, theirs)

    return all(
        other_tree == tree and other.result_order == recorder.result_order and all(map(same, first, leaves))
        for (leaves, other_tree), other in others
    )


def _traced_with_symbols(request: TraceRequest, cause: Exception | None) -> AbstractResult:
    """Trace with symbols for the sizes and values that depend on data."""
    assert cause is not None

    def trace(path: PathTrace) -> _RunRecord:
        with OverrideMode():
            return run_on_fakes(request, request.state, path=path)

    runs: list[Callable[[], Any]] = []

    def run(path: PathTrace) -> PathOutcome:
        runs.append(lambda: trace(path.again()))
        (leaves, tree), recorder = request.guard.run(
            lambda: trace(path),
            again=runs[-1],
            on_values=refusing_jax_in_program(lambda: _on_example_values(request)),
        )
        traits = traits_of(request, recorder, reason_of(cause), False)
        return PathOutcome(
            leaves,
            tree,
            dataclasses.replace(traits, has_dynamic_sizes=in_a_graph(path, recorder)),
            recorder.result_order,
        )

    def in_a_graph(path: PathTrace, recorder: EffectRecorder) -> bool:
        """Return whether a graph with symbols would compute the same as the function for all values."""
        if (
            not request.regions
            or request.ordered
            or request.output_shapes is not None
            or path.choices
            or recorder.inner_autograd
            or recorder.reads_repr
        ):
            return False
        if _untraceable_reason(recorder) or (was_answered_fake() and differs_if_fake(request)):
            return False
        return not _caught_error_reason(
            request,
            recorder.may_raise,
            lambda attempt: run_on_fakes(attempt, request.state, path=path.again()),
        )

    with request.guard.same_constants(runs):
        outcomes = explored(run, 1) if request.ordered else explored(run)
    return _common_result(request, outcomes)


# --- without a trace ------------------------------------------------------------------------------------------------


def _on_examples(request: TraceRequest, cause: Exception | None) -> AbstractResult:
    """Run the function on example arguments. Its effects, if they are allowed, happen once."""
    assert cause is not None
    reason = reason_of(cause)
    outcomes: list[PathOutcome] = []
    errors: list[Exception] = []
    examples = list(example_arguments(request.shapes, request.dtypes, request.device))
    for inputs in examples:
        others = examples[0] if inputs is examples[1] else examples[1]
        try:
            out, recorder = request.guard.run(
                refusing_jax_in_program(lambda inputs=inputs: run_on_values(request, inputs)),
                again=refusing_jax_in_program(lambda others=others: run_on_values(request, others)),
            )
        except JtbridgeError:
            raise
        except Exception as error:  # noqa: BLE001  (not every function takes such arguments)
            raise_if_from_signal(error)
            errors.append(error)
        else:
            (leaves, tree), order = flatten_output(out), key_order(out)
            # XLA drops a call whose results have no elements, so a size of 0 must hold for all arguments.
            if not request.ordered and all(map(torch.Size.numel, map(torch.Size, request.shapes))):
                leaves = [without_empty_sizes(leaf) for leaf in leaves]
            outcomes.append(PathOutcome(leaves, tree, traits_of(request, recorder, reason, False), order))
        if request.ordered or not request.shapes:
            break
    if not outcomes:
        _refuse_without_outcome(request, cause, errors)
    return _common_result(request, outcomes)


def _refuse_without_outcome(request: TraceRequest, cause: Exception, errors: Sequence[Exception]) -> NoReturn:
    """Raise one error for a function: its trace raised `cause`, and its runs on example arguments raised `errors`."""
    error = errors[0]
    # Both errors report a plain mistake in the function or its arguments. For one mistake, torch may raise another
    # exception class on fake tensors than on values.
    if type(error) is type(cause) or text_of(error) == text_of(cause):
        if len({*map(text_of, errors)}) > 1:  # the errors of the runs also depend on the example values
            error = cause
        error.add_note(f"(raised while finding the output shapes of `{request.name}`)")
        raise error
    raise ShapeInferenceError(
        f"No output shapes could be inferred for `{request.name}`: on fake tensors it raised "
        f"{type(cause).__name__}: {reason_of(cause)}; run on zeros it raised {type(error).__name__}: "
        f"{first_line(error) or type(error).__name__}. Pass `output_shapes=`, a tree of `jax.ShapeDtypeStruct`."
    ) from error


def _common_result(request: TraceRequest, outcomes: Sequence[PathOutcome]) -> AbstractResult:
    """Return the result that all outcomes have in common, with the declared types if the user declared them.

    Raises:
        DataDependentShapeError: the tree or an undeclared shape of the results depends on data.
        OutputMismatchError: the declared types do not agree with the outcomes.
    """
    outcome = agreed(request.name, outcomes, declared=request.output_shapes is not None)
    out_tree, out_types = output_types(request, outcome.leaves, outcome.tree, outcome.order, untraceable=True)
    if request.output_shapes is not None:
        declared, _ = declared_types(request.output_shapes)
        if not are_possible(declared, out_types):
            raise wrong_declaration(request.name, declared, out_types)
        out_types = declared
    return AbstractResult(out_types, out_tree, outcome.traits)


def _declared(request: TraceRequest, cause: Exception | None) -> AbstractResult:
    """Return the types that the user declares, without running the function."""
    reason = "its side effects are wanted, and its output shapes are given" if cause is None else reason_of(cause)
    out_types, tree = declared_types(request.output_shapes)
    positions = tuple(range(len(out_types)))
    # The function holds the lock of forward mode only if its code names forward mode: if all functions held it, two of
    # them that exchange messages would wait for each other forever.
    autograd = AutogradTraits(forward_mode=named_forward_mode(request.call))
    traits = FunctionTraits(autograd=autograd, untraceable_reason=reason)
    return AbstractResult(out_types, OutputTree(tree, positions, (None,) * len(out_types)), traits)


def _needs_gpu(request: TraceRequest, cause: Exception | None) -> bool:
    """Return whether to try a trace with the arguments on a GPU.

    It is not tried after a `SharedMemoryError`: no GPU tensor shares memory with NumPy, so the function would differ.
    """
    return request.device == "cpu" and may_be_on_gpu() and not isinstance(cause, SharedMemoryError)


STRATEGIES = (
    # This one is first, because any other strategy runs the function, with its side effects.
    Strategy("declared shapes", lambda request, _: request.ordered and request.output_shapes is not None, _declared),
    Strategy("fake tensors", lambda *_: True, _traced_unchanged, is_trace=True),
    Strategy(
        "fake tensors, with numbers that kernels read",
        lambda _, cause: cause is not None and may_need_late_scalars(cause),
        _traced_with_late_scalars,
    ),
    Strategy(
        "fake tensors, with overrides",
        lambda _, cause: depends_on_data(cause) or reads_memory(cause),
        _overridden,
        is_trace=True,
    ),
    Strategy(
        "fake tensors on a GPU",
        _needs_gpu,
        lambda request, cause: _traced_unchanged(request.on_device("cuda"), cause),
    ),
    Strategy(
        "fake tensors on a GPU, with overrides",
        _needs_gpu,
        _overridden_on_gpu,
    ),
    Strategy(
        "every branch",
        lambda request, cause: isinstance(cause, DataDependentOutputException) and not request.ordered,
        _branching,
    ),
    Strategy("symbolic sizes and values", lambda _, cause: depends_on_data(cause), _traced_with_symbols),
    Strategy("declared shapes", lambda request, _: request.output_shapes is not None, _declared),
    Strategy("example values", lambda *_: True, _on_examples),
)
