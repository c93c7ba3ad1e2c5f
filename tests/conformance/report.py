"""The printed summary of a run, and its files under build/conformance/."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .known import Known
from .worker import Case, Result

FOLDER = Path("build/conformance")
_PROGRESS_SECONDS = 10.0


def say(line: str = "") -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


class Progress:
    """Collects results, and prints the progress of the run from time to time."""

    def __init__(self, operators: int, known: Known):
        self.results: dict[Case, Result] = {}
        self._operators = operators
        self._known = known
        self._seen: set[str] = set()
        self._started = self._said = time.monotonic()

    def add(self, result: Result) -> None:
        self.results[result.case] = result
        self._seen.add(result.case.operator)
        now = time.monotonic()
        if now - self._said >= _PROGRESS_SECONDS:
            self._said = now
            unexpected = len(judge(self.results.values(), self._known).unexpected)
            say(
                f"{now - self._started:5.0f} s: {len(self._seen)} of {self._operators} operators, "
                f"{len(self.results)} cases, {unexpected} unexpected"
            )


@dataclass(frozen=True)
class Verdict:
    """Deviations from the list. `new`: failures that are not in it. `stale`: entries that passed or do not apply."""

    new: list[Result]
    stale: list[Result]
    listed: list[Result]
    passed: int

    @property
    def unexpected(self) -> list[Result]:
        return self.new + self.stale


def judge(results: Iterable[Result], known: Known) -> Verdict:
    verdict = Verdict([], [], [], 0)
    passed = 0
    for result in results:
        failed = result.outcome.status == "failed"
        if result.case in known.reasons:
            (verdict.listed if failed else verdict.stale).append(result)
        elif failed:
            verdict.new.append(result)
        elif result.outcome.status == "passed":
            passed += 1
    return Verdict(verdict.new, verdict.stale, verdict.listed, passed)


def table(results: Mapping[Case, Result], modes: Sequence[str]) -> list[str]:
    """Return the pass counts per backend and mode, with percentages of the cases for which torch has a reference."""
    lines = []
    for backend in dict.fromkeys(case.backend for case in results):
        lines.append(f"{backend:>16} {'passed':>8} {'failed':>8} {'percent':>8}  {'not applicable':>14}")
        for mode in (*modes, "all modes"):
            chosen = [r for c, r in results.items() if c.backend == backend and mode in (c.mode, "all modes")]
            count = Counter(result.outcome.status for result in chosen)
            tried = count["passed"] + count["failed"]
            percent = f"{100 * count['passed'] / tried:.2f}" if tried else "-"
            lines.append(
                f"{mode:>16} {count['passed']:>8} {count['failed']:>8} {percent:>8}  {count['not applicable']:>14}"
            )
        notes = Counter(r.outcome.note for c, r in results.items() if c.backend == backend and r.outcome.note)
        lines.extend(f"    of the passed, {count} by {note}" for note, count in notes.items())
    return lines


def _line(result: Result, reason: str) -> str:
    case = result.case
    return f"{case.operator} sample {case.sample} {case.mode}: {reason}"


def write_files(results: Mapping[Case, Result], known: Known, folder: Path = FOLDER) -> None:
    """Write the failures of each backend, with and without tracebacks, its cases that do not apply, and all results."""
    folder.mkdir(parents=True, exist_ok=True)
    ordered = [results[case] for case in sorted(results)]
    for backend in dict.fromkeys(result.case.backend for result in ordered):
        mine = [result for result in ordered if result.case.backend == backend]
        failed = [result for result in mine if result.outcome.status == "failed"]
        name = backend.replace(":", ".")
        _write(folder / f"failures-{name}.txt", (_failure(result, known) for result in failed))
        _write(
            folder / f"tracebacks-{name}.txt",
            (f"{_failure(result, known)}\n{result.outcome.traceback}\n" for result in failed),
        )
        _write(
            folder / f"not-applicable-{name}.txt",
            (_line(r, r.outcome.detail) for r in mine if r.outcome.status == "not applicable"),
        )
    _write(folder / "results.jsonl", map(_json, ordered))


def _failure(result: Result, known: Known) -> str:
    listed = known.reasons.get(result.case)
    return _line(result, result.outcome.detail) + (f" [known: {listed}]" if listed else "")


def _json(result: Result) -> str:
    outcome = {key: getattr(result.outcome, key) for key in ("status", "detail", "note")}
    return json.dumps(result.case._asdict() | outcome | {"seconds": round(result.seconds, 4)})


def _write(path: Path, lines: Iterable[str]) -> None:
    path.write_text("".join(f"{line}\n" for line in lines))


def print_unexpected(verdict: Verdict) -> None:
    for result in verdict.new:
        say(f"NEW FAILURE {result.case.backend}: {_line(result, result.outcome.detail)}")
    for result in verdict.stale:
        say(
            f"LISTED BUT {result.outcome.status.upper()} {result.case.backend}: "
            f"{_line(result, 'drop it from the list')}"
        )
