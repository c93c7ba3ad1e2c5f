"""Which configuration a kernel is launched with: its default, or the fastest of a few that were timed.

By default nothing is timed. Inside ``jtbridge.config(tune=True)`` the candidates are, when a program is lowered, and
the fastest is kept in a file, one for each key, that every later process reads. Programs stay the same: what a key was
given in a process it has until the process ends, whatever becomes of the file. A key that had no file when it was first
asked for has its default until it is tuned in this process.

A process of several (``jax.process_count() > 1``) never tunes, for each might find another configuration, and the
programs of all must be one: it only reads. Tune in a process of its own before, and let all read the same folder.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import hashlib
import json
import os
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax

from jtbridge.errors import TuningWarning

from . import _chip, _timing
from ._launch import interpreting, launch
from ._shapes import next_power_of_2

C = TypeVar("C")
Problem = Mapping[str, int | str | bool | None]

_TUNE: contextvars.ContextVar[bool] = contextvars.ContextVar("jtbridge_tune", default=False)
_FOLDER: contextvars.ContextVar[Path | None] = contextvars.ContextVar("jtbridge_tuning_folder", default=None)
# By key what was read or timed; None: there was nothing to read. As many as there are kernels and sizes in a program.
_FOUND: dict[str, Any] = {}
_LOCK = threading.RLock()


@contextlib.contextmanager
def settings(tune: bool | None, folder: str | os.PathLike[str] | None) -> Iterator[None]:
    """Whether to tune inside the block, and where results are kept; None leaves it as it is."""
    tokens = [
        (_TUNE, _TUNE.set(_TUNE.get() if tune is None else bool(tune))),
        (_FOLDER, _FOLDER.set(_FOLDER.get() if folder is None else Path(folder).expanduser().absolute())),
    ]
    try:
        yield
    finally:
        for variable, token in tokens:
            variable.reset(token)


@dataclasses.dataclass(frozen=True)
class LaunchParameters:
    """How a configuration is launched."""

    grid: tuple[int, ...]
    constants: Mapping[str, Any]
    num_warps: int
    num_stages: int = 2


def size(n: int) -> int:
    """A size as keys have it: sizes up to the same power of two share a configuration."""
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
    """As :func:`launch`, with the configuration that was found for a problem, or else the default.

    Args:
        kernel: what ``triton.jit`` made.
        operands: arrays, and Python numbers.
        out_types: shape and dtype of each result.
        candidates: frozen dataclasses of numbers, from which tuning chooses. All compute the same.
        default: what is taken where nothing was tuned.
        problem: what the choice depends on, beside kernel and chip: sizes (see :func:`size`), dtypes, options.
        arranged: how a configuration is launched.
        timed: how it is launched where it is timed, if not so: on made-up numbers, of which integers are all 0.
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
    """The configuration of a problem on this process's chip. See :func:`launch_tuned`."""
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
    """The fastest candidate, which is written down; None, with a warning, if none was timed."""
    reason = _timing.why_not()
    if jax.process_count() > 1:
        reason = "a program of several processes reads what was tuned before, and tunes nothing"
    if reason:
        return _warn(f"`{key['kernel']}` is not tuned: {reason}")
    times = {candidate: milliseconds(candidate) for candidate in candidates}
    timed = {candidate: t for candidate, t in times.items() if not isinstance(t, str)}
    if not timed:
        return _warn(f"`{key['kernel']}` is not tuned: no candidate runs. The first says: {times[candidates[0]]}")
    # Another process may have been faster: then all later ones, and this one, have its result.
    found = _read(path, key, candidates) or min(timed, key=timed.__getitem__)
    _write(path, key, found, times)
    return found


def _key(kernel: Any, chip: _chip.Chip, problem: Problem) -> dict[str, Any]:
    import triton

    return {
        "kernel": kernel.__name__,
        "source": kernel.cache_key,  # of the functions it calls too
        "triton": triton.__version__,  # pyright: ignore[reportAttributeAccessIssue]
        "chip": chip.name,
        **problem,
    }


def _digest(key: Problem) -> str:
    return hashlib.sha256(json.dumps(dict(key), sort_keys=True).encode()).hexdigest()[:24]


def _folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return _FOLDER.get() or Path(base) / "jtbridge" / "tuning"


def _read(path: Path, key: Problem, candidates: Sequence[C]) -> C | None:
    """What was written for a key, if it is one of the candidates. A file that cannot be understood is as none."""
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
    # Candidates may be others than when it was written.
    return next((c for c in candidates if same and dataclasses.asdict(c) == named), None)  # type: ignore[call-overload]


def _write(path: Path, key: Problem, found: Any, times: Mapping[Any, float | str]) -> None:
    """Whole or not at all, whoever else writes. Failing costs the next process its time, and this one nothing."""
    held = {
        "key": dict(key),
        "configuration": dataclasses.asdict(found),
        "milliseconds": [[dataclasses.asdict(candidate), t] for candidate, t in times.items()],
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=path.stem, delete=False) as file:
            json.dump(held, file, indent=1)
        os.replace(file.name, path)
    except OSError as error:
        _warn(f"what was tuned cannot be kept: {type(error).__name__}: {error}")


def _warn(message: str) -> None:
    warnings.warn(message, TuningWarning, stacklevel=2)
