"""How an equation that stands for a whole program takes part in the policies of ``jax.checkpoint``.

Tried on jax 0.10.2. JAX has such rules for its own calls (``jit``, ``scan``); the table of rules, the partial
evaluation of a program under a policy and its removal of unused equations are not public.
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
    """Whether what is bound here becomes an equation of a program, with no transformation between."""
    return isinstance(core.trace_ctx.trace, pe.DynamicJaxprTrace)


@dataclasses.dataclass(frozen=True)
class Cut:
    """A program cut in two by a policy: all of it, and what of it is computed again from what is saved.

    Attributes:
        known: ``inputs -> (outputs..., saved...)``.
        again: ``(saved..., inputs...) -> the outputs that are not saved``.
        saved: of each saved value its position among the outputs, or None.
        again_outputs: the positions of the outputs that `again` computes.
    """

    known: ClosedJaxpr
    again: ClosedJaxpr
    saved: tuple[int | None, ...]
    again_outputs: tuple[int, ...]


def cut_by_policy(program: ClosedJaxpr, policy: Callable[..., Any]) -> Cut:
    """Cut a program of known inputs as ``jax.checkpoint`` does with its own.

    What a policy wants on another memory is saved where it is.
    """

    def saves(*args: Any, **params: Any) -> Any:
        return not isinstance(pe.ensure_enum(policy(*args, **params)), pe.RecomputeType)

    count, outputs = len(program.in_avals), program.jaxpr.outvars
    known, again, _, recomputed, number = pe.partial_eval_jaxpr_custom(
        program.jaxpr, [False] * count, [True] * count, False, False, saves
    )
    positions = {id(var): i for i, var in reversed(list(enumerate(outputs)))}
    return Cut(
        core.ClosedJaxpr(known, program.consts),
        core.ClosedJaxpr(again, program.consts),
        tuple(positions.get(id(var)) for var in known.outvars[len(known.outvars) - number :]),
        tuple(i for i, is_recomputed in enumerate(recomputed) if is_recomputed),
    )


def without_unused(program: ClosedJaxpr, used: Sequence[bool], keep: Sequence[bool]) -> tuple[ClosedJaxpr, list[bool]]:
    """A program without the outputs that are not `used`, and which of its inputs it still has: those to `keep` too."""

    jaxpr, inputs = pe.dce_jaxpr(program.jaxpr, list(used), instantiate=list(keep))
    return core.ClosedJaxpr(jaxpr, program.consts), inputs


def add_policy_rule(primitive: Any, cut: Callable[..., Any]) -> None:
    """Register what a policy makes of an equation whose inputs are all known.

    `cut(policy, equation)` returns "save", "recompute", or the first and the second equation, the outputs of the second
    that are computed again, and the variables that go from the first to the second.
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
    """Register ``prune(used outputs, equation)``, which returns the used inputs and an equation without the others."""

    def rule(used: list[bool], equation: Any) -> tuple[list[bool], Any]:
        return prune(used, equation) if any(used) else ([False] * len(equation.invars), None)

    pe.dce_rules[primitive] = rule


def new_variable(aval: Any) -> Var:
    """A variable of no program yet. Its constructor takes an abstract value since jax 0.8."""
    return core.Var(aval)


def is_dropped(variable: Any) -> bool:
    """Whether a variable stands for an output that nothing uses."""

    return isinstance(variable, core.DropVar)
