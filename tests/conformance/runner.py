"""Runs all cases in worker processes. A worker that hangs or dies costs its current case and nothing else."""

from __future__ import annotations

import multiprocessing
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from . import worker
from .check import Outcome
from .worker import Case, Result, Settings, Task

CASE_SECONDS = 60.0
# Importing torch and jax, and making an operator's samples, happen outside of any case.
SETUP_SECONDS = 300.0


@dataclass
class _Worker:
    process: BaseProcess
    pipe: Connection
    task: Task | None = None
    # The case that runs now, or None between cases, and the time when this began.
    case: Case | None = None
    since: float = field(default_factory=time.monotonic)
    finished: set[Case] = field(default_factory=set)

    def overdue(self, case_seconds: float) -> bool:
        return time.monotonic() - self.since > (SETUP_SECONDS if self.case is None else case_seconds)


class Runner:
    """Hands out operators to workers and passes each result to `report` as it comes in."""

    def __init__(
        self,
        settings: Settings,
        jobs: int,
        report: Callable[[Result], None],
        case_seconds: float = CASE_SECONDS,
    ):
        self._settings = settings
        self._jobs = jobs
        self._report = report
        self._case_seconds = case_seconds
        self._context = multiprocessing.get_context("spawn")
        self._queue: deque[Task] = deque()
        self._workers: list[_Worker] = []

    def run(self, names: Sequence[str]) -> None:
        self._queue.extend(Task(name) for name in names)
        try:
            for _ in range(min(self._jobs, len(names))):
                self._workers.append(self._start())
            while self._workers:
                self._step()
        finally:
            for each in self._workers:
                each.process.kill()
                each.process.join()

    def _start(self) -> _Worker:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=worker.main, args=(theirs, self._settings), daemon=True)
        process.start()
        theirs.close()
        return _Worker(process, ours)

    def _step(self) -> None:
        ready = wait([each.pipe for each in self._workers], timeout=1.0)
        for each in list(self._workers):
            if each.pipe in ready:
                try:
                    message = each.pipe.recv()
                except (EOFError, ConnectionResetError):
                    each.process.join()
                    self._lost(each, f"the process died (exit code {each.process.exitcode})")
                else:
                    self._received(each, message)
            elif each.overdue(self._case_seconds):
                each.process.kill()
                each.process.join()
                self._lost(each, f"no result after {self._case_seconds:.0f} s")

    def _received(self, each: _Worker, message: object) -> None:
        each.since = time.monotonic()
        if isinstance(message, Case):
            each.case = message
        elif isinstance(message, Result):
            each.case = None
            each.finished.add(message.case)
            self._report(message)
        else:
            # "ready", or the task that is done.
            each.task, each.finished = (self._queue.popleft() if self._queue else None), set()
            each.pipe.send(each.task)
            if each.task is None:
                each.process.join()
                self._workers.remove(each)

    def _lost(self, each: _Worker, reason: str) -> None:
        """Report the failure of the case that ran, and give the remaining cases of its operator to a new worker."""
        self._workers.remove(each)
        if each.task is None:
            raise RuntimeError(f"A worker did not start: {reason}. See {self._settings.log}.")
        blamed = each.case or Case(self._settings.backends[0], each.task.operator, 0, self._settings.modes[0])
        self._report(Result(blamed, Outcome("failed", reason), time.monotonic() - each.since))
        if each.case is not None:
            skip = each.task.skip | each.finished | {each.case}
            self._queue.appendleft(replace(each.task, skip=skip))
        self._workers.append(self._start())
