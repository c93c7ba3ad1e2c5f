"""Tests whether torch can batch and differentiate a function, on fake tensors and while a program is traced."""

from __future__ import annotations

from jtbridge._compat import fake_tensors, once_differentiable_in, tracing
from jtbridge.core import random_numbers
from jtbridge.core.functions import SEQUENTIAL, TorchFunction, TracedFunction
from jtbridge.core.inner_autograd import refuse_broken_graph
from jtbridge.core.messages import summary_of, warn_user
from jtbridge.core.signals import raise_if_from_signal
from jtbridge.errors import DifferentiationError, SequentialVmapWarning
from jtbridge.transforms import Jvp, Vjp, Vmap, refuse_once_differentiable

from ._trace import examples
from .modes.fake_operators import FakeAsReal
from .modes.graph_reads import GraphReads
from .modes.higher_order import HigherOrderInOperators


def probe_vmap(fn: Vmap) -> None:
    """Test before `fn` runs whether torch.vmap can batch it; if not, warn once and have `fn` run row by row."""
    traced = fn.base
    if fn in traced.cache.probed or fn.size == 0:
        return
    traced.cache.probed.add(fn)
    seed = traced.seed_position
    if seed is not None and fn.dims[seed] is not None:
        traced.cache.sequential.add(fn)  # every row draws with its own key, which no batched form can do
        return
    wrong = traced.traits.unbatchable and f"its result for {traced.traits.unbatchable} is known to be wrong"
    reason = (
        traced.traits.untraceable_reason or wrong or traced.guarded(lambda: _vmap_failure_reason(fn), examines=True)
    )
    if reason is None:
        return
    if SEQUENTIAL not in traced.warnings_given:
        traced.warnings_given.add(SEQUENTIAL)
        warn_user(
            f"torch.vmap cannot batch `{traced.name}` ({reason}), so its rows run one after another inside one call. "
            "The results are the same; it is slower. Write the function for a batch, or use operators that torch.vmap "
            "supports.",
            SequentialVmapWarning,
        )
    traced.cache.sequential.add(fn)


def _vmap_failure_reason(fn: Vmap) -> str | None:
    """Return why torch.vmap fails on fake tensors on every device; None if it succeeds on one."""
    reason = None
    for device in _examined_devices(fn.base):
        try:
            with (
                fake_tensors(),
                tracing(),
                fn.state.by_default_on(device).applied(),
                random_numbers.counting_draws(),
                FakeAsReal(),
                HigherOrderInOperators(),
            ):
                fn.by_torch_vmap(tuple(examples(fn.in_types, device)))
        except Exception as error:  # noqa: BLE001  (any failure means: row by row)
            raise_if_from_signal(error)
            reason = reason or summary_of(error)
        else:
            return None
    return reason


def _examined_devices(traced: TracedFunction) -> tuple[str, ...]:
    """Return the devices to examine a function on: the device of its called graphs, and the CPU for translated ones."""
    return tuple(dict.fromkeys((traced.device, "cpu")))


def check_differentiable(fn: TorchFunction, wrt: tuple[int, ...], *, again: bool) -> None:
    """Refuse a derivative that torch would refuse, or would compute as zero without an error.

    Args:
        fn: the function to differentiate.
        wrt: the positions of the differentiated inputs.
        again: whether torch may compute a second derivative: `fn` is a derivative, or this is forward mode.
    """
    traced = fn.base
    wrt = _positions_in_user_function(fn, wrt)
    if (
        traced.traits.untraceable_reason
        or wrt in traced.cache.checked_graphs
        or not (again or traced.traits.autograd.breaks_inner_graph)
    ):
        refuse_once_differentiable(traced, fn.order + 1)
        return
    # If torch cannot trace the derivative with respect to all inputs at once, each input is examined alone.
    if not _try_to_examine(traced, wrt):
        for i in wrt:
            _try_to_examine(traced, (i,))
    traced.cache.checked_graphs.add(wrt)
    refuse_once_differentiable(traced, fn.order + 1)


def _try_to_examine(traced: TracedFunction, wrt: tuple[int, ...]) -> bool:
    """Examine the autograd graph; return whether torch can trace it.

    Raises:
        DifferentiationError: torch would compute the derivative as zero.
    """
    for device in _examined_devices(traced):
        try:
            traced.guarded(lambda device=device: _examine_graph(traced, wrt, device), examines=True)
        except DifferentiationError:
            raise
        except Exception as error:  # noqa: BLE001  (forward mode may still have a derivative)
            raise_if_from_signal(error)
            continue
        return True
    return False


def _examine_graph(traced: TracedFunction, wrt: tuple[int, ...], device: str) -> None:
    """Run a function on fake tensors, and record the facts of its autograd graph that derivatives depend on."""
    with (
        fake_tensors(),
        tracing(),
        traced.trace_state.differentiable().by_default_on(device).applied(),
        random_numbers.counting_draws(),
    ):
        inputs = [
            x.requires_grad_().clone() if i in wrt else x  # a clone, because the function may write to it
            for i, x in enumerate(examples(traced.in_types, device))
        ]
        with GraphReads() as reads, HigherOrderInOperators():
            results = traced(*inputs)
    traced.cache.reads_graph = traced.cache.reads_graph or reads.found
    if traced.traits.autograd.breaks_inner_graph:
        refuse_broken_graph(traced.name, results)
    traced.cache.once_differentiable = traced.cache.once_differentiable or once_differentiable_in(results)


def _positions_in_user_function(fn: TorchFunction, wrt: tuple[int, ...]) -> tuple[int, ...]:
    """Return the inputs that are differentiated, as positions in the arguments of the user's function.

    Args:
        fn: the user's function, or a derivative or a batch of it.
        wrt: the differentiated inputs of `fn`, if it is the user's function or a batch of it.
    """
    while isinstance(fn, Vjp | Jvp | Vmap):
        wrt = wrt if isinstance(fn, Vmap) else fn.wrt
        fn = fn.fn
    return wrt
