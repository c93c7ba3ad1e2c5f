"""Helpers of the primitives of eager calls: runs of torch on arrays, with or without a graph, and batch axes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.interpreters import ad, mlir

from jtbridge._compat import ArrayImpl, call_aval, run_outside_transforms
from jtbridge.core.debug import check_results
from jtbridge.core.functions import SEQUENTIAL, TorchFunction
from jtbridge.core.inner_autograd import refuse_broken_graph
from jtbridge.core.loans import Loan, protected
from jtbridge.core.messages import summary_of, text_of, warn_user
from jtbridge.core.primitive_rules import describe
from jtbridge.core.signals import raise_if_from_signal
from jtbridge.errors import DifferentiationError, MutationError, SequentialVmapWarning
from jtbridge.state import StateBeforeRun
from jtbridge.transforms import SetGuard, StoredTensorError

from ._arrays import MAX_COPIED_BYTES, Placement, copied_tensor, is_copied, shared_tensor
from ._function import EagerFunction, as_captured
from ._graph import FAMILIES, AutogradGraph, Family, eager_function, new_leaf, recording, refuse_other_graphs
from ._recorded_run import InnerAutograd

Result = TypeVar("Result")


def as_arrays(values: Sequence[Any]) -> list[jax.Array]:
    """Return concrete operands as JAX arrays on the device of the first committed operand, or else of the first one.

    As in JAX, an uncommitted array, such as a cotangent that JAX made on its default device, follows a committed one.
    A tangent or a cotangent that lies on several devices is gathered.
    """
    arrays = [x if isinstance(x, ArrayImpl) else jnp.asarray(x) for x in values]
    places = [x.sharding.device_set for x in arrays]
    if all(place == places[0] and len(place) == 1 for place in places):
        return arrays
    on_one = [x for x in arrays if len(x.sharding.device_set) == 1 and not _is_token(x)]
    first = next((x for x in on_one if x.committed), on_one[0] if on_one else None)
    device = jax.devices()[0] if first is None else first.device
    committed = first is None or first.committed
    return [
        x if _is_token(x) or place == {device} else _moved(x, device, committed=committed)
        for x, place in zip(arrays, places, strict=True)
    ]


def _moved(array: jax.Array, device: jax.Device, *, committed: bool) -> jax.Array:  # type: ignore[valid-type]
    """Return an array on another device, committed to it if `committed` is true or the array was committed."""
    if committed or array.committed:
        return jax.device_put(array, device)
    with jax.default_device(device):
        return jnp.copy(array)


def _is_token(array: jax.Array) -> bool:
    """Return whether an array may be a token, whose graph is an attribute that a copy of the array would lose."""
    return not array.size and array.dtype == np.uint8


@run_outside_transforms
def run(fn: TorchFunction, operands: Sequence[Any]) -> list[jax.Array]:
    """Return the results of a function on concrete arrays, under this thread's settings of torch."""
    arrays = as_arrays(operands)
    loans: list[Loan] = []  # they end after the results have been exported

    def once() -> list[torch.Tensor]:
        # A derivative needs autograd, whatever the caller has set; the function itself runs under the caller's setting.
        with recording() if fn.order else contextlib.nullcontext():
            tensors, loan = _tensors_and_loan(arrays)
            loans.append(loan)
            with protected():
                results = list(fn(*tensors))
            refuse_other_graphs(eager_function(fn).name, results, None)
            return results

    with without_side_effects(eager_function(fn)) if fn.order else contextlib.nullcontext():
        results = row_by_row_if_needed(fn, once)
    return results_to_jax(results, arrays, fn)


@contextlib.contextmanager
def without_side_effects(base: EagerFunction) -> Iterator[None]:
    """Raise after the block if the run of the function in the block, for a derivative, had side effects.

    A derivative without a kept graph runs the function again. If the function changes its state or draws without a key,
    this run differs from the run that gave the values.

    Raises:
        DifferentiationError: the function changes its state or draws without a key. The state is restored.
    """
    kind = ("derivative", base.in_types)
    if kind in base.clean_runs:
        yield
        return
    before, drawn_from = StateBeforeRun(base.name, base.roots()), torch.get_rng_state()
    yield
    changed = before.changed()
    draws = not base.seeded and not torch.equal(drawn_from, torch.get_rng_state())
    if not changed and not draws:
        if len(base.clean_runs) < _MAX_CLEAN_RUNS:
            base.clean_runs.add(kind)
        return
    torch.set_rng_state(drawn_from)
    with contextlib.suppress(MutationError):
        before.undo()
    what = f"changes {changed}" if changed else "draws random numbers without `rng=`"
    raise DifferentiationError(
        f"`{base.name}` {what} each time it runs, and this derivative (of a forward derivative, for example) runs it "
        "again: the result would be the derivative of another run than the one that gave the values. "
        + ("Return the new state." if changed else "Pass `rng=`.")
    )


