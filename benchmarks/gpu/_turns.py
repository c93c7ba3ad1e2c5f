"""Contestants that take turns on a GPU.

A turn starts calls one after the other, as many as take some hundredths of a second, and waits for the last result.
The GPU runs them in order, so this times the GPU's work, or the launches if they take longer.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import torch

from benchmarks._results import Cell, Failed

from ._rows import Options

_SAMPLE = 1 << 16  # how many numbers of an array are compared
# Results are rounded to bfloat16, and contestants sum in different orders.
_TOLERANCE = 0.03


@dataclass(frozen=True)
class Contestant:
    """A computation to time.

    Attributes:
        call: starts the computation and returns its arrays.
        view: brings these arrays into the form in which they are compared with those of the other contestants.
        checked: whether they are compared; False if the computation differs from the others.
    """

    call: Callable[[], Any]
    view: Callable[[Any], Any] = lambda result: result
    checked: bool = True


Contestants = dict[str, Contestant | Failed]


def attempt(make: Callable[[], Contestant]) -> Contestant | Failed:
    """Return a contestant, or the reason why it cannot be made."""
    try:
        return make()
    except Exception as error:  # noqa: BLE001 - that a contestant fails is a result
        return Failed.from_error(error)


def milliseconds(contestants: Contestants, options: Options, judge: str | None = None) -> dict[str, Cell]:
    """Return the median time of a call of each contestant.

    Args:
        contestants: the contestants by name.
        options: the number of turns, and their length.
        judge: the contestant whose result is right; one with a different result gets no time. None to compare nothing.
    """
    cells: dict[str, Cell] = {}
    running: dict[str, Contestant] = {}
    expected = None
    for name in sorted(contestants, key=lambda name: name != judge):
        contestant = contestants[name]
        got = contestant if isinstance(contestant, Failed) else _first(contestant)
        if isinstance(got, Failed) or isinstance(contestant, Failed):
            cells[name] = got
            continue
        expected = got if name == judge else expected
        wrong = _difference(got, expected) if expected and contestant.checked else None
        if wrong:
            cells[name] = Failed(wrong)
        else:
            running[name] = contestant
    counts = {name: _count(contestant, options) for name, contestant in running.items()}
    times: dict[str, list[float]] = {name: [] for name in running}
    gc.collect()
    for _ in range(options.rounds):
        for name, contestant in running.items():
            times[name].append(_turn(contestant, counts[name]))
    cells |= {name: 1e3 * statistics.median(taken) for name, taken in times.items()}
    return {name: cells[name] for name in contestants}


def _first(contestant: Contestant) -> list[np.ndarray] | Failed:
    try:
        return [_sample(leaf) for leaf in jax.tree.leaves(contestant.view(contestant.call()))]
    except Exception as error:  # noqa: BLE001 - that a contestant fails is a result
        return Failed.from_error(error)


def _sample(leaf: Any) -> np.ndarray:
    first = leaf.reshape(-1)[:_SAMPLE]
    if isinstance(first, torch.Tensor):
        return first.detach().float().cpu().numpy()
    return np.asarray(first.astype("float32"))


def _difference(got: list[np.ndarray], expected: list[np.ndarray]) -> str | None:
    if len(got) != len(expected):
        return f"wrong: {len(got)} results, not {len(expected)}"
    for i, (g, e) in enumerate(zip(got, expected, strict=True)):
        if g.shape != e.shape:
            return f"wrong: result {i} has another shape"
        off = float(np.abs(g - e).max(initial=0) / max(float(np.abs(e).max(initial=0)), 1e-30))
        if not off <= _TOLERANCE:
            return f"wrong: result {i} is off by {off:.2g} of its largest number"
    return None


def _count(contestant: Contestant, options: Options) -> int:
    if not options.turn_seconds:
        return 1
    _turn(contestant, 2)
    return max(1, min(1000, int(options.turn_seconds / _turn(contestant, 3))))


def _turn(contestant: Contestant, count: int) -> float:
    """Return the seconds per call of `count` calls."""
    result = None
    start = time.perf_counter()
    for _ in range(count):
        result = contestant.call()
    wait(result)
    return (time.perf_counter() - start) / count


def wait(result: Any) -> None:
    """Wait until the arrays of a result are computed."""
    leaves = jax.tree.leaves(result)
    jax.block_until_ready([leaf for leaf in leaves if isinstance(leaf, jax.Array)])
    if any(isinstance(leaf, torch.Tensor) and leaf.is_cuda for leaf in leaves):
        torch.cuda.synchronize()
