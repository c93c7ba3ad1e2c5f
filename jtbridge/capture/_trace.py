"""Traces of a torch function to a functional ATen graph. Its nodes record their origin (`modes/provenance.py`).

``node.meta["detached"]`` says whether other nodes used a `detach` of the node; the graph has no `detach` nodes. The
graph module's ``meta["stores_tensors"]`` says whether the function stored a tensor that depends on its arguments.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from jtbridge._compat import (
    trace_joint,
    tracing,
)
from jtbridge.core import random_numbers
from jtbridge.core.array_types import ArrayType
from jtbridge.core.dtypes import torch_dtype
from jtbridge.core.signals import raise_if_from_signal
from jtbridge.errors import TranslationError
from jtbridge.state import restore_before_next_attempt
from jtbridge.triton import intercepted_launches
from jtbridge.triton.launches import late_scalars

from ._attempts import REVISIONS, Attempt, GraphUse, Outcome, Revision, repeat
from ._overlapping_writes import refuse_overlapping_writes
from .chains import CallRecorder
from .modes.branches import BranchOracle, traced_on_all_paths
from .modes.closed_over import CudaAsCpuMode, may_be_on_gpu, with_closed_over
from .modes.compared_numbers import ScalarComparisonMode
from .modes.constant_eval import ConstantEvalMode
from .modes.exceptions import reraise_caught_exceptions
from .modes.fake_operators import FakeAsReal
from .modes.fused_lstm import FusedGradients, WithoutFusedLstm
from .modes.higher_order import HigherOrderInOperators
from .modes.numpy_views import NumpyViews
from .modes.overrides import AsOnRealTensors, CopiedTensors, HooksWithoutGradient, OverrideMode
from .modes.provenance import ModulePaths, ProvenanceMode
from .rewrites.grouped_mm import GroupedProducts
from .rewrites.indexing import refuse_stale_copies
from .rewrites.rounded_once import round_once
from .rewrites.statistics import keep_statistics_wide

_DETACHING = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)  # torch 2.15 traces `detach` as `alias`


def trace(
    fn: Callable[..., Sequence[Any]],
    types: Sequence[ArrayType],
    use: GraphUse,
    revisions: Sequence[Revision] = REVISIONS,
    device: str = "cpu",
) -> fx.GraphModule:
    """Return the functional graph of ``fn``, after autograd, on tensors of the given types on a device."""
    return trace_on(fn, examples(types, device), use, revisions)


def trace_on(
    fn: Callable[..., Sequence[Any]],
    tensors: Sequence[torch.Tensor],
    use: GraphUse,
    revisions: Sequence[Revision] = REVISIONS,
) -> fx.GraphModule:
    """Return the functional graph of ``fn``, after autograd, on tensors like `tensors`, whose sizes may be symbols.

    A graph to translate is traced for the CPU, with an LSTM as the operators of its steps instead of oneDNN's.
    """
    first = Attempt(use, fuses=use is GraphUse.KERNELS)
    return repeat(lambda attempt: _tried(fn, tensors, attempt), first, revisions)


def _tried(fn: Callable[..., Sequence[Any]], tensors: Sequence[torch.Tensor], attempt: Attempt) -> Outcome:
    recorders: list[CallRecorder] = []

    def recorder() -> contextlib.AbstractContextManager:
        if not attempt.fuses:
            return contextlib.nullcontext()
        recorders.append(CallRecorder(attempt.unfused))
        return recorders[-1]

    try:
        with late_scalars() if attempt.late_scalars else contextlib.nullcontext():
            if attempt.use.is_called:
                module = _trace_one_way(fn, tensors, None, recorder, attempt.use)
            elif attempt.use is GraphUse.REGIONS:
                oracle = BranchOracle()
                module = _trace_one_way(fn, tensors, oracle, recorder, attempt.use, compares=True)
                if oracle.conditions:
                    raise TranslationError("it branches on data, and has sizes that depend on data")
            else:
                module = traced_on_all_paths(
                    lambda oracle: _trace_one_way(fn, tensors, oracle, recorder, compares=not attempt.late_scalars)
                )
    except Exception as error:  # noqa: BLE001  (the driver raises it)
        raise_if_from_signal(error)
        return Outcome(attempt.cause or error, recorders)
    return Outcome(module, recorders)


def _trace_one_way(
    fn: Callable[..., Sequence[Any]],
    tensors: Sequence[torch.Tensor],
    oracle: BranchOracle | None,
    recorder: Callable[[], contextlib.AbstractContextManager],
    use: GraphUse = GraphUse.TRANSLATE,
    *,
    compares: bool = False,
) -> fx.GraphModule:
    restore_before_next_attempt()
    on_cpu = CudaAsCpuMode() if oracle is not None and may_be_on_gpu() else None
    # A function that is called reads closed-over tensors in each call: its graphs must not hold their values.
    known = (
        ConstantEvalMode(answers=oracle is not None, symbols=oracle is not None)
        if on_cpu is None
        else ConstantEvalMode(stands_for=on_cpu.stands_for)
    )
    with (
        tracing(),
        random_numbers.counting_draws(),
        intercepted_launches(),
        contextlib.nullcontext() if use is GraphUse.RUN else WithoutFusedLstm(),
        FusedGradients() if use is GraphUse.GRADIENT else contextlib.nullcontext(),
        contextlib.nullcontext() if oracle is None else OverrideMode(),
        ScalarComparisonMode(oracle) if oracle is not None and compares else contextlib.nullcontext(),
        on_cpu or contextlib.nullcontext(),
        CopiedTensors(),
        AsOnRealTensors(),
        HooksWithoutGradient(),
    ):
        try:
            run = _in_trace_modes(fn, oracle, recorder, known)
            module = trace_joint(run, tensors, refuse_overlapping_writes, has_dynamic_sizes=use is GraphUse.REGIONS)
        finally:
            stores_tensors = known.materialize()
    module.meta["stores_tensors"] = stores_tensors
    if on_cpu is not None:
        with_closed_over(module)
    if oracle is not None:
        round_once(module.graph)
        if use is not GraphUse.REGIONS:  # torch runs the regions, and rounds as on a CPU
            keep_statistics_wide(module.graph)
    for detaching in _DETACHING:
        for node in module.graph.find_nodes(op="call_function", target=detaching):
            if any(user.op != "output" for user in node.users):
                node.args[0].meta["detached"] = True
            node.replace_all_uses_with(node.args[0])
            module.graph.erase_node(node)
    return module


def examples(types: Sequence[ArrayType], device: str = "cpu") -> list[torch.Tensor]:
    """Return tensors of the given types to trace on; their values mean nothing."""
    return [torch.empty(type_.shape, dtype=torch_dtype(type_.dtype, "an argument"), device=device) for type_ in types]


def _in_trace_modes(
    fn: Callable[..., Sequence[Any]],
    oracle: BranchOracle | None,
    recorder: Callable[[], contextlib.AbstractContextManager],
    known: ConstantEvalMode,
) -> Callable[..., Sequence[Any]]:
    """Return `fn` run under the modes of a trace; with an `oracle`, its results are followed by the conditions."""

    def run(*tensors: torch.Tensor) -> Sequence[Any]:
        modules = ModulePaths()
        with (
            modules.followed(),
            ProvenanceMode(modules, oracle),
            GroupedProducts(),
            known,
            recorder(),
            reraise_caught_exceptions(),
            HigherOrderInOperators(),
            FakeAsReal(),
            contextlib.nullcontext() if oracle is None else NumpyViews(),
        ):
            results = fn(*tensors)
            refuse_stale_copies(results)
        return results if oracle is None else [*results, *oracle.conditions]

    return run
