"""Threads that call functions for a while, and a report of their observations."""

from __future__ import annotations

import collections
import dataclasses
import random
import threading
import time
import traceback
from collections.abc import Iterator, Sequence

from . import _dropped, _process, _thread_state
from ._function import Case, Function

_PROBLEMS_KEPT = 20
_SECONDS_BETWEEN_PAUSES = 30  # a pause takes one or two
_MIN_PAUSES = 8
_WARM_UP = 0.25


@dataclasses.dataclass(frozen=True)
class Pause:
    """The memory and objects of the process at a moment when no thread was in a call."""

    seconds: float
    memory: int  # bytes
    threads: int
    kept: int


@dataclasses.dataclass
class Report:
    """The outcome of a run.

    Attributes:
        calls: calls that ended, by kind of function.
        raised: calls among them that had to raise.
        wrong: calls with a wrong result, or with a wrong or missing exception.
        hung: functions that a thread was still running when the run was stopped.
        disturbed: settings of threads or of the process that were not as before.
        problems: descriptions, not more than 20 of them.
        pauses: the memory and objects of the process, in the order of time.
    """

    calls: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    raised: int = 0
    wrong: int = 0
    hung: list[str] = dataclasses.field(default_factory=list)
    disturbed: list[str] = dataclasses.field(default_factory=list)
    problems: list[str] = dataclasses.field(default_factory=list)
    pauses: list[Pause] = dataclasses.field(default_factory=list)

    @property
    def steady(self) -> list[Pause]:
        """Return the pauses after the warm-up."""
        return self.pauses[int(_WARM_UP * len(self.pauses)) :]

    @property
    def growth(self) -> float:
        """Return the growth of memory, as a fraction, from the quarter after the warm-up to the last quarter."""
        memory = [pause.memory for pause in self.steady]
        third = max(1, len(memory) // 3)
        return sum(memory[-third:]) / sum(memory[:third]) - 1

    @property
    def new_threads(self) -> int:
        """Return how many more threads there were after the warm-up than at its end."""
        return max(pause.threads for pause in self.steady) - self.steady[0].threads

    @property
    def kept(self) -> int:
        """Return the largest number of dropped functions that the process held after the warm-up."""
        return max(pause.kept for pause in self.steady)

    def add(self, other: Report) -> None:
        """Add the observations of one thread."""
        self.calls += other.calls
        self.raised += other.raised
        self.wrong += other.wrong
        self.disturbed += other.disturbed
        self.problems = (self.problems + other.problems)[:_PROBLEMS_KEPT]


class _Caller(threading.Thread):
    """A thread that calls the cases of functions, in proportion to their weights, until it is stopped."""

    def __init__(self, functions: Sequence[Function], cases: Sequence[Sequence[Case]], seed: int) -> None:
        super().__init__(daemon=True)
        self.report = Report()
        self.since: float | None = None  # when the present call began
        self.name_of_call = ""
        self.may_run, self.is_waiting = threading.Event(), threading.Event()
        self.stopped = False
        self._functions, self._cases = functions, cases
        self._random = random.Random(seed)

    def run(self) -> None:
        before = _thread_state.of_thread()
        weights = [function.weight for function in self._functions]
        while not self.stopped:
            for cases in self._random.choices(self._cases, weights, k=100):
                self._wait_while_paused()
                if self.stopped:
                    break
                self._call(self._random.choice(cases))
            after = _thread_state.of_thread()
            changed = [f"{name}: {before[name]} -> {after[name]}" for name in before if before[name] != after[name]]
            if changed:
                self.report.disturbed += changed
                break
        self.is_waiting.set()

    def _wait_while_paused(self) -> None:
        if not self.may_run.is_set():
            self.is_waiting.set()
            self.may_run.wait()

    def _call(self, case: Case) -> None:
        function = case.function
        self.name_of_call, self.since = function.name, time.monotonic()
        try:
            problem = case.run()
        except BaseException:  # noqa: BLE001 - it is reported
            problem = traceback.format_exc(limit=-6)
        self.since = None
        self.report.calls[function.kind] += 1
        if function.failure is not None:
            self.report.calls["raised"] += 1
            self.report.raised += 1
        if problem is not None:
            self.report.wrong += 1
            self.report.problems = [*self.report.problems, f"{function.name}: {problem}"][:_PROBLEMS_KEPT]


def run(
    functions: Sequence[Function], *, seconds: float, threads: int = 8, seed: int = 0, hang_seconds: float = 60
) -> Report:
    """Call functions from threads, and return a report.

    Args:
        functions: the functions to call, each in proportion to its weight.
        seconds: the length of the run without pauses. Expected results are computed before it.
        threads: how many threads call.
        seed: the seed of the arguments and of the order of calls.
        hang_seconds: how long a call may take. The run stops at the first call that takes longer.
    """
    cases = [function.cases(seed) for function in functions]
    numbers = _thread_state.random_numbers()
    callers = [_Caller(functions, cases, seed * 1000 + i) for i in range(threads)]
    report = Report()
    with _process.ended_if_stuck(hang_seconds) as alive:
        for caller in callers:
            caller.start()
        start = time.monotonic()
        pauses = max(_MIN_PAUSES, round(seconds / _SECONDS_BETWEEN_PAUSES))
        for _ in range(pauses):
            _resume(callers)
            hung = _watch(callers, time.monotonic() + seconds / pauses, hang_seconds, alive)
            hung = hung or _pause(callers, hang_seconds, alive)
            if hung:
                report.hung = hung
                break
            kept = _dropped.kept()  # collects garbage
            held = _process.memory(), _process.threads(), kept
            report.pauses.append(Pause(time.monotonic() - start, *held))
        for caller in callers:
            caller.stopped = True
        _resume(callers)
    for caller in callers:
        caller.join(None if not report.hung else 0.1)
        report.add(caller.report)
    if _thread_state.random_numbers() != numbers:
        report.disturbed.append("the random numbers of torch or numpy")
    return report


def _resume(callers: Sequence[_Caller]) -> None:
    for caller in callers:
        caller.is_waiting.clear()
        caller.may_run.set()


def _watch(callers: Sequence[_Caller], until: float, hang_seconds: float, alive: Iterator[None]) -> list[str]:
    """Wait until a time, or until a call hangs; return the functions that hang."""
    while time.monotonic() < until:
        time.sleep(min(0.5, max(0.0, until - time.monotonic())))
        next(alive)
        if hung := _hanging(callers, hang_seconds):
            return hung
    return []


def _pause(callers: Sequence[_Caller], hang_seconds: float, alive: Iterator[None]) -> list[str]:
    """Wait until no thread is in a call; return the functions that hang."""
    for caller in callers:
        caller.may_run.clear()
    for caller in callers:
        while caller.is_alive() and not caller.is_waiting.wait(0.5):
            next(alive)
            if hung := _hanging(callers, hang_seconds):
                return hung
    return []


def _hanging(callers: Sequence[_Caller], hang_seconds: float) -> list[str]:
    now = time.monotonic()
    return [c.name_of_call for c in callers if (since := c.since) is not None and now - since > hang_seconds]
