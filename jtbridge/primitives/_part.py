"""``torch_part[fn, part](x..., saved...) -> outputs``: a part of a translated forward pass.

A policy of ``jax.checkpoint`` decides for every operation whether its result is saved or computed again. The translated
program of a ``torch_forward`` is cut in two by the policy's decisions on the operations of the program:

    first part    x -> (y, residuals, saved)
    second part   (x, saved) -> the y and residuals that are not saved

As in ``torch_forward``, the tangents of all outputs except y are zero: these outputs are functions of x, and the
functions that use them are differentiated with respect to x.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax.extend.core import ClosedJaxpr
from jax.interpreters import ad, batching

from jtbridge._compat import add_policy_rule, add_pruning, cut_by_policy, is_dropped, new_variable, without_unused
from jtbridge.core.array_types import ArrayType
from jtbridge.core.dtypes import canonical_dtype
from jtbridge.core.functions import TorchFunction
from jtbridge.core.primitive_rules import batch_first, batch_size, with_sharded_rows, zero_tangents
from jtbridge.transforms import Vmap
from jtbridge.translate import ProgramPart, translate

from ._binding import traced_tangents
from ._common import bind, new_primitive, will_translate
from ._forward import torch_forward_p

torch_part_p = new_primitive("torch_part", lambda *args, fn, part, results: (part, args))
Results = tuple[int | None, ...]  # for each output of a part, its position in the function's results; None for others


# jvp:  dy = Df(x) dx, and zero for all other outputs.
def _jvp(
    primals: Sequence[Any],
    tangents: Sequence[Any],
    *,
    fn: TorchFunction,
    part: TorchFunction,
    results: Results,
    backend: str,
) -> Any:
    values = bind(torch_part_p, *primals, fn=fn, part=part, results=results, backend=backend)
    count = len(fn.in_types)
    like = [np.broadcast_to(np.zeros((), t.dtype), t.shape) for t in fn.out_types]
    of_results = traced_tangents(fn, like, primals[:count], tangents[:count], backend)
    zeros = zero_tangents(values)
    return values, [zero if i is None else of_results[i] for i, zero in zip(results, zeros, strict=True)]


# batching:  one call of the function, and of the part, for the whole batch.
def _batch(
    args: Sequence[Any],
    dims: Sequence[Any],
    *,
    fn: TorchFunction,
    part: TorchFunction,
    results: Results,
    backend: str,
) -> Any:
    size = batch_size(args, dims)
    args, dims = batch_first(args, dims)
    batched = Vmap(part, dims, size)
    values = bind(
        torch_part_p,
        *args,
        fn=Vmap(fn, dims[: len(fn.in_types)], size),
        part=batched,
        results=results,
        backend=backend,
    )
    return with_sharded_rows(values, args, dims), [0] * len(values)


def _policy_rule(policy: Callable[..., Any], equation: Any) -> Any:
    """Cut a ``torch_forward`` in two by a policy.

    The result is "save" or "recompute" for the whole equation, or the two equations in the form of `add_policy_rule`.
    """
    fn, forward, backend = (equation.params[name] for name in ("fn", "forward", "backend"))
    avals = [x.aval for x in equation.invars]
    if not will_translate(forward, backend):
        return "save" if policy(torch_forward_p, *avals, **equation.params) is True else "recompute"
    cut = cut_by_policy(translate(forward), policy)
    if not cut.again.jaxpr.eqns:
        return "save"
    # Values inside the program may be 64-bit numbers or random keys, which variables outside it may not be.
    if not cut.saved or not all(map(_may_be_saved, cut.again.in_avals[: len(cut.saved)])):
        return "recompute"
    outs = equation.outvars
    saved = [
        new_variable(aval) if i is None or is_dropped(outs[i]) else outs[i]
        for i, aval in zip(cut.saved, cut.again.in_avals, strict=False)
    ]
    is_new = [variable not in outs for variable in saved]
    first, _ = without_unused(cut.known, [True] * len(outs) + is_new, [True] * len(avals))
    count = len(saved)
    # The inputs of the function come first, then the saved values.
    order = [*range(count, count + len(avals)), *range(count)]
    second = _reordered(cut.again, order)

    def part(program: ClosedJaxpr, invars: list[Any], outvars: list[Any], results: Results) -> Any:
        return equation.replace(
            invars=invars,
            outvars=outvars,
            primitive=torch_part_p,
            params={"fn": fn, "part": _part_of(fn, program), "results": results, "backend": backend},
        )

    of_outputs: list[int | None] = [i if i < len(fn.out_types) else None for i in range(len(outs))]
    added = [variable for variable, new in zip(saved, is_new, strict=True) if new]
    return (
        part(first, equation.invars, [*outs, *added], (*of_outputs, *[None] * len(added))),
        part(
            second,
            [*equation.invars, *saved],
            [outs[i] for i in cut.again_outputs],
            tuple(of_outputs[i] for i in cut.again_outputs),
        ),
        cut.again_outputs,
        saved,
    )


def _may_be_saved(aval: Any) -> bool:
    return isinstance(aval.dtype, np.dtype) and canonical_dtype(aval.dtype) == aval.dtype


def _reordered(program: ClosedJaxpr, order: Sequence[int]) -> ClosedJaxpr:
    invars = program.jaxpr.invars
    jaxpr = program.jaxpr.replace(
        invars=[invars[i] for i in order], debug_info=program.jaxpr.debug_info.with_unknown_names()
    )
    return ClosedJaxpr(jaxpr, program.consts)


def _part_of(fn: TorchFunction, program: ClosedJaxpr) -> ProgramPart:
    types = [tuple(ArrayType(a.shape, a.dtype) for a in avals) for avals in (program.in_avals, program.out_avals)]
    return ProgramPart(fn.base, program, *types)


def _prune(used: list[bool], equation: Any) -> tuple[list[bool], Any]:
    """Remove the unused outputs of a part, so that nothing is saved for them."""
    fn, part, results = (equation.params[name] for name in ("fn", "part", "results"))
    if not isinstance(part, ProgramPart):
        return [True] * len(equation.invars), equation
    count = len(fn.in_types)
    keep = [i < count for i in range(len(part.in_types))]
    program, inputs = without_unused(part.program, used, keep)
    pruned = equation.replace(
        invars=[x for x, is_used in zip(equation.invars, inputs, strict=True) if is_used],
        outvars=[x for x, is_used in zip(equation.outvars, used, strict=True) if is_used],
        params={
            **equation.params,
            "part": _part_of(fn, program),
            "results": tuple(i for i, is_used in zip(results, used, strict=True) if is_used),
        },
    )
    return inputs, pruned


ad.primitive_jvps[torch_part_p] = _jvp
batching.primitive_batchers[torch_part_p] = _batch
add_policy_rule(torch_forward_p, _policy_rule)
add_pruning(torch_part_p, _prune)
