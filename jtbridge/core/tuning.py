"""Tuning: choices that are measured on the user's machine, kept in files, and the same for a whole process.

By default nothing is measured. Inside ``jtbridge.config(tune=True)`` a choice is measured when a program is lowered.
The result is written to a file, one file for each key, which every later process reads. Within a process, programs stay
the same: a key that got a result from a file or from a measurement keeps it until the process ends, even if the file
changes. A key without a file at its first use has the default until it is tuned in this process.

A process of a program of several processes (``jax.process_count() > 1``) reads files and never measures: each process
might find another result, and the programs of all must be the same. Tune in a separate process before, and let all
processes read the same folder.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import hashlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax

from jtbridge.errors import TuningWarning

from . import cache_folder
from .context_variables import assigned
from .messages import warn_user

T = TypeVar("T")
ChoiceKey = Mapping[str, Any]  # the values that a choice depends on, of types that JSON has

_TUNE: contextvars.ContextVar[bool] = contextvars.ContextVar("jtbridge_tune", default=False)
_FOLDER: contextvars.ContextVar[Path | None] = contextvars.ContextVar("jtbridge_tuning_folder", default=None)
_LOCK = threading.RLock()
_ENTERED = False  # whether tuning was on in this process
# The names of the untuned choices that programs were compiled with, each with whether JAX has dropped these programs
# since. A name is the digest of one choice's key, or a text for all choices of a program.
_UNTUNED: dict[str, bool] = {}
_FILES: dict[str, list[Path]] = {}  # the files of the results of this process, by the digests of their keys
_GENERATION = 0  # how often JAX dropped its programs for new choices


@contextlib.contextmanager
def settings(tune: bool | None, folder: Path | None) -> Iterator[None]:
    """Set whether choices are measured inside the block, and the folder of the results. None leaves a setting as it is.

    Programs that were compiled with choices that tuning might change are compiled again, in the block or after it.
    """
    global _ENTERED
    if tune:
        _ENTERED = True
        _forget_untuned_programs()
    chosen = _FOLDER.get() if folder is None else folder
    with assigned((_TUNE, _TUNE.get() if tune is None else bool(tune)), (_FOLDER, chosen)):
        yield


def _forget_untuned_programs() -> None:
    """Make JAX drop its programs if there are new untuned choices: a loop around a block compiles them only once."""
    global _GENERATION
    with _LOCK:
        if not all(_UNTUNED.values()):
            _UNTUNED.update(dict.fromkeys(_UNTUNED, True))
            _GENERATION += 1
            jax.clear_caches()


def note_untuned(name: str) -> None:
    """Record that a program was compiled with an untuned choice. `name` is a key's digest, or one for all choices."""
    with _LOCK:
        _UNTUNED.setdefault(name, False)


def generation() -> int:
    """Return a number that changes when programs may get other choices than before. It is part of cache keys."""
    return _GENERATION


def is_on() -> bool:
    """Return whether choices are measured."""
    return _TUNE.get()


def has_results(files: str) -> bool:
    """Return whether something may have been tuned: in this process, or in another one that used the same folder.

    Args:
        files: the pattern of the names of the files.
    """
    return _ENTERED or _has_files(results_folder(), files)


@functools.cache
def _has_files(folder: Path, files: str) -> bool:
    try:
        return any(folder.glob(files))
    except OSError:  # such as a folder of another user, if $HOME is root's
        return False


def results_folder() -> Path:
    """Return the folder of the results."""
    return _FOLDER.get() or cache_folder.folder() / "tuning"


def digest(key: ChoiceKey) -> str:
    """Return the name of a key in file names and tables."""
    return hashlib.sha256(json.dumps(dict(key), sort_keys=True).encode()).hexdigest()[:24]


def known_or_tuned(
    found: dict[str, T | None], key: ChoiceKey, path: Path, read: Callable[[], T | None], tune: Callable[[], T | None]
) -> T | None:
    """Return the result for a key, from this process, from the key's file or measured now; None if there is none.

    Where tuning is on, a result that this process has from another folder is copied into the file.

    Args:
        found: the results of this process by the digests of their keys; None for a key without a usable file. The
            result is added.
        key: the key.
        path: the key's file.
        read: returns the result in the key's file.
        tune: measures the choice and returns the result. It is called where tuning is on and there is no result.
    """
    name = digest(key)
    with _LOCK:
        if found.get(name) is None:
            # A key without a file at its first use has the default until it is tuned.
            found[name] = read() if name not in found else None
            if found[name] is None and _TUNE.get():
                found[name] = tune()
            if found[name] is not None:
                _FILES[name] = [path]
        elif _TUNE.get() and path not in _FILES[name]:
            _copy_result(_FILES[name][0], path)
            _FILES[name].append(path)
        return found[name]


def _copy_result(path: Path, other: Path) -> None:
    """Copy the file of a result, unless there is one. If that fails, there is a warning."""
    try:
        if other.exists():
            return
        cache_folder.write_json(other, json.loads(cache_folder.read_text(path)))
    except (OSError, UnicodeDecodeError, *cache_folder.MALFORMED) as error:
        warn(f"a tuning result cannot be copied: {type(error).__name__}: {error}")


def several_processes_reason() -> str | None:
    """Return why a program of several processes tunes nothing; None in a program of one process."""
    if jax.process_count() > 1:
        return "a program of several processes reads earlier tuning results, and tunes nothing"
    return None


def read_result(path: Path, key: ChoiceKey, parse: Callable[[Any], T | None]) -> T | None:
    """Return the result in a key's file; None if there is none for this key.

    A file that cannot be read or understood counts as missing, with a warning.

    Args:
        path: the file.
        key: the key.
        parse: returns the result from the content of the file, which may be anything. It may raise the exceptions of
            `cache_folder.MALFORMED`.
    """
    try:
        text = cache_folder.read_text(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UnicodeDecodeError) as error:
        return warn(f"a tuning result cannot be read, the default is used: {type(error).__name__}: {error}")
    try:
        held = json.loads(text)
        result = parse(held)
        return result if held["key"] == dict(key) else None
    except cache_folder.MALFORMED as error:
        return warn(f"no tuning result is in {path}, the default is used: {type(error).__name__}: {error}")


def write_result(path: Path, key: ChoiceKey, result: Mapping[str, Any]) -> None:
    """Write the result of tuning to a file, atomically: other processes that write or read see a whole file.

    If that fails, there is a warning and this process goes on with the result. A later process has to tune again.
    """
    try:
        cache_folder.write_json(path, {"key": dict(key), **result})
    except OSError as error:
        warn(f"a tuning result cannot be saved: {type(error).__name__}: {error}")


def warn(message: str) -> None:
    """Warn that a choice is not tuned, or that its result cannot be read or saved."""
    warn_user(message, TuningWarning)
