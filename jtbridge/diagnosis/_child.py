"""The program of a child process of the doctor: it runs the given checks one after the other."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from ._checks import Check, WrongValue
from ._report import FAILURE, Finding


def main(plan: Mapping[str, Any]) -> None:
    """Run the checks that a plan names, and write a line before and after each to its file of results."""
    with open(plan["results"], "a") as file:
        for check in _planned(plan):
            write_line(file, {"start": check.key})
            write_line(file, {"done": check.key, "findings": [dataclasses.asdict(x) for x in findings_of(check)]})


def findings_of(check: Check) -> Sequence[Finding]:
    """Run a check and return its findings; if it raises, return a finding of failure."""
    try:
        return tuple(check.run())
    except WrongValue as error:
        return (Finding(check.group, check.name, FAILURE, str(error), check.fix),)
    except Exception as error:  # noqa: BLE001  (a check may meet anything, and the others have to run)
        return (Finding(check.group, check.name, FAILURE, first_lines(error), check.fix),)


def first_lines(error: BaseException) -> str:
    """Return the type of an exception and the first lines of its message."""
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    return ": ".join([type(error).__name__, *([" ".join(lines[:2])[:300]] if lines else [])])


def _planned(plan: Mapping[str, Any]) -> Sequence[Check]:
    from ._registry import all_checks

    checks = {check.key: check for check in all_checks()}
    return [checks[key] for key in plan["checks"]]


def write_line(file: TextIO, line: Mapping[str, Any]) -> None:
    """Write a line of JSON to the file of results, at once: the next check may end the process."""
    file.write(json.dumps(line) + "\n")
    file.flush()
