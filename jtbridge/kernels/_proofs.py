"""The record of the kernels that were proven on this chip: `jtbridge.prove` writes it, and `auto` reads it.

There is a file for each combination of chip, driver and versions, in the folder `proofs` of jtbridge's folder. A record
names the kernels that gave the same results as their references, and for each other kernel its error.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import re
import threading
from collections.abc import Mapping
from pathlib import Path

import jax

from jtbridge.core import cache_folder, tuning
from jtbridge.core.context_variables import assigned
from jtbridge.core.messages import warn_user
from jtbridge.errors import ProofWarning

from . import _chip
from ._launch import interpreting

UNPROVEN = "not proven on this chip: run `python -m jtbridge doctor`"
_PACKAGES = ("triton", "jax-triton", "jax", "jaxlib")
_DRIVERS = (
    (Path("/proc/driver/nvidia/version"), r"Kernel Module\s.*?(\d+(?:\.\d+)+)"),
    (Path("/sys/module/amdgpu/version"), r"(\S+)"),
)
_ONLY: contextvars.ContextVar[frozenset[str] | None] = contextvars.ContextVar("jtbridge_only_kernels", default=None)
# The record that was read last, with the file and its time of change: a file that did not change is not read again.
_LAST: tuple[tuple[str, int], ProofRecord | None] | None = None
_LOCK = threading.Lock()


@dataclasses.dataclass(frozen=True)
class ProofRecord:
    """The result of a proof on one chip.

    Attributes:
        proven: the names of the kernels whose results were right.
        failed: the error of each other kernel, by its name.
    """

    proven: tuple[str, ...]
    failed: Mapping[str, str]


def key() -> dict[str, str] | None:
    """Return the chip, driver, versions and source of the kernels that a record is valid for; None without a GPU."""
    chip = _chip.present()
    if chip is None:
        return None
    capability = "none" if chip.capability is None else str(chip.capability)
    how = {"interpreted": str(interpreting()), "source": _source()}
    return {"chip": chip.name, "capability": capability, "driver": driver(), **_versions(), **how}


def driver() -> str:
    """Return the version of the kernel driver of the GPU; "unknown" if no file says it."""
    for path, pattern in _DRIVERS:
        with contextlib.suppress(OSError):
            match = re.search(pattern, path.read_text())
            if match:
                return match[1]
    return "unknown"


def path_of(key: Mapping[str, str]) -> Path:
    """Return the file of the record for a key."""
    return cache_folder.folder() / "proofs" / f"{tuning.digest(key)}.json"


def record() -> ProofRecord | None:
    """Return the record for this process's chip; None if there is none that can be read."""
    global _LAST
    wanted = key()
    if wanted is None:
        return None
    path = path_of(wanted)
    try:
        at = (str(path), path.stat().st_mtime_ns)
    except FileNotFoundError:
        return None
    except OSError as error:
        return _warn(path, error)
    with _LOCK:
        if _LAST is None or _LAST[0] != at:
            _LAST = at, _read(path, wanted)
        return _LAST[1]


def write(key: Mapping[str, str], record: ProofRecord) -> Path:
    """Write a record, atomically, and return its file.

    Raises:
        OSError: the file cannot be written.
    """
    path = path_of(key)
    value = {"key": dict(key), "proven": sorted(record.proven), "failed": dict(sorted(record.failed.items()))}
    cache_folder.write_json(path, value)
    return path


def unproven_reason() -> str | None:
    """Return why ``backend="auto"`` uses no kernels in this process; None if it uses those that are proven."""
    if jax.process_count() > 1:
        return (
            'a program of several processes has kernels only with `backend="triton"`: the processes\' records of '
            "proven kernels may differ, and their programs may not"
        )
    if _chip.present() is None:
        return 'this process has no GPU, and so no kernel is proven on it; `backend="triton"` uses them anyway'
    found = record()
    if found is None:
        return UNPROVEN
    if not found.proven:
        return f"no kernel passed its proof on this chip: {_listed(found)}"
    return None


def proven() -> frozenset[str]:
    """Return the names of the kernels that are proven on this chip."""
    found = record()
    return frozenset() if found is None else frozenset(found.proven)


def warn_of_failed(name: str) -> None:
    """Warn if a kernel, which the caller asked for by name, failed its proof on this chip."""
    found = record()
    if found is not None and name in found.failed:
        warn_user(
            f"The kernel `{name}` failed its proof on this chip and is used, because it was asked for: "
            f"{found.failed[name]}",
            ProofWarning,
        )


def only(names: frozenset[str]) -> contextlib.AbstractContextManager[None]:
    """Use the kernels `names` in traces inside the block, and the reference in place of every other kernel."""
    return assigned((_ONLY, names))


def is_replaced(name: str) -> bool:
    """Return whether a kernel is replaced by its reference: see :func:`only`."""
    names = kernels_in_use()
    return names is not None and name not in names


def kernels_in_use() -> frozenset[str] | None:
    """Return the names of the kernels that are not replaced: see :func:`only`. None means all."""
    return _ONLY.get()


def _read(path: Path, wanted: Mapping[str, str]) -> ProofRecord | None:
    try:
        held = json.loads(cache_folder.read_text(path))
        proven, failed = held["proven"], held["failed"]
        if held["key"] != dict(wanted):
            raise ValueError("it is the record of something else")
        if not isinstance(proven, list) or not isinstance(failed, dict) or set(proven) & set(failed):
            raise ValueError("it does not list proven and failed kernels")
        if not all(isinstance(text, str) for text in (*proven, *failed, *failed.values())):
            raise ValueError("it has names or reasons that are no text")
    except FileNotFoundError:
        return None
    except (OSError, *cache_folder.MALFORMED) as error:
        return _warn(path, error)
    return ProofRecord(tuple(proven), failed)


def _warn(path: Path, error: Exception) -> None:
    warn_user(
        f"The record of proven kernels cannot be read, and `auto` uses no kernels: {path}: {type(error).__name__}: "
        f"{error}. Run `python -m jtbridge doctor`, which writes it again.",
        ProofWarning,
    )


def _listed(found: ProofRecord) -> str:
    return "; ".join(f"`{name}`: {reason}" for name, reason in sorted(found.failed.items()))


@functools.cache
def _versions() -> dict[str, str]:
    import jtbridge

    return {"jtbridge": jtbridge.__version__, **{name: _version(name) for name in _PACKAGES}}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


@functools.cache
def _source() -> str:
    """Return a digest of the source of the kernels: the version of a checkout does not change with its files."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()[:24]
