"""Runs of a torch function on fake tensors or on example values, which record its effects."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch

from jtbridge._compat import DataDependentOutputException, FakeTensorMode, forget_tensors, tracing
from jtbridge.core import random_numbers
from jtbridge.core.array_types import ArrayType, OutputTree, as_tensor, is_array_leaf, is_dense
from jtbridge.core.dtypes import canonical_dtype, numpy_dtype
from jtbridge.core.pytree import flatten_output, key_order
from jtbridge.core.torch_state import TorchState
from jtbridge.core.traits import AutogradTraits, Effects, FunctionTraits
from jtbridge.errors import DeviceError, MutationError, RandomnessError
from jtbridge.state import WrittenValues, restore_before_next_attempt
from jtbridge.triton import intercepted_launches
from jtbridge.triton.launches import LateScalar

from ._path_outcomes import DependentTensor
from ._request import TraceRequest
from ._unbacked import PathTrace
from ._watchdog import aborted_if_stuck
from .modes.branches import BranchOracle, BranchReplayMode
from .modes.closed_over import may_be_on_gpu
from .modes.compared_numbers import ScalarComparisonMode
from .modes.constant_eval import ConstantEvalMode
from .modes.effects import EffectRecorder
from .modes.exceptions import reraise_caught_exceptions
from .modes.fake_operators import FakeAsReal
from .modes.fused_lstm import WithoutFusedLstm
from .modes.higher_order import HigherOrderInOperators
from .modes.numpy_views import NumpyViews
from .modes.overrides import AsOnRealTensors, CopiedTensors, HooksWithoutGradient
from .rewrites.grouped_mm import GroupedProducts
from .rewrites.indexing import refuse_stale_copies


class ResultOnGpu(Exception):
    """A function of CPU arguments returned a GPU tensor. It is traced again with its arguments on the GPU."""


def run_on_fakes(
    request: TraceRequest,
    state: TorchState,
    oracle: BranchOracle | None = None,
    *,
    path: PathTrace | None = None,
) -> tuple[Any, EffectRecorder]:
    """Run the function on fake tensors; return the leaves and the tree of the result, and the recorder of its effects.

    Of tensor leaves, only the types are valid.

    Args:
        request: the function.
        state: torch's settings for the run.
        oracle: answers branches on data.
        path: makes symbols for sizes and values that depend on data.
    """
    # A function with side effects may change a tensor that it stores: its value in the next call is unknown.
    known = ConstantEvalMode(answers=not request.ordered)
    restore_before_next_attempt()
    mode = FakeTensorMode(allow_non_fake_inputs=True) if path is None else path.mode
    try:
        with mode as known.mode, tracing(), random_numbers.counting_draws(), state.applied():
            inputs = [
                torch.empty(shape, dtype=dtype, device=request.device)
                for shape, dtype in zip(request.shapes, request.dtypes, strict=True)
            ]
            recorder = EffectRecorder(inputs, known.mode, _write_refusal(request))
            answering = contextlib.nullcontext() if oracle is None else BranchReplayMode(oracle)
            comparing = contextlib.nullcontext() if oracle is None else ScalarComparisonMode(oracle)
            following = contextlib.nullcontext() if path is None else _followed(path, recorder)
            with (
                WithoutFusedLstm(only_with_projections=True),
                GroupedProducts(),
                FakeAsReal(refuses=True),
                recorder.watching(),
                intercepted_launches() as recorder.launches,
                answering,
                comparing,
                following,
                known,
                CopiedTensors(),
                AsOnRealTensors(),
                HooksWithoutGradient(),
                reraise_caught_exceptions(),
                HigherOrderInOperators() as higher_order,
                NumpyViews(),
            ):
                out = request.call(*inputs)
                leaves, tree = flatten_output(out)
                refuse_stale_copies(leaves)
                recorder.calls.add_results(leaves)
                recorder.result_order = key_order(out)
        recorder.wrong_forward_mode = recorder.wrong_forward_mode or higher_order.control_flow
        leaves = [_type_of(leaf) if path is None else path.type_of(leaf) for leaf in leaves]
    finally:
        known.materialize()
        forget_tensors(mode)
    for number, leaf in enumerate(leaves):
        if isinstance(leaf, LateScalar):
            raise DataDependentOutputException(torch.ops.aten._local_scalar_dense.default)
        if isinstance(leaf, torch.Tensor) and leaf.device.type != request.device:
            if leaf.device.type == "cuda" and may_be_on_gpu():
                raise ResultOnGpu(f"result {number} lies on device `{leaf.device}`")
            raise DeviceError(
                f"Result {number} of `{request.name}` lies on device `{leaf.device}`, but its arguments are on "
                f"`{request.device}`. Make tensors inside the function on the device of its arguments "
                "(`device=x.device`)."
            )
    return (leaves, tree), recorder


@contextlib.contextmanager
def _followed(path: PathTrace, recorder: EffectRecorder) -> Iterator[None]:
    """Record the operators of a trace with symbols; end it if torch's symbolic arithmetic takes too long."""
    with path.watching(), aborted_if_stuck(lambda: recorder.operators):
        yield


def _type_of(leaf: Any) -> Any:
    """Return a fake tensor of a dense tensor's type, without its autograd graph; return any other leaf unchanged."""
    if not isinstance(leaf, torch.Tensor) or not is_dense(leaf):
        return leaf
    with FakeTensorMode():
        made = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device)
    return made.requires_grad_(leaf.requires_grad)


