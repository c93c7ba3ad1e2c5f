"""A small benchmark of each backend, to see at a glance whether one of them is unusually slow here."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch

from jtbridge._backends import backends
from jtbridge.calls._wrap import wrap
from jtbridge.core.backend_names import CALLING, TRANSLATING
from jtbridge.diagnosis._checks import Check
from jtbridge.diagnosis._report import NOTE, OK, Finding

_GROUP = "speed"
_SIZES = (16, 1 << 18)
_SECONDS = 0.05  # for each backend and size


def _tanh_times_x(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x) * x


def _timed(name: str, backend: str) -> Sequence[Finding]:
    status = next(status for status in backends() if status.name == backend)
    if not status.available:
        return [Finding(_GROUP, name, NOTE, f"not timed: {status.reason}")]
    run = jax.jit(wrap(_tanh_times_x, backend=backend))
    return [Finding(_GROUP, name, OK, _times_text(lambda x: jax.block_until_ready(run(x)), jnp.ones))]


def _time_torch() -> Sequence[Finding]:
    return [Finding(_GROUP, "torch itself", OK, _times_text(_tanh_times_x, torch.ones) + ", on the CPU")]


def _times_text(run: Callable[[Any], Any], ones: Callable[[int], Any]) -> str:
    times = [f"{_microseconds(run, ones(size)):.0f} us for {size} floats" for size in _SIZES]
    return f"tanh(x) * x takes {' and '.join(times)}"


def _microseconds(run: Callable[[Any], Any], x: Any) -> float:
    """Return the median time of a call in microseconds, after a first call that compiles."""
    run(x)
    times: list[float] = []
    end = time.perf_counter() + _SECONDS
    while time.perf_counter() < end or len(times) < 5:
        started = time.perf_counter()
        run(x)
        times.append(time.perf_counter() - started)
    return statistics.median(times) * 1e6


CHECKS = (
    Check(_GROUP, "torch itself", _time_torch, "calls"),
    *(
        Check(_GROUP, f"jit, {backend}", functools.partial(_timed, f"jit, {backend}", backend), "calls")
        for backend in (*TRANSLATING, *CALLING)
    ),
)
