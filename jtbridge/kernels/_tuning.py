"""The choice of a kernel's launch configuration: its default, or the fastest of a few candidates that were timed.

By default nothing is timed. Inside ``jtbridge.config(tune=True)`` the candidates are timed when a program is lowered.
The fastest is written to a file, one file for each key, which every later process reads. Within a process, programs
stay the same: a key that got a configuration from a file or from tuning keeps it until the process ends, even if the
file changes. A key without a file at its first use has the default until it is tuned in this process.

A process of a program of several processes (``jax.process_count() > 1``) reads files and never tunes: each process
might find another configuration, and the programs of all must be the same. Tune in a separate process before, and let
all processes read the same folder.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import hashlib
import json
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax

from jtbridge.errors import TuningWarning

from . import _cache_folder, _chip, _timing
from ._launch import interpreting, launch
from ._shapes import next_power_of_2

C = TypeVar("C")
Problem = Mapping[str, int | str | bool | None]

_TUNE: contextvars.ContextVar[bool] = contextvars.ContextVar("jtbridge_tune", default=False)
_FOLDER: contextvars.ContextVar[Path | None] = contextvars.ContextVar("jtbridge_tuning_folder", default=None)
# From the digest of a key to the configuration that was read or timed; None: no usable file. There are no more entries
# than there are kernels and sizes in the programs of the process.
_FOUND: dict[str, Any] = {}
# How many keys were tuned in this process, after programs may have been lowered with the default.
_TUNED_KEYS = 0
_LOCK = threading.RLock()


@contextlib.contextmanager
def settings(tune: bool | None, folder: str | os.PathLike[str] | None) -> Iterator[None]:
    """Set whether kernels are tuned inside the block, and the folder of the results; None leaves a setting as it is."""
    tokens = [
        (_TUNE, _TUNE.set(_TUNE.get() if tune is None else bool(tune))),
        (_FOLDER, _FOLDER.set(_FOLDER.get() if folder is None else Path(folder).expanduser().absolute())),
    ]
    try:
        yield
    finally:
        for variable, token in tokens:
            variable.reset(token)


def program_key() -> int | None:
    """Return a value that differs if a program with kernels, lowered now, may get other configurations than before.

    None stands for any program that is lowered while tuning is on: it has the configurations that were found.
    """
    return None if _TUNE.get() else _TUNED_KEYS


@dataclasses.dataclass(frozen=True)
class LaunchParameters:
    """The grid, constants, warps and pipeline stages that a configuration is launched with."""

    grid: tuple[int, ...]
    constants: Mapping[str, Any]
    num_warps: int
    num_stages: int = 2


def size(n: int) -> int:
    """Return a size as it stands in keys: sizes up to the same power of two share a configuration."""
    return next_power_of_2(n)


def launch_tuned(
    kernel: Any,
    *operands: Any,
    out_types: Sequence[jax.ShapeDtypeStruct],
    candidates: Sequence[C],
    default: C,
    problem: Problem,
    launch_parameters: Callable[[C], LaunchParameters],
    timed: Callable[[C], LaunchParameters] | None = None,
) -> list[jax.Array]:
    """Launch a kernel as :func:`launch` does, with the configuration that was tuned for a problem, or the default.

    Args:
        kernel: a function decorated with ``triton.jit``.
        operands: arrays, and Python numbers.
        out_types: shape and dtype of each result.
        candidates: the configurations that tuning chooses from, frozen dataclasses of numbers. All compute the same.
        default: the configuration where nothing was tuned.
        problem: the values that the choice depends on, beside kernel and chip: sizes (see :func:`size`), dtypes,
            options.
        launch_parameters: returns the launch parameters of a configuration.
        timed: returns the launch parameters for timing, if they differ: operands are made up then, and all integers
            are 0.
    """

    def milliseconds(candidate: C) -> float | str:
        how = dataclasses.asdict((timed or launch_parameters)(candidate))
        return _timing.milliseconds(kernel, operands, out_types=out_types, **how)

    how = launch_parameters(chosen(kernel, candidates, default, problem, milliseconds))
    return launch(
        kernel,
        *operands,
        out_types=out_types,
        grid=how.grid,
        constants=how.constants,
        num_warps=how.num_warps,
        num_stages=how.num_stages,
    )


def chosen(
    kernel: Any, candidates: Sequence[C], default: C, problem: Problem, milliseconds: Callable[[C], float | str]
) -> C:
    """Return the configuration for a problem on this process's chip. See :func:`launch_tuned`."""
    if interpreting():
        return default
    chip = _chip.present()
    if chip is None:
        if _TUNE.get():
            _warn(f"`{kernel.__name__}` is not tuned: this process has no GPU")
        return default
    every = list(dict.fromkeys([default, *candidates]))
    key = _key(kernel, chip, problem)
    path = _folder() / f"{kernel.__name__}-{_digest(key)}.json"
    with _LOCK:
        if _digest(key) not in _FOUND:
            _FOUND[_digest(key)] = _read(path, key, every)
        if _FOUND[_digest(key)] is None and _TUNE.get():
            _FOUND[_digest(key)] = _tuned(path, key, every, milliseconds)
        return _FOUND[_digest(key)] or default


