"""Questions about a function that are asked while a program is traced, on fake tensors."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Sequence

import torch

from jtbridge import _rng
from jtbridge._compat import fake_tensors, once_differentiable_in, tracing
from jtbridge._flat import SEQUENTIAL, FlatFunction, TorchFunction
from jtbridge._transforms import Jvp, Vjp, Vmap, refuse_once_differentiable
from jtbridge.errors import DifferentiationError, SequentialVmapWarning

from ._graph_reads import GraphReads
from ._trace import called_on, examples


def probe_vmap(fn: Vmap) -> None:
    """Find out before it runs whether torch.vmap can batch `fn`; if not, warn once and run it row by row."""
    flat = fn.flat
    if fn in flat.probed or fn.size == 0:
        return
    flat.probed.add(fn)
    if flat.seeded and fn.dims[len(flat.in_types) - 1] is not None:
        flat.sequential.add(fn)  # every row draws with a key of its own: no batched form could
        return
    reason = flat.behaviour.opaque or _known_wrong(flat) or flat.guarded(lambda: _vmap_fails(fn))
    if reason is None:
        return
    if SEQUENTIAL not in flat.notices:
        flat.notices.add(SEQUENTIAL)
        warnings.warn(
            f"torch.vmap cannot batch `{flat.name}` ({reason}), so its rows run one after another inside one call. "
            "The results are the same; it is slower.",
            SequentialVmapWarning,
            stacklevel=2,
        )
    flat.sequential.add(fn)


def _known_wrong(flat: FlatFunction) -> str | None:
    operator = flat.behaviour.unbatchable
    return None if operator is None else f"its result for {operator} is known to be wrong"


def _vmap_fails(fn: Vmap) -> str | None:
    try:
        with (
            fake_tensors(),
            tracing(),
            fn.state.applied(),
            _rng.tracing(),
        ):
            fn.by_torch_vmap(tuple(examples(fn.in_types, called_on())))
    except Exception as error:  # noqa: BLE001  (any failure means: row by row)
        lines = str(error).strip().splitlines()
        return f"{type(error).__name__}: {lines[0] if lines else ''}"
    return None


def check_differentiable(fn: TorchFunction, wrt: tuple[int, ...], *, again: bool) -> None:
    """Refuse a derivative that torch would refuse, or give as zero in silence.

    Args:
        fn: what is about to be differentiated.
        wrt: by which of its inputs.
        again: whether this may take a second derivative: of a derivative, or in forward mode.
    """
    flat = fn.flat
    wrt = _innermost(fn, wrt)
    if flat.behaviour.opaque or wrt in flat.checked_graphs or not (again or flat.behaviour.breaks_inner_graph):
        refuse_once_differentiable(flat, fn.order + 1)
        return
    try:
        flat.guarded(lambda: _look_at_graph(flat, wrt))
    except DifferentiationError:
        raise
    except RuntimeError:  # torch has no derivative by one of them, and forward mode may still have
        for i in wrt:
            with contextlib.suppress(RuntimeError):
                flat.guarded(lambda i=i: _look_at_graph(flat, (i,)))
    flat.checked_graphs.add(wrt)
    refuse_once_differentiable(flat, fn.order + 1)


def _look_at_graph(flat: FlatFunction, wrt: tuple[int, ...]) -> None:
    with (
        fake_tensors(),
        tracing(),
        flat.trace_state.differentiable().applied(),
        _rng.tracing(),
    ):
        inputs = [
            x.requires_grad_().clone() if i in wrt else x  # a clone, for the function may write to it
            for i, x in enumerate(examples(flat.in_types, called_on()))
        ]
        with GraphReads() as reads:
            results = flat(*inputs)
    flat.reads_graph = flat.reads_graph or reads.found
    if flat.behaviour.breaks_inner_graph:
        _refuse_broken_graph(flat, results)
    flat.once_differentiable = flat.once_differentiable or once_differentiable_in(results)


def _innermost(fn: TorchFunction, wrt: tuple[int, ...]) -> tuple[int, ...]:
    """By which of its own inputs the user's function is differentiated in a derivative of `fn`."""
    while isinstance(fn, Vjp | Jvp | Vmap):
        wrt = wrt if isinstance(fn, Vmap) else fn.wrt
        fn = fn.fn
    return wrt


def _refuse_broken_graph(flat: FlatFunction, results: Sequence[torch.Tensor]) -> None:
    for i, (result, type_) in enumerate(zip(results, flat.out_types, strict=True)):
        if type_.differentiable and not result.requires_grad:
            raise DifferentiationError(
                f"Result {i} of `{flat.name}` comes from torch.autograd.grad without `create_graph=True`, so torch has "
                "no derivative of it. Pass `create_graph=True` there, or `jax.lax.stop_gradient` the result."
            )
