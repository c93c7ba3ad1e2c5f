"""The proof of the Triton kernels on this machine's GPU, in child processes."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from jtbridge.errors import BackendError
from jtbridge.kernels import _proofs

from ._children import ChildOutcome, Process, Runner, check_timeout
from ._machine import cores
from ._report import FAILURE, OK, WARNING, Finding

# The children do not preallocate memory, because the process that asks for the proof may hold most of the GPU's.
PROCESS = Process(environment={"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}, main="jtbridge.diagnosis._proof_child")
_MAX_CHILDREN = 16  # at a time; each needs half a gigabyte of the GPU's memory, and compiles for most of its time
_CASES_OF_A_CHILD = 6


@dataclasses.dataclass(frozen=True)
class ProofReport:
    """Report of :func:`prove`. Printing it gives text.

    Attributes:
        chip: chip, driver and versions that the record holds for.
        proven: the names of the kernels whose results were right.
        failed: the error of each other kernel, by its name.
        path: the file of the record; empty if it could not be written.
        problem: why the record could not be written; empty if it was.
        seconds: how long the proof took.
    """

    chip: dict[str, str]
    proven: tuple[str, ...]
    failed: dict[str, str]
    path: str
    problem: str
    seconds: float

    def __str__(self) -> str:
        lines = [f"{self.chip.get('chip')}: {len(self.proven)} kernels proven, {len(self.failed)} failed"]
        lines += [f"  proven  {name}" for name in self.proven]
        lines += [f"  failed  {name}: {reason}" for name, reason in self.failed.items()]
        return "\n".join([*lines, f"record: {self.path or self.problem}"])

    __repr__ = __str__


def prove(*, timeout: float = 300.0) -> ProofReport:
    """Run every Triton kernel of jtbridge on this machine's GPU beside its reference, and write down which are right.

    Until this has run, ``backend="auto"`` uses no kernels on a GPU. Afterwards it uses those that were right, in every
    process with this chip, driver and these versions of jtbridge, Triton, jax-triton and JAX. The record is a file in
    `$XDG_CACHE_HOME/jtbridge/proofs`. The kernels run in child processes, up to 16 at a time, so that a kernel that
    crashes or does not end fails like one whose result is wrong. A case that fails runs once more, alone, because
    several at a time may run out of memory. Experimental: two GPUs have run this.

    Args:
        timeout: seconds that a case may take, compilation included, before it counts as one that does not end.

    Returns:
        A report to print.

    Raises:
        ArgumentError: `timeout` is not a positive number.
        BackendError: JAX has no GPU in a child process, or Triton cannot be used there.

    Example:
        >>> import jtbridge
        >>> try:
        ...     report = jtbridge.prove()
        ... except jtbridge.errors.BackendError as error:
        ...     print("not here")
        not here
    """
    check_timeout(timeout)
    started = time.monotonic()
    facts = _facts_from_child(timeout)
    if facts["refused"]:
        raise BackendError(f"The kernels cannot be proven here: {facts['refused']}.")
    names = {f"{folder}:{i}": name for folder, cases in facts["cases"].items() for i, name in enumerate(cases)}
    seen = _seen(names, *_run_cases(_groups(facts["cases"]), timeout))
    record = _proofs.ProofRecord(
        tuple(sorted(name for name, wrong in seen.items() if wrong is None)),
        {name: wrong for name, wrong in sorted(seen.items()) if wrong is not None},
    )
    path = problem = ""
    try:
        path = str(_proofs.write_record(facts["key"], record))
    except OSError as error:
        problem = (
            f"{_proofs.path_of(facts['key'])} cannot be written: {type(error).__name__}: {error.strerror or error}"
        )
    return ProofReport(facts["key"], record.proven, dict(record.failed), path, problem, time.monotonic() - started)


def findings_of_kernels(timeout: float) -> list[Finding]:
    """Prove the kernels, and return the findings for the doctor's report."""
    try:
        report = prove(timeout=timeout)
    except BackendError as error:
        return [Finding("kernels", "proof", WARNING, str(error), "See `versions` and `devices` above.")]
    count = f"{len(report.proven)} of {len(report.proven) + len(report.failed)} kernels are right on this chip"
    found = [Finding("kernels", "proof", OK, f"{count} ({report.chip['chip']}); `auto` uses them")]
    if report.problem:
        fix = "Make the folder writable, or set XDG_CACHE_HOME to a folder that is, and run the doctor again."
        text = f"{report.problem}: `auto` uses no kernels"
        found = [Finding("kernels", "proof", OK, count), Finding("kernels", "record", WARNING, text, fix)]
    fix = "`auto` does without it. Report it with this whole report."
    return found + [Finding("kernels", name, FAILURE, wrong, fix) for name, wrong in report.failed.items()]