def run_on_values(request: TraceRequest, inputs: Sequence[torch.Tensor]) -> tuple[Any, EffectRecorder]:
    """Run the function on copies of `inputs`; return the result and the recorder of its effects."""
    saved = WrittenValues() if request.ordered else None
    try:
        with random_numbers.seeded_by(0, 0), request.state.applied():
            copies = [tensor.clone() for tensor in inputs]
            recorder = EffectRecorder(copies, None, _write_refusal(request), saved)
            watchdog = aborted_if_stuck(lambda: recorder.operators)
            with (
                watchdog,
                recorder.watching(),
                intercepted_launches() as recorder.launches,
                HigherOrderInOperators() as higher_order,
            ):
                out = request.call(*copies)
            recorder.wrong_forward_mode = recorder.wrong_forward_mode or higher_order.control_flow
            recorder.note_unseen_writes(inputs, copies)
            return out, recorder
    finally:
        if saved is not None:
            with request.state.without_grad().applied():
                saved.restore()


def _write_refusal(request: TraceRequest) -> Callable[[str], NoReturn] | None:
    """Return a function that raises for a write to a closed-over tensor; None if side effects are allowed."""
    if request.ordered:
        return None

    def refuse(written_to: str) -> NoReturn:
        raise MutationError(
            f"`{request.name}` writes to {written_to}, which is not one of its arguments, and a JAX program has "
            "no state. Use `jtbridge.module(model)`, which returns the new values of a module's buffers; call "
            "`model.eval()` if it should not keep running statistics; pass the tensor as an argument and use "
            '`return_mutated=True`; or wrap with `effects="ordered"`.'
        )

    return refuse


def traits_of(
    request: TraceRequest, recorder: EffectRecorder, untraceable_reason: str | None, without_grad: bool
) -> FunctionTraits:
    """Return the traits of a function from the record of one run.

    Args:
        request: the function.
        recorder: the record of the run.
        untraceable_reason: why the function is untraceable; None if it is traceable.
        without_grad: whether the function's result is the same with gradient recording off.

    Raises:
        RandomnessError: side effects are not allowed, and the function draws without a JAX key or from a generator
            that outlives the call, or seeds torch's generator.
    """
    if not request.ordered:
        if recorder.has_new_seed:
            raise RandomnessError(random_numbers.with_new_seed(request.name))
        if recorder.own_generator and recorder.keeps_generator():
            raise RandomnessError(
                f"`{request.name}` draws from a torch.Generator of its own ({recorder.own_generator}), whose state "
                "a JAX program cannot carry. Draw from torch's default generator and pass a JAX key as `rng=`, or make "
                "and seed the generator inside the function, which then draws the same numbers in each call."
            )
        if recorder.random_operator is not None and not request.seeded:
            raise RandomnessError(random_numbers.without_key(request.name, recorder.random_operator))
    mutated = recorder.mutated_inputs()
    effects = Effects(
        mutated=mutated,
        reshaped=tuple(
            (i, ArrayType(shape, canonical_dtype(numpy_dtype(dtype, f"Argument {i} of `{request.name}`"))))
            for i, (shape, dtype) in recorder.reshaped.items()
            if i in mutated
        ),
        random_operator=recorder.random_operator,
        launches=next(iter([*recorder.launches, *recorder.operators_of_kernels]), None),
        modules=tuple({id(module): weakref.ref(module) for module in recorder.modules}.values()),
        ordered=request.ordered,
    )
    autograd = AutogradTraits(
        switches_grad_mode=recorder.switches_grad_mode,
        inner_autograd=recorder.inner_autograd,
        forward_mode=recorder.forward_mode,
        uses_data=recorder.uses_data,
        unseen_write_reason=recorder.unseen_write_reason,
        breaks_inner_graph=recorder.inner_autograd and not recorder.keeps_inner_graph,
        fused_norm=recorder.fused_norm,
        wrong_forward_mode=recorder.wrong_forward_mode,
        runs_without_grad=without_grad,
    )
    return FunctionTraits(
        effects=effects,
        autograd=autograd,
        operators=recorder.operators,
        custom_operator=recorder.custom_operator,
        unbatchable=recorder.unbatchable,
        untraceable_reason=untraceable_reason,
        uses_default_dtype=recorder.uses_default_dtype or untraceable_reason is not None,
    )


def output_types(
    request: TraceRequest, leaves: Sequence[Any], tree: Any, order: Any, untraceable: bool
) -> tuple[OutputTree, tuple[ArrayType, ...]]:
    """Return the tree of a result and the JAX types of its array leaves.

    Python numbers among the leaves of an `untraceable` function count as arrays, since they may depend on data.
    """
    positions = tuple(
        i for i, leaf in enumerate(leaves) if isinstance(leaf, DependentTensor) or is_array_leaf(leaf, untraceable)
    )
    types = []
    for number, position in enumerate(positions):
        leaf = leaves[position]
        tensor = leaf if isinstance(leaf, DependentTensor) else as_tensor(leaf)
        dtype = numpy_dtype(tensor.dtype, f"Result {number} of `{request.name}`")
        types.append(ArrayType(tuple(tensor.shape), canonical_dtype(dtype)))  # type: ignore[arg-type]  (or a str)
    statics = tuple(None if i in positions else leaf for i, leaf in enumerate(leaves))
    return OutputTree(tree, positions, statics, order), tuple(types)
