"""A worker process: takes operators from a pipe, runs their cases, sends back the results.

It announces each case before it runs, so that the parent knows which one to blame for a crash or a hang.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from .check import Checker, Outcome
from .samples import NotApplicableError, as_function, chosen_samples, dtype_for, operators
from .subjects import Subject, subject
from .traits import traits


class Case(NamedTuple):
    """A case, as one line of the reports."""

    backend: str
    operator: str
    sample: int
    mode: str


@dataclass(frozen=True)
class Settings:
    """The settings that all workers of a run share."""

    backends: tuple[str, ...]
    modes: tuple[str, ...]
    dtype: str | None
    samples: int
    log: Path


@dataclass(frozen=True)
class Task:
    """One operator, without the cases that an earlier worker finished or that ended it."""

    operator: str
    skip: frozenset[Case] = field(default_factory=frozenset)


@dataclass(frozen=True)
class Result:
    case: Case
    outcome: Outcome
    seconds: float


def main(connection: Connection, settings: Settings) -> None:
    """Run tasks until the pipe sends None. Send each Case when it starts, its Result, and each Task when it is done."""
    _redirect_output(settings.log)
    import jax
    import torch

    # With 64-bit types on, conversions change no dtype, so every output's dtype can be compared.
    jax.config.update("jax_enable_x64", True)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    subjects = [subject(name) for name in settings.backends]
    table = operators()
    connection.send("ready")
    while (task := connection.recv()) is not None:
        for message in _run(task, table[task.operator], settings, subjects):
            connection.send(message)
        connection.send(task)
        # Compiled programs would pile up: some ten thousand in a whole run.
        jax.clear_caches()


def _redirect_output(log: Path) -> None:
    """Send output to a log file: output of native code and of interpreters that end belongs to no case."""
    log.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(descriptor, stream.fileno())
    faulthandler.enable()


def _run(task: Task, info: Any, settings: Settings, subjects: list[Subject]) -> Iterator[Case | Result]:
    import torch

    index = -1
    try:
        dtype = dtype_for(info, getattr(torch, settings.dtype) if settings.dtype else None)
        for index, raw in chosen_samples(info, dtype, settings.samples):
            cases = [Case(each.name, task.operator, index, mode) for mode in settings.modes for each in subjects]
            try:
                sample = as_function(info, index, raw)
                checker = Checker(sample, traits(sample))
            except NotApplicableError as error:
                yield from _all(cases, Outcome("not applicable", str(error)))
                continue
            for case in cases:
                if case not in task.skip:
                    yield case
                    yield _timed(case, checker, subjects)
        if index < 0:
            raise NotApplicableError("torch: the operator has no samples")
    except NotApplicableError as error:
        cases = [Case(each.name, task.operator, 0, mode) for mode in settings.modes for each in subjects]
        yield from _all(cases, Outcome("not applicable", str(error)))


def _timed(case: Case, checker: Checker, subjects: list[Subject]) -> Result:
    started = time.perf_counter()
    outcome = checker.check(case.mode, next(each for each in subjects if each.name == case.backend))
    return Result(case, outcome, time.perf_counter() - started)


def _all(cases: list[Case], outcome: Outcome) -> Iterator[Result]:
    for case in cases:
        yield Result(case, outcome, 0.0)
