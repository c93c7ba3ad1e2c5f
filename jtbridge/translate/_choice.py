"""The choice whether torch or XLA runs an operator that has a lowering and that torch may run faster.

The choice follows times measured on this machine (`jtbridge/core/tuning.py`) or, without them, the table (`_costs.py`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import platform as machine
import re
from pathlib import Path
from typing import Any

import jax
import jaxlib
import torch
from jax.extend.core import ClosedJaxpr

from jtbridge._compat import OpOverload
from jtbridge.core import tuning, version
from jtbridge.core.functions import TorchFunction
from jtbridge.transforms import Vmap

from . import _measure
from ._costs import faster_reason, takes_long
from ._islands import island_of
from ._measure import Times
from ._program import precision

# The times that were read or measured, by the digest of their key; None if there is no usable file. There are at most
# as many entries as operators in the programs of the process.
_FOUND: dict[str, Times | None] = {}


@dataclasses.dataclass(frozen=True)
class IslandRunner:
    """The choice whether torch or XLA runs an operator.

    Attributes:
        in_torch: whether torch runs it, as an island.
        reason: why torch runs it, or by which measurement XLA is faster; None if neither applies.
        measured: whether the reason was measured on this machine.
    """

    in_torch: bool
    reason: str | None
    measured: bool = False


def choose_runner(
    fn: TorchFunction, lowered: ClosedJaxpr | None, platform: str, *, measures: bool = False, one_device: bool = True
) -> IslandRunner:
    """Return whether torch or XLA runs an island on a platform.

    Args:
        fn: the island, or a batch of it.
        lowered: the program of its lowering, or None if it has no lowering.
        platform: the platform.
        measures: whether to measure the operator if tuning is on.
        one_device: whether the program is for one device, as measurements are.
    """
    island = island_of(fn)
    if island.workload is None or lowered is None:
        return IslandRunner(True, island.reason)
    batches = _batches(fn)
    workload = island.workload.of_rows(math.prod(batch.size for batch in batches))
    times = None
    if platform == "cpu" and one_device and takes_long(workload, platform):
        times = _operator_times(fn, lowered, measures)
    if times is None:
        by_rows = any(batch in fn.base.cache.sequential for batch in batches)
        reason = None if by_rows else faster_reason(workload, platform)
        return IslandRunner(reason is not None, reason)
    if times.torch < times.xla:
        reason = f"torch is faster: measured here {times.torch:.3g} ms against {times.xla:.3g} ms of XLA"
        return IslandRunner(True, f'{reason}. `islands="needed"` leaves it to XLA', measured=True)
    reason = f"XLA is faster: measured here {times.xla:.3g} ms against {times.torch:.3g} ms of torch"
    return IslandRunner(False, reason, measured=True)


def _batches(fn: TorchFunction) -> list[Vmap]:
    """Return the batches of an island, the outermost first."""
    found = []
    while isinstance(fn, Vmap):
        found.append(fn)
        fn = fn.fn
    return found


def _operator_times(fn: TorchFunction, lowered: ClosedJaxpr, measures: bool) -> Times | None:
    """Return the times that were measured for an operator; None if there are none."""
    key = _key_of_times(fn)
    path = tuning.results_folder() / f"{key['operator']}-{tuning.digest(key)}.json"

    def measured() -> Times | None:
        return _measured(fn, lowered, path, key) if measures else None

    found = tuning.known_or_tuned(_FOUND, key, path, lambda: tuning.read_result(path, key, Times.parse), measured)
    if found is None and measures and not tuning.is_on():
        tuning.note_untuned(tuning.digest(key))
    return found


def _measured(fn: TorchFunction, lowered: ClosedJaxpr, path: Path, key: tuning.ChoiceKey) -> Times | None:
    """Measure an operator, write the times to a file and return them; None, with a warning, if that is not possible."""
    reason = tuning.several_processes_reason()
    times = reason if reason is not None else _measure.measure(fn, lowered)
    if isinstance(times, str):
        return tuning.warn(f"`{key['operator']}` is not tuned: {times}")
    # Another process may have written a result meanwhile. This process takes that result, as all later ones do.
    times = tuning.read_result(path, key, Times.parse) or times
    tuning.write_result(path, key, {"milliseconds": dataclasses.asdict(times)})
    return times


def _key_of_times(fn: TorchFunction) -> dict[str, Any]:
    """Return all values on which the times of an operator depend.

    Shapes are exact, because both libraries choose algorithms by them. A program has few shapes: it is compiled for
    them, which takes longer than measuring its operators.
    """
    island = island_of(fn)
    (call,) = (node for node in island.module.graph.nodes if isinstance(node.target, OpOverload))
    return {
        "operator": str(call.target),
        "arguments": f"{call.args} {call.kwargs}",
        "inputs": [f"{type_.dtype}{list(type_.shape)}" for type_ in fn.in_types],
        "results": [f"{type_.dtype}{list(type_.shape)}" for type_ in fn.out_types],
        "batches": [[batch.size, list(batch.dims)] for batch in _batches(fn)],
        "precision": precision(fn.base),
        "platform": "cpu",
        "processor": _processor(),
        "threads of torch": torch.get_num_threads(),
        "threads of XLA": _threads_of_xla(),
        "versions": _library_versions(),
    }


@functools.cache
def _processor() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    name = found[1] if found else machine.processor() or machine.machine()
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}"


@functools.cache
def _threads_of_xla() -> list[str]:
    """Return the settings that decide the number of XLA's threads: the cores of this process, `NPROC`, and flags."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = os.cpu_count() if affinity is None else len(affinity(0))
    flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if flag.startswith("--xla_cpu")]
    return [str(cores), os.environ.get("NPROC", ""), *sorted(flags)]


def _library_versions() -> dict[str, str]:
    return {
        "jtbridge": version.__version__,
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "torch": torch.__version__,
    }
