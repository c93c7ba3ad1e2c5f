"""Reverse mode that runs the forward once: a forward graph that also returns residuals, and a backward graph.

The function and its torch gradient are traced together, after autograd, so `autograd.Function`, `no_grad`, `detach`
and custom operators have already taken effect. Torch's partitioner then decides which residuals the forward keeps.
"""

from __future__ import annotations

import torch
from torch import fx

from jtbridge._compat import forgetting_graph_sources, materializes_gradients
from jtbridge.core import random_numbers
from jtbridge.core.functions import TorchFunction
from jtbridge.core.signals import raise_if_from_signal
from jtbridge.errors import MutationError, RandomnessError
from jtbridge.transforms import Vjp, Vmap, conjugate

from ._aten_graph import use_of
from ._attempts import GraphUse
from ._constants import copy_literals, lift_constants
from ._draws import refuse_draws
from ._packing import CannotSplit
from ._partition import Split, partition
from ._trace import trace
from .modes.graph_reads import GraphReads


def split_or_reason(fn: TorchFunction, wrt: tuple[int, ...], outs: tuple[int, ...], *, translated: bool) -> Split | str:
    """Split a function and its gradient into forward and backward, or return why this is impossible.

    Without a split, the backward runs the forward again. A batched function is traced under torch.vmap and then split.
    If it will be `translated`, the function of one row is split, and the forward and the backward are batched.
    """
    splits = fn.base.cache.splits
    key = (fn, wrt, outs, translated)
    if key not in splits:
        splits[key] = (
            _split_by_row_or_reason(fn, wrt, outs)
            if translated and isinstance(fn, Vmap)
            else _try_split_or_reason(fn, wrt, outs, translated)
        )
    return splits[key]


def _split_by_row_or_reason(fn: Vmap, wrt: tuple[int, ...], outs: tuple[int, ...]) -> Split | str:
    row = split_or_reason(fn.fn, wrt, outs, translated=True)
    if isinstance(row, str):
        return row
    seed = fn.base.seed_position
    if seed is not None and fn.dims[seed] is not None:
        return "every row of the batch draws with its own key"
    count = len(fn.in_types)
    saved = tuple(fn.dims[source] if source < count else 0 for source in row.sources)
    shared = tuple(position for position, i in enumerate(wrt) if fn.dims[i] is None)
    return Split(
        forward=Vmap(row.forward, fn.dims, fn.size),
        backward=Vmap(row.backward, (*saved, *(0,) * len(outs)), fn.size, shared),
        sources=row.sources,
    )


def _try_split_or_reason(
    fn: TorchFunction, wrt: tuple[int, ...], outs: tuple[int, ...], translated: bool
) -> Split | str:
    if fn.base.residuals == "recompute":
        return 'residuals="recompute" was asked for'
    traits = fn.base.traits
    reason = fn.base.untranslatable_reason if translated else traits.untraceable_reason
    if reason:
        return f"it cannot be traced: {reason}"
    if traits.autograd.unseen_write_reason:
        return traits.autograd.unseen_write_reason
    if fn.base.seeded and fn.in_types[-1].shape != random_numbers.SEED_SHAPE:
        return "every row of the batch draws with its own key"
    if fn.order > 0:
        return "only first derivatives keep residuals"
    try:
        with forgetting_graph_sources():
            joint = fn.base.guarded(lambda: _joint_graph(fn, wrt, outs, translated), of_trace=translated)
            return partition(fn, joint, wrt, outs)
    except CannotSplit as reason:
        return str(reason)
    except (MutationError, RandomnessError):
        raise
    except Exception as error:  # noqa: BLE001  (torch can still run a function that it cannot trace)
        raise_if_from_signal(error)
        return f"{type(error).__name__} while tracing its gradient: {error}"


def _joint_graph(fn: TorchFunction, wrt: tuple[int, ...], outs: tuple[int, ...], translated: bool) -> fx.GraphModule:
    """Trace the joint graph of a function: from arguments and cotangents to results and gradients."""
    pullback = Vjp(fn, wrt, outs)
    count = len(fn.in_types)

    def joint(*tensors: torch.Tensor) -> list[torch.Tensor]:
        cotangents = [conjugate(ct) for ct in tensors[count:]]
        reads = GraphReads()
        results, grads = pullback.by_autograd(tensors[:count], cotangents, around=reads)
        fn.base.cache.reads_graph = fn.base.cache.reads_graph or reads.found
        if len(outs) > 1 and (reads.hooks or not materializes_gradients([results[o] for o in outs])):
            raise CannotSplit("its backward may treat a gradient of zeros and a missing gradient differently")
        return [*(y.detach() for y in results), *(conjugate(g) for g in grads)]

    device = "cpu" if translated else fn.base.device
    with fn.base.trace_state.differentiable().by_default_on(device).applied():
        called = GraphUse.CALL if isinstance(fn, Vmap) else GraphUse.GRADIENT
        module = trace(joint, pullback.in_types, use_of(fn.base) if translated else called, device=device)
    refuse_draws(pullback, module)
    lift_constants(module, fn.base)
    if translated:
        copy_literals(module)
    return module