def _tuned(path: Path, key: Problem, candidates: Sequence[C], milliseconds: Callable[[C], float | str]) -> C | None:
    """Time the candidates, write the fastest to a file and return it; None, with a warning, if none could be timed."""
    global _TUNED_KEYS
    reason = _timing.why_not()
    if jax.process_count() > 1:
        reason = "a program of several processes reads what was tuned before, and tunes nothing"
    if reason:
        return _warn(f"`{key['kernel']}` is not tuned: {reason}")
    times = {candidate: milliseconds(candidate) for candidate in candidates}
    timed = {candidate: t for candidate, t in times.items() if not isinstance(t, str)}
    if not timed:
        return _warn(f"`{key['kernel']}` is not tuned: no candidate runs. The first says: {times[candidates[0]]}")
    # Another process may have written a result meanwhile. This process takes that result, as all later ones do.
    found = _read(path, key, candidates) or min(timed, key=timed.__getitem__)
    _write(path, key, found, times)
    _TUNED_KEYS += 1
    return found


def _key(kernel: Any, chip: _chip.Chip, problem: Problem) -> dict[str, Any]:
    import triton

    return {
        "kernel": kernel.__name__,
        "source": kernel.cache_key,  # covers the functions that the kernel calls
        "triton": triton.__version__,  # pyright: ignore[reportAttributeAccessIssue]
        "chip": chip.name,
        **problem,
    }


def _digest(key: Problem) -> str:
    return hashlib.sha256(json.dumps(dict(key), sort_keys=True).encode()).hexdigest()[:24]


def _folder() -> Path:
    return _FOLDER.get() or _cache_folder.folder() / "tuning"


def _read(path: Path, key: Problem, candidates: Sequence[C]) -> C | None:
    """Return the configuration in a key's file, if it is one of the candidates; None otherwise.

    A file that cannot be read or understood counts as missing, with a warning.
    """
    try:
        text = path.read_text()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        return _warn(f"what was tuned cannot be read, the default is used: {type(error).__name__}: {error}")
    try:
        held = json.loads(text)
        same, named = held["key"] == dict(key), held["configuration"]
    except (ValueError, TypeError, KeyError) as error:
        return _warn(f"what was tuned is no such file, the default is used: {path}: {type(error).__name__}: {error}")
    # The candidates may have changed since the file was written.
    return next((c for c in candidates if same and dataclasses.asdict(c) == named), None)  # type: ignore[call-overload]


def _write(path: Path, key: Problem, found: Any, times: Mapping[Any, float | str]) -> None:
    """Write the result of tuning to a file, atomically: other processes that write or read see a whole file.

    If that fails, there is a warning and this process goes on with the result. A later process has to tune again.
    """
    held = {
        "key": dict(key),
        "configuration": dataclasses.asdict(found),
        "milliseconds": [[dataclasses.asdict(candidate), t] for candidate, t in times.items()],
    }
    try:
        _cache_folder.write_json(path, held)
    except OSError as error:
        _warn(f"what was tuned cannot be kept: {type(error).__name__}: {error}")


def _warn(message: str) -> None:
    warnings.warn(message, TuningWarning, stacklevel=2)
