"""The doctor: runs all checks and reports their findings."""

from __future__ import annotations

import io
import re
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from jtbridge.errors import ArgumentError
from jtbridge.kernels._proofs import UNPROVEN

from ._checks import Check
from ._child import findings_of
from ._children import ChildOutcome, Interrupted, Process, Runner, check_timeout
from ._prove import findings_of_kernels
from ._registry import all_checks, rank
from ._report import FAILURE, WARNING, DoctorReport, Finding

_TWO_DEVICES = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
# The children that checks share. They run at the same time. One imports torch first, the other JAX.
PROCESSES = {
    "calls": Process(imports=("torch", "jax")),
    "programs": Process(imports=("jax", "torch"), environment=_TWO_DEVICES),
}


def doctor(groups: str | Sequence[str] | None = None, *, timeout: float = 120.0) -> DoctorReport:
    """Check the installation and the machine: versions, devices, memory, backends, and whether everything works.

    Most checks run in child processes, so that a crash or an endless loop of one is a finding, and no backend of JAX is
    started in this process. ``python -m jtbridge doctor`` prints the same report; ``--json`` prints it as JSON. Its
    exit status is 0 if the report is healthy, and 1 otherwise.

    On a GPU without a record of proven kernels, the doctor also proves the kernels: see :func:`jtbridge.prove`.
    Experimental: two GPUs have run the proof, but none has run the whole doctor.

    Args:
        groups: the groups of checks to run, such as ``["versions", "caches"]``, or the name of one; None for all.
        timeout: seconds that a check may take before it counts as one that does not end.

    Returns:
        A report to print; ``.show()`` prints it with colors in a terminal.

    Raises:
        ArgumentError: a group does not exist, or `timeout` is not a positive number.

    Example:
        >>> import jtbridge
        >>> report = jtbridge.doctor(["caches"])
        >>> report.healthy
        True
    """
    check_timeout(timeout)
    started = time.monotonic()
    checks = all_checks()
    known = list(dict.fromkeys(check.group for check in checks))
    wanted = known if groups is None else [groups] if isinstance(groups, str) else list(groups)
    for group in wanted:
        if group not in known:
            raise ArgumentError(f"there is no group {group!r} of checks; the groups are {', '.join(known)}")
    found = _run_checks([check for check in checks if check.group in wanted], timeout)
    if any(finding.text == UNPROVEN for finding in found):
        found = [x for x in found if x.text != UNPROVEN or x.group != "kernels"] + findings_of_kernels(timeout)
    ordered = sorted(found, key=lambda finding: rank(finding.group))
    return DoctorReport(tuple(ordered), time.monotonic() - started)


def _run_checks(checks: Sequence[Check], timeout: float) -> list[Finding]:
    """Run checks, in this process and in children, and return their findings in the order of the checks."""
    stop = threading.Event()
    names = [name for name in PROCESSES if any(check.process == name for check in checks)]
    with ThreadPoolExecutor(max(len(names), 1)) as pool:
        shared = {name: [check for check in checks if check.process == name] for name in names}
        pending = [
            pool.submit(_in_child, Runner(PROCESSES[name], timeout, stop), of_process)
            for name, of_process in shared.items()
        ]
        try:
            found = {check.key: list(findings_of(check)) for check in checks if not check.process}
            for future in pending:
                found |= future.result()
        except BaseException:
            stop.set()
            raise
    order = [check.key for check in checks]
    return [finding for key in [*order, *(k for k in found if k not in order)] for finding in found.get(key, ())]


def _in_child(runner: Runner, checks: Sequence[Check]) -> dict[str, list[Finding]]:
    """Run the checks of one process; return the findings by the key of the check."""
    try:
        results, ends = runner.run([check.key for check in checks])
    except Interrupted:
        return {}
    found = {key: [Finding(**finding) for finding in result["findings"]] for key, result in results.items()}
    for check in checks:
        if check.key in ends:
            found.setdefault(check.key, []).append(_finding_of_end(check, ends[check.key], check.key in results))
    if "" in ends:
        ending = f"the process of these checks was ended after them: {_summary(ends[''])}"
        found[f"{checks[-1].group}: end"] = [Finding(checks[-1].group, "exit", WARNING, ending)]
    return found


def _finding_of_end(check: Check, outcome: ChildOutcome, passed_alone: bool) -> Finding:
    if passed_alone:
        text = f"{_summary(outcome)}; run alone in a process it does not fail"
        return Finding(check.group, check.name, WARNING, text, check.fix)
    if "did not end" in outcome.ending:
        return Finding(check.group, check.name, FAILURE, f"hangs: it {_summary(outcome)}", check.fix)
    return Finding(check.group, check.name, FAILURE, _summary(outcome), check.fix)


def _summary(outcome: ChildOutcome) -> str:
    """Return how a child ended, and where: the innermost frame of Python that `faulthandler` printed, or the error."""
    details = outcome.details
    where = re.search(r"most recent call first\):\n  (File .*)", details)
    if where:
        return f"{outcome.ending}, at {where[1]}"
    lines = [line for line in details.splitlines() if re.match(r"\w+(\.\w+)*(Error|Exception|Interrupt)\b", line)]
    lines = lines or re.findall(r"^F\d{4} .*?\] (.+)$", details, re.MULTILINE)  # a fatal error of XLA
    return f"{outcome.ending}: {lines[-1]}" if lines else outcome.ending


def main(arguments: Any) -> int:
    """Run ``python -m jtbridge doctor`` and return its exit status."""
    try:
        groups = None if arguments.only is None else [name.strip() for name in arguments.only.split(",")]
        report = doctor(groups, timeout=arguments.timeout)
    except ArgumentError as error:
        _tell(error)
        return 2  # as for other wrong arguments
    try:
        if sys.stdout is None:  # the process was started without a stdout
            raise OSError("there is no stdout")
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")  # a path may have characters that it cannot encode
        if arguments.json:
            sys.stdout.write(report.to_json() + "\n")
        else:
            report.show()
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        _tell(f"the report cannot be written: {error}")
        return 2
    return 0 if report.healthy else 1


def _tell(error: object) -> None:
    if sys.stderr is not None:  # the process began with one
        sys.stderr.write(f"python -m jtbridge doctor: error: {error}\n")
