"""The proof of the Triton kernels on this machine's GPU, in child processes."""

from __future__ import annotations

import dataclasses
import itertools
import os
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from jtbridge.errors import BackendError
from jtbridge.kernels import _proofs

from ._children import ChildOutcome, Process, Runner
from ._report import FAILURE, OK, WARNING, Finding

# JAX takes memory as it needs it: the process that asks for the proof may hold most of the GPU's.
PROCESS = Process(environment={"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}, main="jtbridge.diagnosis._proof_child")
_MOST_CHILDREN = 16  # at a time; each needs half a gigabyte of the GPU's memory, and most of its time compiles
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
    `$XDG_CACHE_HOME/jtbridge/proofs`. The kernels run in child processes, one for each core of the CPU, so that one
    that crashes or does not end fails like one whose result is wrong. Experimental: one GPU has run this.

    Args:
        timeout: seconds that a case may take, compilation included, before it counts as one that does not end.

    Returns:
        A report to print.

    Raises:
        BackendError: JAX has no GPU in a child process, or Triton cannot be used there.

    Example:
        >>> import jtbridge
        >>> try:
        ...     report = jtbridge.prove()
        ... except jtbridge.errors.BackendError as error:
        ...     print("not here")
        not here
    """
    started = time.monotonic()
    facts = _facts(timeout)
    if facts["refused"]:
        raise BackendError(f"The kernels cannot be proven here: {facts['refused']}.")
    seen: dict[str, str | None] = {}
    names = {f"{folder}:{i}": name for folder, cases in facts["cases"].items() for i, name in enumerate(cases)}
    for group, results, ends in _run(_groups(facts["cases"]), timeout):
        _collect(seen, group[0].partition(":")[0], results, ends, names)
    record = _proofs.ProofRecord(
        tuple(sorted(name for name, wrong in seen.items() if wrong is None)),
        {name: wrong for name, wrong in sorted(seen.items()) if wrong is not None},
    )
    path = problem = ""
    try:
        path = str(_proofs.write(facts["key"], record))
    except OSError as error:
        problem = (
            f"{_proofs.path_of(facts['key'])} cannot be written: {type(error).__name__}: {error.strerror or error}"
        )
    return ProofReport(facts["key"], record.proven, dict(record.failed), path, problem, time.monotonic() - started)


def findings_of_kernels(timeout: float) -> list[Finding]:
    """Prove the kernels, for the doctor, and return what was found."""
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


def _facts(timeout: float) -> dict[str, Any]:
    """Return the facts about the chip and the cases, found by a child process."""
    outcome = Runner(PROCESS, timeout).child(["facts"])
    if "facts" not in outcome.results:
        raise BackendError(f"The kernels cannot be proven here: {outcome.ending}. {outcome.details[-500:]}")
    return outcome.results["facts"]


def _groups(cases: Mapping[str, Sequence[str]]) -> list[list[str]]:
    """Return the keys of the cases, by the children that run them: some cases of one folder each."""
    return [
        [f"{folder}:{i}" for i in range(first, min(first + _CASES_OF_A_CHILD, len(names)))]
        for folder, names in cases.items()
        for first in range(0, len(names), _CASES_OF_A_CHILD)
    ]


def _run(
    groups: Sequence[list[str]], timeout: float
) -> list[tuple[list[str], dict[str, Any], dict[str, ChildOutcome]]]:
    """Run each group of cases in child processes, several groups at a time; return groups, results and ends."""
    stop = threading.Event()
    runner = Runner(PROCESS, timeout, stop)
    with ThreadPoolExecutor(min(os.cpu_count() or 1, _MOST_CHILDREN)) as pool:
        pending = [pool.submit(runner.run, group) for group in groups]
        try:
            return [(group, *future.result()) for group, future in zip(groups, pending, strict=True)]
        except BaseException:
            stop.set()  # the children end, and with them the threads that wait for them
            pool.shutdown(cancel_futures=True)
            raise


def _collect(
    seen: dict[str, str | None],
    folder: str,
    results: Mapping[str, Any],
    ends: Mapping[str, ChildOutcome],
    names: Mapping[str, str],
) -> None:
    """Add the results of the child processes of a folder to `seen`: the first error of each kernel, or None."""
    found = [*(result["kernels"] for result in results.values()), *(outcome.partial for outcome in ends.values())]
    for kernel, wrong in itertools.chain(*found):
        if seen.setdefault(kernel, wrong) is None:
            seen[kernel] = wrong
    for key, outcome in ends.items():
        kernel = outcome.noted or f"{folder} (outside of its kernels)"
        text = f"{names.get(key, 'after the last case')}: {outcome.ending}"
        if seen.get(kernel) is None:
            seen[kernel] = text
