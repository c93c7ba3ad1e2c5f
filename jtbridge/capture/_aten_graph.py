"""The functional ATen graph of a torch function that is to be translated."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from jtbridge._compat import forgetting_graph_sources
from jtbridge.core.functions import TorchFunction, TracedFunction
from jtbridge.core.messages import summary_of
from jtbridge.core.signals import raise_if_from_signal
from jtbridge.errors import JtbridgeError, TranslationError
from jtbridge.transforms import Jvp, Vjp

from ._attempts import REVISIONS, Attempt, GraphUse, Outcome, Revision
from ._constants import copy_literals, lift_constants
from ._draws import refuse_draws
from ._graph_function import GraphFunction
from ._trace import trace


def aten_graph(fn: TorchFunction) -> fx.GraphModule:
    """Return the functional ATen graph of a torch function that is not batched.

    Raises:
        TranslationError: torch cannot trace the function.
    """
    traced = fn.base
    if isinstance(fn, GraphFunction):
        return fn.module
    if isinstance(fn, TracedFunction) and fn.graph is not None:
        return fn.graph
    if traced.untranslatable_reason:
        raise TranslationError(f"`{traced.name}` cannot be traced: {traced.untranslatable_reason}")
    if fn is not traced and traced.traits.autograd.unseen_write_reason:
        raise TranslationError(
            f"A derivative of `{traced.name}` cannot be traced: {traced.traits.autograd.unseen_write_reason}"
        )

    def run(*tensors: torch.Tensor) -> Sequence[torch.Tensor]:
        return [y.detach() for y in fn(*tensors)]

    revisions = (*REVISIONS, _without_forward_mode(fn))

    def graph() -> fx.GraphModule:
        module = trace(run, fn.in_types, use_of(traced), revisions)
        refuse_draws(fn, module)
        lift_constants(module, traced)
        copy_literals(module)
        return module

    try:
        with forgetting_graph_sources(), fn.state.applied():
            module = traced.guarded(graph, of_trace=True)
    except JtbridgeError:
        raise
    except Exception as error:
        raise_if_from_signal(error)
        found = summary_of(error)
        if traced.traits.has_dynamic_sizes:
            found = (
                f"{traced.traits.untraceable_reason}, and the regions that depend on these cannot run alone: {found}"
            )
        raise TranslationError(f"`{traced.name}` cannot be traced ({type(fn).__name__}): {found}") from error
    module.graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))
    return module


def use_of(traced: TracedFunction) -> GraphUse:
    """Return the purpose of the translated graphs of a function and of its derivatives."""
    if traced.traits.has_dynamic_sizes:
        return GraphUse.REGIONS
    return GraphUse.KERNELS if traced.fuses_chains else GraphUse.TRANSLATE


def _without_forward_mode(fn: TorchFunction) -> Revision:
    """Return a revision that computes the forward derivatives in `fn` by two reverse modes if forward mode fails.

    Torch's forward mode makes zeros on another device, which cannot always be traced. Where it fails inside a trace,
    `Jvp` continues with two reverse modes. The graph of that trace also has the operators from before the failure, so
    `fn` is traced again without forward mode.
    """
    by_reverse_mode = fn.base.cache.double_reverse
    count = len(by_reverse_mode)

    def revise(attempt: Attempt, outcome: Outcome) -> tuple[Attempt, str] | None:
        nonlocal count
        error = outcome.module
        if isinstance(error, Exception) and not isinstance(error, JtbridgeError):
            inner = fn
            while isinstance(inner, Jvp | Vjp):
                if isinstance(inner, Jvp):
                    by_reverse_mode.add(inner)
                inner = inner.fn
        before, count = count, len(by_reverse_mode)
        return (attempt, "torch's forward mode cannot be traced in it") if count > before else None

    return revise
