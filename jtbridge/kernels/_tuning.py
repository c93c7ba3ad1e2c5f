"""The choice of a kernel's launch configuration: its default, or the fastest of a few candidates that were timed.

Inside ``jtbridge.config(tune=True)`` the candidates are timed when a program is lowered for a GPU. The rules of tuning,
and of its files, are those of `jtbridge/core/tuning.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax

from jtbridge.core import tuning

from . import _chip, _timing
from ._launch import interpreting, launch
from ._shapes import next_power_of_2

C = TypeVar("C")
Problem = Mapping[str, int | str | bool | None]

# From the digest of a key to the configuration that was read or timed; None: no usable file. There are no more entries
# than there are kernels and sizes in the programs of the process.
_FOUND: dict[str, Any] = {}
# How many keys were tuned in this process, after programs may have been lowered with the default.
_TUNED_KEYS = 0


def program_key() -> int | None:
    """Return a cache key that changes when a program lowered now may get other configurations than before.

    While tuning is on, the key is None: every program then gets the configurations that tuning found.
    """
    return None if tuning.is_on() else _TUNED_KEYS


@dataclasses.dataclass(frozen=True)
class LaunchParameters:
    """The grid, constants, warps and pipeline stages that a configuration is launched with."""

    grid: tuple[int, ...]
    constants: Mapping[str, Any]
    num_warps: int
    num_stages: int = 2


def size(n: int) -> int:
    """Return a size for a key, rounded up to a power of two, so that similar sizes share a configuration."""
    return next_power_of_2(n)


def launch_tuned(
    kernel: Any,
    *operands: Any,
    out_types: Sequence[jax.ShapeDtypeStruct],
    candidates: Sequence[C],
    problem: Problem,
    launch_parameters: Callable[[C], LaunchParameters],
    timed: Callable[[C], LaunchParameters] | None = None,
) -> list[jax.Array]:
    """Launch a kernel as :func:`launch` does, with the configuration that was tuned for a problem, or the first one.

    Args:
        kernel: a function decorated with ``triton.jit``.
        operands: arrays, and Python numbers.
        out_types: shape and dtype of each result.
        candidates: the configurations that tuning chooses from, frozen dataclasses of numbers. All give the same
            results. The first one is the default, for a problem that was not tuned.
        problem: the values that the choice depends on, apart from kernel and chip: sizes (see :func:`size`), dtypes,
            options.
        launch_parameters: returns the launch parameters of a configuration.
        timed: returns the launch parameters for timing, where they must differ from `launch_parameters`: a timed launch
            has made-up operands, in which all integers are 0.
    """

    def milliseconds(candidate: C) -> float | str:
        how = dataclasses.asdict((timed or launch_parameters)(candidate))
        return _timing.milliseconds(kernel, operands, out_types=out_types, **how)

    how = launch_parameters(chosen(kernel, candidates, problem, milliseconds))
    return launch(
        kernel,
        *operands,
        out_types=out_types,
        grid=how.grid,
        constants=how.constants,
        num_warps=how.num_warps,
        num_stages=how.num_stages,
    )


def chosen(kernel: Any, candidates: Sequence[C], problem: Problem, milliseconds: Callable[[C], float | str]) -> C:
    """Return the configuration for a problem on this process's chip. See :func:`launch_tuned`."""
    default = candidates[0]
    if interpreting():
        return default
    chip = _chip.present()
    if chip is None:
        if tuning.is_on():
            tuning.warn(f"`{kernel.__name__}` is not tuned: this process has no GPU")
        return default
    every = list(dict.fromkeys(candidates))
    key = _key_of_problem(kernel, chip, problem)
    path = tuning.results_folder() / f"{kernel.__name__}-{tuning.digest(key)}.json"
    found = tuning.known_or_tuned(
        _FOUND, key, path, lambda: _read_configuration(path, key, every), lambda: _tuned(path, key, every, milliseconds)
    )
    return found or default


def _tuned(path: Path, key: Problem, candidates: Sequence[C], milliseconds: Callable[[C], float | str]) -> C | None:
    """Time the candidates, write the fastest to a file and return it; None, with a warning, if none could be timed."""
    global _TUNED_KEYS
    reason = tuning.several_processes_reason() or _timing.untimed_reason()
    if reason:
        return tuning.warn(f"`{key['kernel']}` is not tuned: {reason}")
    times = {candidate: milliseconds(candidate) for candidate in candidates}
    timed = {candidate: t for candidate, t in times.items() if not isinstance(t, str)}
    if not timed:
        return tuning.warn(f"`{key['kernel']}` is not tuned: no candidate runs. The first says: {times[candidates[0]]}")
    # Another process may have written a result meanwhile. This process uses that result, as all later processes do.
    found = _read_configuration(path, key, candidates) or min(timed, key=timed.__getitem__)
    _write(path, key, found, times)
    _TUNED_KEYS += 1
    return found


def _key_of_problem(kernel: Any, chip: _chip.Chip, problem: Problem) -> dict[str, Any]:
    import triton

    return {
        "kernel": kernel.__name__,
        "source": kernel.cache_key,  # covers the functions that the kernel calls
        "triton": triton.__version__,  # pyright: ignore[reportAttributeAccessIssue]
        "chip": chip.name,
        **problem,
    }


def _read_configuration(path: Path, key: Problem, candidates: Sequence[C]) -> C | None:
    """Return the configuration in a key's file, if it is one of the candidates; None otherwise.

    The candidates may have changed since the file was written.
    """

    def parse(held: Any) -> C | None:
        named = held["configuration"]
        return next((c for c in candidates if dataclasses.asdict(c) == named), None)  # type: ignore[call-overload]

    return tuning.read_result(path, key, parse)


def _write(path: Path, key: Problem, found: Any, times: Mapping[Any, float | str]) -> None:
    """Write the configuration that was found to a file, with the times of all candidates."""
    result = {
        "configuration": dataclasses.asdict(found),
        "milliseconds": [[dataclasses.asdict(candidate), t] for candidate, t in times.items()],
    }
    tuning.write_result(path, key, result)
