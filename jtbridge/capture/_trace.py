"""Traces of a torch function to a functional ATen graph. Its nodes record their origin (`modes/provenance.py`).

``node.meta["detached"]`` says that other nodes use a detach of the node, which is left out of the graph. A graph's own
``meta["keeps"]`` says whether the function stored a tensor that depends on its arguments.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import torch
from torch import fx

from jtbridge._compat import (
    trace_joint,
    tracing,
)
from jtbridge.core import random_numbers
from jtbridge.core.array_types import ArrayType
from jtbridge.core.dtypes import torch_dtype
from jtbridge.state import start_over
from jtbridge.triton import intercepted_launches
from jtbridge.triton.launches import with_late_scalars

from .chains import FusionPatterns
from .modes.branches import BranchOracle, traced_both_ways
from .modes.closed_over import CudaAsCpuMode, may_be_on_gpu, with_closed_over
from .modes.constant_eval import ConstantEvalMode
from .modes.exceptions import none_caught
from .modes.fused_lstm import WithoutFusedLstm
from .modes.overrides import CopiedTensors, OverrideMode
from .modes.provenance import ModulePaths, ProvenanceMode
from .rewrites.indexing import refuse_stale_copies
from .rewrites.statistics import keep_statistics_wide

_DETACHING = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)  # torch 2.15 traces `detach` as the latter


def trace(fn: Callable[..., Sequence[Any]], types: Sequence[ArrayType], *, to_run: bool) -> fx.GraphModule:
    """Return the functional graph of ``fn``, after autograd, on tensors of the given types.

    With `to_run`, torch runs the graph. Otherwise the graph is translated, and may hold operators made for that.
    """
    module = _traced(fn, types, to_run)
    # A stored tensor that depends on arguments is state if the function reads it. A second trace, which has the tensor
    # from its beginning, shows that.
    return _traced(fn, types, to_run) if module.meta["keeps"] else module


def _traced(fn: Callable[..., Sequence[Any]], types: Sequence[ArrayType], to_run: bool) -> fx.GraphModule:
    if to_run:
        return trace_on(fn, examples(types, called_on()), to_run=True)
    return FusionPatterns().applied_to(lambda chains: trace_on(fn, examples(types), to_run=False, chains=chains))


def trace_on(
    fn: Callable[..., Sequence[Any]],
    tensors: Sequence[torch.Tensor],
    *,
    to_run: bool,
    chains: FusionPatterns | None = None,
) -> fx.GraphModule:
    """Return the functional graph of ``fn``, after autograd, on tensors like `tensors`, whose sizes may be symbols.

    The graph is that of a CPU, with composite operators that oneDNN would take over written out. Each chain of
    operators in `chains` that can be one operator of jtbridge is replaced by that operator.
    """
    if to_run:
        return _trace_one_way(fn, tensors, None, None)

    def trace_one(oracle: BranchOracle) -> fx.GraphModule:
        return _trace_one_way(fn, tensors, oracle, chains)

    return with_late_scalars(lambda: traced_both_ways(trace_one))


def _trace_one_way(
    fn: Callable[..., Sequence[Any]],
    tensors: Sequence[torch.Tensor],
    oracle: BranchOracle | None,
    chains: FusionPatterns | None,
) -> fx.GraphModule:
    start_over()
    on_cpu = CudaAsCpuMode() if oracle is not None and may_be_on_gpu() else None
    # A function that is called reads closed-over tensors in each call: its graphs must not hold their values.
    known = (
        ConstantEvalMode(answers=oracle is not None)
        if on_cpu is None
        else ConstantEvalMode(stands_for=on_cpu.stands_for)
    )
    with (
        tracing(),
        random_numbers.tracing(),
        intercepted_launches(),
        WithoutFusedLstm(),
        contextlib.nullcontext() if oracle is None else OverrideMode(),
        on_cpu or contextlib.nullcontext(),
        CopiedTensors(),
    ):
        try:
            module = trace_joint(_noted(fn, oracle, chains, known), tensors)
        finally:
            keeps = known.materialize()
    module.meta["keeps"] = keeps
    if on_cpu is not None:
        with_closed_over(module)
    if oracle is not None:
        keep_statistics_wide(module.graph)
    for detaching in _DETACHING:
        for node in module.graph.find_nodes(op="call_function", target=detaching):
            node.args[0].meta["detached"] = any(user.op != "output" for user in node.users)
            node.replace_all_uses_with(node.args[0])
            module.graph.erase_node(node)
    return module


def examples(types: Sequence[ArrayType], device: str = "cpu") -> list[torch.Tensor]:
    """Return tensors of the given types to trace on; their values mean nothing."""
    return [torch.empty(type_.shape, dtype=torch_dtype(type_.dtype, "an argument"), device=device) for type_ in types]


def called_on() -> str:
    """Return the type of device on which called functions are assumed to run: graphs differ between devices."""
    return "cuda" if jax.default_backend() == "gpu" and torch.cuda.is_available() else "cpu"


def _noted(
    fn: Callable[..., Sequence[Any]],
    oracle: BranchOracle | None,
    chains: FusionPatterns | None,
    known: ConstantEvalMode,
) -> Callable[..., Sequence[Any]]:
    """Return `fn` with the modes that note the origin of nodes; with an `oracle` it also returns the conditions."""

    def run(*tensors: torch.Tensor) -> Sequence[Any]:
        modules = ModulePaths()
        recorder = contextlib.nullcontext() if chains is None else chains.recorder()
        with modules.followed(), ProvenanceMode(modules, oracle), known, recorder, none_caught():
            results = fn(*tensors)
            refuse_stale_copies(results)
        return results if oracle is None else [*results, *oracle.conditions]

    return run
