"""Rules of ``jax.checkpoint``'s policies for an equation that stands for a whole program.

Tried on jax 0.10.2, 0.11.2 and 0.12.0.1. JAX has such rules for its own calls (``jit``, ``scan``). The table of rules,
the partial evaluation of a program under a policy and the removal of unused equations are not public.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from jax._src import core
from jax._src.interpreters import partial_eval as pe

if TYPE_CHECKING:  # `jax.extend` imports Pallas, which takes longer than an eager call
    from jax.extend.core import ClosedJaxpr, Var


def is_staging() -> bool:
    """Return whether a primitive that is bound now becomes an equation of a program without a transformation."""
    return isinstance(core.trace_ctx.trace, pe.DynamicJaxprTrace)


@dataclasses.dataclass(frozen=True)
class Cut:
    """A program cut in two by a policy: the whole program, and the part that is computed again from saved values.

    Attributes:
        known: ``inputs -> (outputs..., saved...)``.
        again: ``(saved..., inputs...) -> the outputs that are not saved``.
        saved: for each saved value, its position among the outputs; None if it is not an output.
        again_outputs: the positions of the outputs that `again` computes.
    """

    known: ClosedJaxpr
    again: ClosedJaxpr
    saved: tuple[int | None, ...]
    again_outputs: tuple[int, ...]


def cut_by_policy(program: ClosedJaxpr, policy: Callable[..., Any]) -> Cut:
    """Cut a program whose inputs are known, as ``jax.checkpoint`` cuts its own programs.

    A value that the policy offloads to another memory is saved in the memory where it is.
    """
    from jax.extend.core import ClosedJaxpr

    def saves(*args: Any, **params: Any) -> Any:
        return not isinstance(pe.ensure_enum(policy(*args, **params)), pe.RecomputeType)

    count, outputs = len(program.in_avals), program.jaxpr.outvars
    known, again, _, recomputed, number = pe.partial_eval_jaxpr_custom(
        program.jaxpr, [False] * count, [True] * count, False, False, saves
    )
    positions = {id(var): i for i, var in reversed(list(enumerate(outputs)))}
    return Cut(
        ClosedJaxpr(known, program.consts),
        ClosedJaxpr(again, program.consts),
        tuple(positions.get(id(var)) for var in known.outvars[len(known.outvars) - number :]),
        tuple(i for i, is_recomputed in enumerate(recomputed) if is_recomputed),
    )


def without_unused(program: ClosedJaxpr, used: Sequence[bool], keep: Sequence[bool]) -> tuple[ClosedJaxpr, list[bool]]:
    """Return a program without unused outputs, and which inputs remain: the needed inputs and the inputs to `keep`."""
    from jax.extend.core import ClosedJaxpr

    jaxpr, inputs = pe.dce_jaxpr(program.jaxpr, list(used), instantiate=list(keep))
    return ClosedJaxpr(jaxpr, program.consts), inputs


def has_custom_vjp(jaxpr: Any) -> bool:
    """Return whether a `jax.custom_vjp` is part of a program. Its primitive has no public name."""
    if any(equation.primitive.name.startswith("custom_vjp_call") for equation in jaxpr.eqns):
        return True
    return any(map(has_custom_vjp, core.subjaxprs(jaxpr)))


def add_policy_rule(primitive: Any, cut: Callable[..., Any]) -> None:
    """Register how a policy treats an equation whose inputs are all known.

    `cut(policy, equation)` returns "save", "recompute", or four values: the first equation, the second equation, the
    positions of the outputs that the second computes again, and the variables that go from the first to the second.
    """

    def rule(policy: Any, unknown: Sequence[bool], available: Sequence[bool], equation: Any) -> Any:
        count = len(equation.outvars)
        needed = [
            x
            for x, is_there in zip(equation.invars, available, strict=True)
            if isinstance(x, core.Var) and not is_there
        ]
        if any(unknown):
            return None, equation, [True] * count, [True] * count, needed
        found = cut(policy, equation)
        if found == "save":
            return equation, None, [False] * count, [False] * count, []
        if found == "recompute":
            return equation, equation, [False] * count, [True] * count, needed
        first, second, again, saved = found
        return first, second, [False] * count, [i in again for i in range(count)], [*needed, *saved]

    pe.partial_eval_jaxpr_custom_rules[primitive] = rule


def add_pruning(primitive: Any, prune: Callable[[list[bool], Any], tuple[list[bool], Any]]) -> None:
    """Register ``prune(used, equation)`` for dead-code elimination. It returns the used inputs and a new equation."""

    def rule(used: list[bool], *rest: Any) -> tuple[list[bool], Any]:
        equation = rest[-1]  # the last: jax 0.12 first passes which inputs are needed elsewhere
        return prune(used, equation) if any(used) else ([False] * len(equation.invars), None)

    pe.dce_rules[primitive] = rule


def new_variable(aval: Any) -> Var:
    """Return a variable that belongs to no program yet."""
    return core.Var(aval)


def is_dropped(variable: Any) -> bool:
    """Return whether a variable stands for an output that nothing uses."""
    return isinstance(variable, core.DropVar)