@run_outside_transforms
def run_recorded(fn: TorchFunction, operands: Sequence[Any], wrt: Sequence[int]) -> tuple[list[jax.Array], Any]:
    """Return the results of a function on concrete arrays, and the graph that autograd recorded of the run.

    A differentiated operand (`wrt`) without the batch axis that its type has is repeated along that axis.
    """
    arrays = as_arrays(operands)
    base, types = eager_function(fn), fn.in_types

    def once() -> AutogradGraph:
        family = Family()
        with recording():
            inputs, loan = _tensors_and_loan(arrays)
        with recording(), protected(), InnerAutograd() as inner:
            given = list(inputs)
            for i in wrt:
                if inputs[i].shape != types[i].shape:
                    inputs[i] = inputs[i].expand(types[i].shape).contiguous()
                inputs[i] = new_leaf(inputs[i], family)
                given[i] = _not_a_leaf(inputs[i])
            outputs = fn(*given)
        if inner.runs_backward:
            for i in wrt:
                inputs[i].grad = None
        if inner.breaks_graph:
            refuse_broken_graph(base.name, outputs)
        base.refuse_hidden_tensors()
        refuse_other_graphs(base.name, outputs, family)
        FAMILIES.add(family)
        seed = None if base.seed_position is None else inputs[base.seed_position]
        return AutogradGraph(inputs, outputs, fn.order, loan, family, has_hooks=inner.has_hooks, seed=seed)

    with without_side_effects(base) if fn.order else contextlib.nullcontext():
        graph = row_by_row_if_needed(fn, once)
    # All results are copied: autograd may have saved a result for the backward, and the graph refers to all of them.
    place = Placement(arrays)
    results = [place.copied(y, base.name) for y in graph.outputs]
    place.release()
    check_results(describe(fn), results)
    return results, graph


def results_to_jax(results: list[torch.Tensor], arrays: list[jax.Array], fn: TorchFunction) -> list[jax.Array]:
    """Return results of `fn` as arrays on the device of the arguments.

    The list `results` is emptied, so that an array can take over the memory of its tensor.
    """
    place, name = Placement(arrays), eager_function(fn).name
    found = [place.array(results, name) for _ in range(len(results))]
    found.reverse()
    place.release()
    check_results(describe(fn), found)
    return found


_STORES_TENSORS = "stores tensors"  # a notice: the function has stored a tensor of a batch, and may do so again
_MAX_CLEAN_RUNS = 512  # in `clean_runs`; beyond these, the state is saved before every run of another kind


def row_by_row_if_needed(fn: TorchFunction, once: Callable[[], Result]) -> Result:
    """Return the result of a run. If torch.vmap cannot batch the function, run again row by row."""
    base = eager_function(fn)
    if base.row_by_row or fn is base or not is_batched(fn):
        return once()
    batch = (_transformations(fn), base.in_types)
    # A failed attempt is undone, because its side effects belong to no row. Preparing for that takes time, and is
    # skipped if the last attempt succeeded without side effects.
    before = None if batch in base.clean_runs else StateBeforeRun(base.name, base.roots())
    try:
        # Only where needed: under any dispatch mode, torch.vmap of `torch.cond` gives a tuple (torch 2.13).
        with SetGuard() if before is not None and "set_" in before.names else contextlib.nullcontext():
            result = once()
        is_clean = before is not None and not before.changed()
        if before is not None and not is_clean:
            _refuse_state_of_rows(before, base)
    except Exception as error:  # noqa: BLE001  (whatever torch.vmap raises; a fault of the rows is raised again)
        raise_if_from_signal(error)
        base.row_by_row = True
        base.clean_runs.discard(batch)
        has_stored = isinstance(error, StoredTensorError)
        if has_stored:
            base.warnings_given.add(_STORES_TENSORS)
        if before is None:
            before = StateBeforeRun(base.name, base.roots())
            if has_stored:
                before.refuse_escaped()
            result = once()
            before.refuse_repetition()
        else:
            with before.undo():
                result = once()
        if SEQUENTIAL not in base.warnings_given:
            base.warnings_given.add(SEQUENTIAL)
            warn_user(
                f"torch.vmap cannot batch `{base.name}` ({summary_of(error)}), so its rows run one after another. The "
                "results are the same; it is slower. Write the function for a batch, or use operators that torch.vmap "
                "supports.",
                SequentialVmapWarning,
            )
        return result
    if is_clean and _STORES_TENSORS not in base.warnings_given and len(base.clean_runs) < _MAX_CLEAN_RUNS:
        base.clean_runs.add(batch)
    return result


