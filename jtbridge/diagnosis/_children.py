"""Child processes that run checks: a crash or an endless loop in one of them is a finding."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jtbridge.errors import ArgumentError


def check_timeout(timeout: float) -> None:
    """Raise `ArgumentError` unless a timeout is positive."""
    if not timeout > 0:
        raise ArgumentError(f"`timeout` must be a positive number of seconds, but it is {timeout!r}.")


# Code that every child runs first. Tests use it to simulate broken environments.
PRELUDE = ""

_CODE = """
import json, sys
plan = json.loads(sys.argv[1])
sys.path[:] = plan["path"]
exec(plan["prelude"])
for name in plan["imports"]:
    __import__(name)
import importlib
importlib.import_module(plan["main"]).main(plan)
"""
_POLL = 0.02  # seconds
_MAX_HANGS = 2  # after this number of items that do not end, the remaining items of a run are skipped


@dataclasses.dataclass(frozen=True)
class Process:
    """How a child process is started.

    Attributes:
        imports: the modules that it imports first, in this order.
        environment: variables that are set for it.
        main: the module whose function `main` it runs.
    """

    imports: tuple[str, ...] = ("jax", "torch")
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    main: str = "jtbridge.diagnosis._child"


@dataclasses.dataclass(frozen=True)
class ChildOutcome:
    """The outcome of one child process.

    Attributes:
        results: the child's result for each item that it finished, by the item's key.
        running: the key of the item that was running when the child ended; empty if none was.
        noted: the last note that the child wrote about this item, such as the kernel that it started.
        partial: the findings about this item that the child wrote before it ended.
        ending: how the child failed, such as "killed by SIGSEGV"; empty if it did not.
        details: the last lines that the child printed to stderr.
    """

    results: dict[str, Any]
    running: str
    noted: str
    partial: list[Any]
    ending: str
    details: str


class Interrupted(Exception):
    """The doctor was interrupted, and its children were ended."""


@dataclasses.dataclass(frozen=True)
class Runner:
    """Runs items in child processes.

    Attributes:
        process: how a child is started.
        timeout: seconds that an item may take; the start of the process counts as an item.
        stop: ends the children when it is set.
    """

    process: Process
    timeout: float
    stop: threading.Event = dataclasses.field(default_factory=threading.Event)

    def run(self, keys: Sequence[str]) -> tuple[dict[str, Any], dict[str, ChildOutcome]]:
        """Run all items; return the results, and the outcomes of failed children, by the key of the running item.

        After a child died, its running item is run once more in a separate child, and a new child runs the remaining
        items. If the separate child finishes its item, the item has both a result and a failed outcome. An item that
        did not end is not run again. A child that died after all items has the key "".
        """
        results: dict[str, Any] = {}
        ends: dict[str, ChildOutcome] = {}
        rest = list(keys)
        while rest:
            outcome = self.child(rest)
            results |= outcome.results
            rest = [key for key in rest if key not in outcome.results]
            if not rest:
                if outcome.ending:
                    ends[""] = outcome  # the child died after all items, while it exited
                break
            if outcome.results and not outcome.ending:
                continue  # the child ended early, to have the other items run in a new process
            guilty = outcome.running or rest[0]
            rest.remove(guilty)
            if len(keys) > 1 and "did not end" not in outcome.ending:
                alone = self.child([guilty])
                results |= alone.results
                outcome = alone if alone.ending else outcome
            ends[guilty] = outcome
            never_began = not outcome.running and not outcome.results and guilty not in results
            hangs = sum("did not end" in end.ending for end in ends.values())
            if never_began or hangs == _MAX_HANGS:
                ends |= dict.fromkeys(rest, outcome)
                break
        return results, ends

    def child(self, keys: Sequence[str]) -> ChildOutcome:
        """Run the items that `keys` name in one child process."""
        try:
            return self._child(keys)
        except OSError as error:  # such as for a machine without a folder for temporary files
            return ChildOutcome({}, "", "", [], f"no child process can be started: {error}", "")

    def _child(self, keys: Sequence[str]) -> ChildOutcome:
        with tempfile.TemporaryDirectory(prefix="jtbridge-doctor-") as folder:
            results, errors = Path(folder) / "results", Path(folder) / "errors"
            results.touch()
            whole = {
                "path": sys.path,
                "prelude": PRELUDE,
                "imports": self.process.imports,
                "main": self.process.main,
                "checks": list(keys),
                "results": str(results),
            }
            with errors.open("wb") as log:
                child = subprocess.Popen(
                    [sys.executable, "-X", "faulthandler", "-c", _CODE, json.dumps(whole)],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=log,
                    env={**os.environ, **self.process.environment},
                    start_new_session=True,  # to kill the child together with the processes that it started
                )
                try:
                    hung = self._hangs(child, results)
                finally:
                    _kill(child)
            written = errors.read_text(errors="replace").strip()
            return _outcome(child.returncode, hung, results.read_text(), written[-3000:])

    def _hangs(self, child: subprocess.Popen, results: Path) -> bool:
        """Wait for the end of a child. If it makes no progress within the timeout, abort it and return True."""
        size, since = 0, time.monotonic()
        while child.poll() is None:
            if self.stop.is_set():
                raise Interrupted
            now = results.stat().st_size
            if now != size:
                size, since = now, time.monotonic()
            if time.monotonic() - since > self.timeout:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGABRT)  # makes `faulthandler` print the child's stack
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(2)
                return True
            time.sleep(_POLL)
        return False


def _kill(child: subprocess.Popen) -> None:
    if child.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def _outcome(code: int, hung: bool, written: str, details: str) -> ChildOutcome:
    results: dict[str, Any] = {}
    partial: list[Any] = []
    running = noted = ""
    for line in written.splitlines():
        try:
            entry = json.loads(line)
        except ValueError:  # cut off by the child's death
            continue
        if "start" in entry:
            running, noted, partial = entry["start"], "", []
        elif "note" in entry:
            noted = entry["note"]
        elif "found" in entry:
            partial.append(entry["found"])
        elif "done" in entry:
            results[entry["done"]] = entry
            running = ""
    ending = "did not end" if hung else _ending_of(code)
    if not ending and not results:
        ending = "the process ended without a result"
    return ChildOutcome(results, running, noted, partial, ending, details)


def _ending_of(code: int) -> str:
    if code >= 0:
        return f"the process ended with exit status {code}" if code else ""
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
