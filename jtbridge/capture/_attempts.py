"""Attempts to trace a function to a graph, and the reasons for another attempt.

An attempt may fail, or may give a graph that does not compute what the function computes. Each revision in `REVISIONS`
examines the outcome of an attempt and may propose other settings. :func:`repeat` makes attempts until no revision
proposes other settings.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Sequence

from torch import fx

from jtbridge.triton.launches import may_need_late_scalars

from ._request import Trial
from .chains import CallRecorder

_MAX_ROUNDS = 4  # attempts with fused chains


class GraphUse(enum.Enum):
    """The purpose of a graph. It decides which operators the graph may have."""

    RUN = "torch runs it, and it is neither a gradient nor a batch"
    GRADIENT = "torch runs it, and it is the gradient of a function that is not a batch"
    CALL = "torch runs it"
    TRANSLATE = "it is translated, and may hold operators that only jtbridge has"
    KERNELS = "it is translated, and chains of operators that one kernel can compute become one operator"
    REGIONS = "it is translated, and torch runs the regions with sizes or numbers that depend on data"

    @property
    def is_called(self) -> bool:
        return self in (GraphUse.RUN, GraphUse.GRADIENT, GraphUse.CALL)


@dataclasses.dataclass(frozen=True)
class Attempt:
    """The settings of one attempt.

    Attributes:
        use: the purpose of the graph.
        fuses: whether chains of operators are replaced by fused operators.
        unfused: the numbers of the chains that are not fused.
        round: the number of this attempt among the attempts that fuse chains.
        late_scalars: whether kernels read the numbers that the function reads from tensors and passes to them.
        knows_stored: whether the attempt begins with the tensors that the function stored in an earlier attempt.
        cause: the error of the attempt without late scalars. It is raised if the attempt with them fails too.
    """

    use: GraphUse
    fuses: bool = False
    unfused: frozenset[int] = frozenset()
    round: int = 1
    late_scalars: bool = False
    knows_stored: bool = False
    cause: Exception | None = None

    def __str__(self) -> str:
        settings = [
            ("fused chains" + (f" but {len(self.unfused)}" if self.unfused else ""), self.fuses),
            ("numbers that kernels read", self.late_scalars),
            ("tensors that were stored", self.knows_stored),
        ]
        wanted = [name for name, is_set in settings if is_set]
        return f"graph with {', '.join(wanted)}" if wanted else "graph"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The outcome of one attempt.

    Attributes:
        module: the graph, or the error.
        recorders: the recorders of chains, one for each path through the function.
    """

    module: fx.GraphModule | Exception
    recorders: Sequence[CallRecorder] = ()


# Returns the next attempt and the reason to reject the last one; None to accept the last one.
Revision = Callable[[Attempt, Outcome], tuple[Attempt, str] | None]


def repeat(run: Callable[[Attempt], Outcome], first: Attempt, revisions: Sequence[Revision]) -> fx.GraphModule:
    """Return the graph of the first attempt that no revision rejects, with all attempts in ``meta["trials"]``.

    Raises:
        Exception: the error of the last attempt.
    """
    attempt = first
    trials: list[Trial] = []
    while True:
        outcome = run(attempt)
        revised = next(filter(None, (revise(attempt, outcome) for revise in revisions)), None)
        if revised is None:
            break
        trials.append(Trial(str(attempt), revised[1]))
        attempt = revised[0]
    if isinstance(outcome.module, Exception):
        raise outcome.module
    outcome.module.meta["trials"] = (*trials, Trial(str(attempt)))
    return outcome.module


def _with_late_scalars(attempt: Attempt, outcome: Outcome) -> tuple[Attempt, str] | None:
    error = outcome.module
    if attempt.use.is_called or attempt.late_scalars or not isinstance(error, Exception):
        return None
    if not may_need_late_scalars(error):
        return None
    return dataclasses.replace(attempt, late_scalars=True, cause=error), "it needs a number that is in a tensor"


def _with_fewer_chains(attempt: Attempt, outcome: Outcome) -> tuple[Attempt, str] | None:
    """Reject the chains that hide a value that is used elsewhere, or all chains if it is not known which do."""
    replaced = [recorder for recorder in outcome.recorders if recorder.replaced]
    if not replaced:
        return None
    without = dataclasses.replace(attempt, fuses=False)
    if isinstance(outcome.module, Exception):
        return without, f"it fails with fused chains: {type(outcome.module).__name__}"
    if any(recorder.reads_history for recorder in replaced):
        return without, "it reads `grad_fn` or `data` of a tensor"
    misused = frozenset().union(*(recorder.misused for recorder in outcome.recorders))
    if not misused:
        return None
    if attempt.round == _MAX_ROUNDS:
        return without, f"after {_MAX_ROUNDS} attempts a chain hides a value that is used elsewhere"
    fewer = dataclasses.replace(attempt, unfused=attempt.unfused | misused, round=attempt.round + 1)
    return fewer, f"{len(misused)} of the chains hide a value that is used elsewhere"


def _with_stored_tensors(attempt: Attempt, outcome: Outcome) -> tuple[Attempt, str] | None:
    # A stored tensor that depends on arguments is state if a later call reads it. The next attempt starts with the
    # tensor stored, and so shows whether the function reads it.
    if isinstance(outcome.module, Exception) or attempt.knows_stored or not outcome.module.meta["stores_tensors"]:
        return None
    return dataclasses.replace(attempt, knows_stored=True), "it stored a tensor that depends on its arguments"


REVISIONS: tuple[Revision, ...] = (_with_late_scalars, _with_fewer_chains, _with_stored_tensors)