def _refuse_state_of_rows(before: StateBeforeRun, base: EagerFunction) -> None:
    """Raise if a batched run wrote once to tensors that each row must write to."""
    if written := before.changed_tensors():
        raise NotImplementedError(f"it writes to {written} once for the batch, and must do so once for each row")
    if StateBeforeRun(base.name, base.roots()).escaped():  # stored by code that no mode of torch sees
        raise StoredTensorError


def _transformations(fn: TorchFunction) -> tuple[type, ...]:
    kinds = []
    while fn is not fn.base:
        kinds.append(type(fn))
        fn = fn.fn  # type: ignore[attr-defined]
    return tuple(kinds)


def escapes_vmap(error: Exception) -> bool:
    """Return whether a backward failed because it reran code that had run under torch.vmap, as a checkpoint does."""
    return isinstance(error, RuntimeError) and "escaped from inside a function being vmapped" in text_of(error)


def is_batched(fn: TorchFunction) -> bool:
    """Return whether a function is a batch, or a derivative of one."""
    while fn is not fn.base:
        if hasattr(fn, "dims"):
            return True
        fn = fn.fn  # type: ignore[attr-defined]
    return False


def _tensors_and_loan(arrays: Sequence[jax.Array]) -> tuple[list[torch.Tensor], Loan]:
    """Return arrays as tensors, some of them copied (:func:`is_copied`), and the loan of the other arrays' memory."""
    copied = [is_copied(array) for array in arrays]
    tensors = [copied_tensor(x) if copy else shared_tensor(x) for x, copy in zip(arrays, copied, strict=True)]
    return tensors, Loan([tensor for tensor, copy in zip(tensors, copied, strict=True) if not copy])


class _Alias(torch.autograd.Function):
    """The identity without a copy. Its result is neither a leaf nor a view, so torch code may write to it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad


def _not_a_leaf(leaf: torch.Tensor) -> torch.Tensor:
    return leaf.clone() if leaf.numel() * leaf.itemsize <= MAX_COPIED_BYTES else _Alias.apply(leaf)  # type: ignore[return-value]


def result_avals(fn: TorchFunction, in_avals: Sequence[Any]) -> list[Any]:
    """Return the abstract values of the results of a function."""
    return [call_aval(type_.shape, type_.dtype, in_avals) for type_ in fn.out_types]


def token_aval(batch: tuple[int, ...], in_avals: Sequence[Any]) -> Any:
    """Return the abstract value of a token."""
    return call_aval((*batch, 0), np.dtype(np.uint8), in_avals)


def bound_in_program(fn: TorchFunction, operands: Sequence[Any]) -> list[Any]:
    """Bind the function as part of a traced program. It is captured once for each eager call.

    With a key, the program calls torch, because a translated function would draw other numbers than the eager call did.
    """
    from jtbridge._backends import calling  # these import the translation, which is slow
    from jtbridge.primitives import torch_call

    backend = calling().name if eager_function(fn).seeded else "auto"
    return torch_call(*operands, fn=as_captured(fn), backend=backend)


def lower_as(program: Callable[..., Sequence[Any]]) -> Callable[..., Any]:
    """Return a lowering rule that emits ``program(*operands, **params)``, a JAX function."""

    def rule(ctx: mlir.LoweringRuleContext, *operands: Any, **params: Any) -> Any:
        return mlir.lower_fun(lambda *xs: program(*xs, **params), multiple_results=True)(ctx, *operands)

    return rule


def is_symbolic_zero(tangent: Any) -> bool:
    """Return whether a tangent or cotangent is symbolically zero."""
    return type(tangent) is ad.Zero
