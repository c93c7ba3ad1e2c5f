"""Findings, and the report that the doctor returns."""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
import textwrap
from typing import Any

OK, NOTE, WARNING, FAILURE = "ok", "note", "warning", "failure"
_COLORS = {OK: 32, NOTE: 36, WARNING: 33, FAILURE: 31}
_WIDTH = 120


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of the doctor's report.

    Attributes:
        group: the group of checks, such as "versions".
        name: the subject, such as "triton".
        status: "ok"; "note" for a part that is not there and need not be; "warning"; or "failure" for something that
            should work and does not.
        text: what was found.
        fix: what to do; empty if there is nothing to do.
    """

    group: str
    name: str
    status: str
    text: str
    fix: str = ""


@dataclasses.dataclass(frozen=True)
class DoctorReport:
    """Report of :func:`jtbridge.doctor`. Printing it gives text.

    Attributes:
        findings: all findings, in the order of the report.
        seconds: how long the checks took.
    """

    findings: tuple[Finding, ...]
    seconds: float

    @property
    def healthy(self) -> bool:
        """Whether no finding is a failure."""
        return not self.of(FAILURE)

    def of(self, status: str) -> tuple[Finding, ...]:
        """Return the findings of a status: "ok", "note", "warning" or "failure"."""
        return tuple(finding for finding in self.findings if finding.status == status)

    def text(self, *, colors: bool = False) -> str:
        """Return the report as text, with escape codes of terminals for `colors`."""
        width = max((len(finding.name) for finding in self.findings), default=0)
        lines: list[str] = []
        for group, findings in itertools.groupby(self.findings, lambda finding: finding.group):
            lines += ["", _styled(group, 1) if colors else group]
            for finding in findings:
                lines += _lines(finding, width, colors)
        return "\n".join([*lines[1:], "", self._verdict()])

    def to_json(self) -> str:
        """Return the report as JSON: `healthy`, `seconds`, and `findings` with the attributes of `Finding`."""
        found: dict[str, Any] = {"healthy": self.healthy, "seconds": round(self.seconds, 2)}
        return json.dumps({**found, "findings": [dataclasses.asdict(x) for x in self.findings]}, indent=1)

    def __str__(self) -> str:
        return self.text()

    __repr__ = __str__

    def show(self) -> None:
        """Print the report, with colors in a terminal."""
        sys.stdout.write(self.text(colors=in_terminal()) + "\n")

    def _verdict(self) -> str:
        failures, warnings = len(self.of(FAILURE)), len(self.of(WARNING))
        found = f"{_counted_noun(failures, 'failure')}, {_counted_noun(warnings, 'warning')}, {self.seconds:.1f} s"
        return f"{'Healthy' if self.healthy else 'Not healthy'}: {found}"


def in_terminal() -> bool:
    """Return whether stdout is a terminal whose user has not refused colors (https://no-color.org)."""
    import os

    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _lines(finding: Finding, width: int, colors: bool) -> list[str]:
    status = f"{finding.status:<7}"
    head = f"  {_styled(status, _COLORS[finding.status]) if colors else status}  {finding.name:<{width}}  "
    indent = " " * (13 + width)
    lines = _wrapped_lines(finding.text, indent)
    fix = _wrapped_lines(f"To do: {finding.fix}", indent) if finding.fix else []
    return [(head + lines[0].strip()).rstrip(), *lines[1:], *fix]


def _wrapped_lines(text: str, indent: str) -> list[str]:
    lines: list[str] = []
    for line in text.splitlines() or [""]:
        options: Any = {"initial_indent": indent, "subsequent_indent": indent, "break_long_words": False}
        lines += textwrap.wrap(line, max(_WIDTH, len(indent) + 40), break_on_hyphens=False, **options) or [""]
    return lines


def _styled(text: str, code: int) -> str:
    return f"\x1b[{code}m{text}\x1b[0m"


def _counted_noun(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")
