"""Timing of contestants in turns, and measurements in separate processes."""

import ctypes
import gc
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch

from benchmarks._results import Calls, Cell, Failed, Options

# After a call of torch, its threads keep spinning for a while on the cores that the next contestant needs.
SETTLE_SECONDS = 0.3

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # the numbers of these parameters in glibc's malloc.h

# On a machine that is busy with other work, compare CPU time, which is the sum over all threads.
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def keep_memory() -> None:
    """Make this process keep the memory that it frees.

    Otherwise glibc sometimes returns megabytes to the system, and the next call that needs them pays for the page
    faults: the same call of a contestant took 150 or 600 us.
    """
    if sys.platform == "linux":
        for parameter in (_TRIM_THRESHOLD, _MMAP_THRESHOLD):
            ctypes.CDLL(None).mallopt(parameter, 1 << 30)


def microseconds(calls: Calls, options: Options) -> dict[str, Cell]:
    """Return the microseconds per call of each contestant, for calls of up to a millisecond."""
    rounds = 15 if options.quick else 75
    return _scaled(1e6, interleaved(calls, rounds=rounds, batch_seconds=0.01, clock=options.clock))


def milliseconds(calls: Calls, options: Options, rtol: float = 1e-3) -> dict[str, Cell]:
    """Return the milliseconds per call of each contestant, for whole models. :func:`interleaved` explains `rtol`."""
    rounds = 3 if options.quick else 12
    return _scaled(1e3, interleaved(calls, rounds=rounds, batch_seconds=0.2, clock=options.clock, rtol=rtol))


def _scaled(factor: float, seconds: dict[str, Cell]) -> dict[str, Cell]:
    return {name: cell if isinstance(cell, Failed) else factor * cell for name, cell in seconds.items()}


def interleaved(
    calls: Calls,
    *,
    rounds: int,
    batch_seconds: float = 0.0,
    clock: str = "wall",
    rtol: float = 1e-3,
    settle: float = SETTLE_SECONDS,
) -> dict[str, Cell]:
    """Return the seconds per call of each contestant: the minimum over rounds, in which every contestant has one turn.

    A turn is one call, or as many as take about `batch_seconds`. Before a turn, the process sleeps for `settle` seconds
    and makes some calls that are not timed, so that the threads of the other contestants are idle and those of this
    contestant are awake. Torch itself comes last in `calls`: a contestant whose result differs from torch's by more
    than `rtol` of the largest number in torch's result gets no time.
    """
    keep_memory()
    cells: dict[str, Cell] = {name: call for name, call in calls.items() if isinstance(call, Failed)}
    results = {}
    for name, call in calls.items():
        if not isinstance(call, Failed):
            try:
                results[name] = [_as_numpy(leaf) for leaf in jax.tree.leaves(call())]
            except Exception as error:  # noqa: BLE001 - that a contestant fails is a result
                cells[name] = Failed.from_error(error)
    expected = results[list(results)[-1]]
    cells |= {name: Failed("wrong result") for name, got in results.items() if not _close(got, expected, rtol)}
    runs = {name: call for name, call in calls.items() if name not in cells and callable(call)}
    counts = {name: _batch_size(call, batch_seconds) for name, call in runs.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    gc.collect()
    for _ in range(rounds):
        for name, call in runs.items():
            time.sleep(settle)
            _time(call, 1 + counts[name] // 10)
            times[name].append(_time(call, counts[name], CLOCKS[clock]))
    return cells | {name: min(t) for name, t in times.items()}


def _as_numpy(leaf: Any) -> np.ndarray:
    """Return a result as an array whose dtype NumPy can compute with."""
    if isinstance(leaf, torch.Tensor):
        return (leaf.float() if leaf.dtype is torch.bfloat16 else leaf).numpy()
    return np.asarray(leaf, np.float32 if leaf.dtype == jax.numpy.bfloat16 else None)


def _close(got: list[np.ndarray], expected: list[np.ndarray], rtol: float) -> bool:
    scale = max(float(np.abs(e).max()) for e in expected)
    return len(got) == len(expected) and all(
        g.shape == e.shape and np.allclose(g, e, rtol=rtol, atol=rtol * scale)
        for g, e in zip(got, expected, strict=True)
    )


def _time(call: Callable[[], Any], count: int, clock: Callable[[], float] = time.perf_counter) -> float:
    start = clock()
    for _ in range(count):
        call()
    return (clock() - start) / count


def _batch_size(call: Callable[[], Any], seconds: float) -> int:
    if not seconds:
        return 1
    _time(call, 1)  # warm
    once = _time(call, 1)
    return max(1, int(seconds / (once if 20 * once > seconds else _time(call, 20))))


def in_child(function: str, *args: Any, timeout: float = 1200) -> Any:
    """Return the result of `module.function(*args)` of this package, run in a fresh Python. It must be JSON."""
    command = [sys.executable, "-m", "benchmarks._child", function, json.dumps(args)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        return Failed(f"took longer than {timeout:.0f} s")
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        return Failed(lines[-1][:200])
    return json.loads(done.stdout.splitlines()[-1])


def minimum_of_children(names: Iterable[str], function: str, *args: Any, repeats: int) -> dict[str, Cell]:
    """Return, for each name, the minimum of `function(name, *args)` over `repeats` fresh processes, run in turns."""
    got: dict[str, list[Any]] = {name: [] for name in names}
    for _ in range(repeats):
        for name, values in got.items():
            values.append(in_child(function, name, *args))
    return {
        name: next((v for v in values if isinstance(v, Failed)), None) or min(values) for name, values in got.items()
    }


def resident_mb() -> float:
    """Return the memory of this process in MB, after returning freed memory to the system."""
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
    return _status("VmRSS")


class PeakMemory:
    """Context manager whose `extra_mb` is, after the block, the peak memory in MB above the memory at its start."""

    def __enter__(self) -> "PeakMemory":
        self._before = resident_mb()
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, the peak, to the current memory
        return self

    def __exit__(self, *error: object) -> None:
        self.extra_mb = max(0.0, _status("VmHWM") - self._before)


def _status(name: str) -> float:
    match = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    if match is None:
        raise RuntimeError(f"this system does not tell `{name}`: memory is measured on Linux only")
    return int(match.group(1)) / 1024
