"""Report of the side effects of a function: :func:`jtbridge.purity`."""

from __future__ import annotations

import dataclasses
from typing import Any

from jtbridge.calls._wrap import as_wrapped

from ._examination import Examination
from ._table import as_table

_REMEDIES = {
    "argument mutated": "Return the new value; for a tensor `wrap(..., return_mutated=True)` does.",
    "state written": 'Return the new value and pass it to the next call, or wrap with `effects="ordered"`.',
    "lazily built": "Nothing to do: it is a constant, built in the first call.",
    "state read": "Read when JAX traces: pass it as an argument if it changes, a module by `jtbridge.module(model)`.",
    "random numbers": "Pass a JAX key as `rng=`, from which torch then draws, or pass the numbers as an argument.",
    "output": 'Under `jit` it runs when JAX traces: use `jax.debug.print`, or wrap with `effects="ordered"`.',
    "file": "Open it outside and pass what it holds as an argument.",
    "clock": "Under `jit` it is read when JAX traces: pass the time as an argument.",
    "input": "Ask outside and pass the answer as an argument.",
    "results differ": "Two runs on the same arguments and state gave different results: pass what they depend on.",
}
_HARMLESS = ("lazily built", "state read")


@dataclasses.dataclass(frozen=True)
class PurityFinding:
    """One side effect of a function, or one read of state whose value ``jit`` freezes.

    Attributes:
        kind: "argument mutated", "state written", "lazily built", "state read", "random numbers", "output", "file",
            "clock", "input" or "results differ".
        what: the name of the state or function concerned, such as ``counter["n"]`` or ``print``.
        line: file and line of the first occurrence, such as ``"train.py:12"``; empty if the line is not known.
        remedy: how to write the function instead.
    """

    kind: str
    what: str
    line: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.what}{f' ({self.line})' if self.line else ''}. {self.remedy}"


@dataclasses.dataclass(frozen=True)
class PurityReport:
    """Report of :func:`purity`. Printing it gives a table.

    Attributes:
        function: the name of the function.
        findings: the side effects of the function, each once.
    """

    function: str
    findings: tuple[PurityFinding, ...]

    @property
    def is_pure(self) -> bool:
        """Return whether the only findings are state that is read and constants that are built once."""
        return all(finding.kind in _HARMLESS for finding in self.findings)

    def of_kind(self, kind: str) -> tuple[PurityFinding, ...]:
        """Return the findings of one kind."""
        return tuple(finding for finding in self.findings if finding.kind == kind)

    def rows(self) -> list[tuple[str, str]]:
        """Return the report as pairs of heading and text."""
        return [
            ("function", self.function),
            ("pure", "yes" if self.is_pure else "no"),
            *((finding.kind, str(finding)) for finding in self.findings),
        ]

    def __str__(self) -> str:
        return as_table(self.rows())

    __repr__ = __str__


def purity(fn: Any, *args: Any, **kwargs: Any) -> PurityReport:
    """Run a function on copies of its arguments, and report its side effects.

    The function runs two to four times, in torch, on real values. The state that it reaches and the generators are
    restored after each run. Its output is printed, and its files are written; ``input()`` ends the run. Side effects
    inside C code, and in branches that are not taken for these arguments, are not seen. A profiler or debugger of this
    thread does not see the runs.

    Args:
        fn: a wrapped function, or a torch function.
        args, kwargs: the arguments of a call, ``rng=`` included. With ``rng=``, a function that draws with torch is
            pure.

    Returns:
        A report to print.

    Raises:
        Exception: any exception that the function raises.

    Example:
        >>> import jax.numpy as jnp, jtbridge
        >>> counter = {"n": 0}
        >>> def f(x):
        ...     counter["n"] += 1
        ...     return x * 2
        >>> report = jtbridge.purity(f, jnp.ones(3))
        >>> report.is_pure, [finding.kind for finding in report.findings if finding.kind != "state read"]
        (False, ['state written'])
    """
    examination = Examination(as_wrapped(fn), args, dict(kwargs))
    examination.run()
    order = list(_REMEDIES)
    found = sorted(examination.found.items(), key=lambda item: order.index(item[0][0]))
    remedies = examination.remedies
    return PurityReport(
        examination.name,
        tuple(PurityFinding(kind, what, line, remedies.get(what, _REMEDIES[kind])) for (kind, what), line in found),
    )