def _facts_from_child(timeout: float) -> dict[str, Any]:
    """Return the facts about the chip and the cases, found by a child process."""
    outcome = Runner(PROCESS, timeout).child(["facts"])
    if "facts" not in outcome.results:
        raise BackendError(f"The kernels cannot be proven here: {outcome.ending}. {outcome.details[-500:]}")
    return outcome.results["facts"]


def _groups(cases: Mapping[str, Sequence[str]]) -> list[list[str]]:
    """Return the keys of the cases in groups, one for each child. A group has a few cases of one folder."""
    return [
        [f"{folder}:{i}" for i in range(first, min(first + _CASES_OF_A_CHILD, len(names)))]
        for folder, names in cases.items()
        for first in range(0, len(names), _CASES_OF_A_CHILD)
    ]


def _run_cases(groups: Sequence[list[str]], timeout: float) -> tuple[dict[str, Any], dict[str, ChildOutcome]]:
    """Run all cases, several groups at a time; return the results, and the outcomes of failed children, by the case.

    The cases that fail run once more, one after the other. :class:`Runner` gives up if several of them do not end.
    A child that died after its last case has a key without a case, such as "softmax:".
    """
    stop = threading.Event()
    runner = Runner(PROCESS, timeout, stop)
    results: dict[str, Any] = {}
    ends: dict[str, ChildOutcome] = {}
    with ThreadPoolExecutor(min(cores(), _MAX_CHILDREN)) as pool:
        pending = [pool.submit(runner.run, group) for group in groups]
        try:
            for group, future in zip(groups, pending, strict=True):
                found, ended = future.result()
                results |= found
                ends |= {key or f"{_folder_of(group[0])}:": outcome for key, outcome in ended.items()}
        except BaseException:
            stop.set()  # ends the children, so that the pool's threads, which wait for them, end too
            pool.shutdown(cancel_futures=True)
            raise
    keys = [key for group in groups for key in group]
    failed = [key for key in keys if key in ends or any(wrong for _, wrong in results[key]["kernels"])]
    if failed:
        found, ended = runner.run(failed)
        results = {key: result for key, result in results.items() if key not in failed} | found
        ends = {key: end for key, end in ends.items() if key not in failed}
        ends |= {key or f"{_folder_of(failed[-1])}:": outcome for key, outcome in ended.items()}
    return results, ends


def _folder_of(key: str) -> str:
    return key.partition(":")[0]


def _seen(
    names: Mapping[str, str], results: Mapping[str, Any], ends: Mapping[str, ChildOutcome]
) -> dict[str, str | None]:
    """Return the first error of each kernel, or None.

    Args:
        names: the name of each case.
        results: the result of each case.
        ends: the outcomes of the children that died or did not end, by the case that was running.
    """
    seen: dict[str, str | None] = {}
    for key in names:
        found = [*results.get(key, {}).get("kernels", ()), *(ends[key].partial if key in ends else ())]
        for kernel, wrong in found:
            if seen.setdefault(kernel, wrong) is None:
                seen[kernel] = wrong
    for key, outcome in ends.items():
        text = f"{names.get(key, 'after the last case')}: {outcome.ending}"
        for kernel in _kernels_of_end(key, outcome, seen):
            if seen.get(kernel) is None:
                seen[kernel] = text
    return seen


def _kernels_of_end(key: str, outcome: ChildOutcome, seen: Mapping[str, str | None]) -> list[str]:
    """Return the kernels to which a child's failure is charged: the one that was running, or all of the folder."""
    if outcome.noted and outcome.running == key:
        return [outcome.noted]
    folder = _folder_of(key)
    of_folder = [kernel for kernel in seen if kernel.startswith(f"{folder} ")]
    return of_folder or [f"{folder} (outside of its kernels)"]
