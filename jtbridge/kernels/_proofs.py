"""The record of the kernels that were proven on this chip: `jtbridge.prove` writes it, ``backend="auto"`` reads it.

Each combination of chip, driver, versions and kernel source has its own file, in the folder `proofs` of jtbridge's
cache folder. A record names the kernels that gave the same results as their references, and the error of each kernel
that did not.
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

from jtbridge.core import cache_folder, tuning, version
from jtbridge.core.backend_names import WITH_KERNELS
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
# The path and modification time of the file that was read last, and its record. An unchanged file is not read again.
_LAST: tuple[tuple[str, int], ProofRecord | None] | None = None
_LOCK = threading.Lock()


@dataclasses.dataclass(frozen=True)
class ProofRecord:
    """The result of a proof on one chip.

    Attributes:
        proven: the names of the kernels whose results were right.
        failed: the errors of the kernels whose results were wrong or that did not run, by name.
    """

    proven: tuple[str, ...]
    failed: Mapping[str, str]


def key() -> dict[str, str] | None:
    """Return the key of this process's record: all that a proof depends on, such as chip, driver, versions and source.

    None without a GPU.
    """
    chip = _chip.present()
    if chip is None:
        return None
    capability = "none" if chip.capability is None else str(chip.capability)
    how = {"interpreted": str(interpreting()), "source": _source_digest()}
    return {"chip": chip.name, "capability": capability, "driver": driver(), **_package_versions(), **how}


def driver() -> str:
    """Return the version of the GPU's kernel driver; "unknown" if the driver's files do not contain it."""
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
    """Return the record for this process's chip; None if there is none, or, with a warning, if it cannot be read."""
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
        return _warn_unreadable(path, error)
    with _LOCK:
        if _LAST is None or _LAST[0] != at:
            _LAST = at, _read_record(path, wanted)
        return _LAST[1]


def write_record(key: Mapping[str, str], record: ProofRecord) -> Path:
    """Write a record, atomically, and return its file.

    Raises:
        OSError: the file cannot be written.
    """
    path = path_of(key)
    value = {"key": dict(key), "proven": sorted(record.proven), "failed": dict(sorted(record.failed.items()))}
    cache_folder.write_json(path, value)
    return path


def unproven_reason() -> str | None:
    """Return why ``backend="auto"`` uses no kernels in this process; None if it uses proven kernels."""
    if jax.process_count() > 1:
        return (
            f'a program of several processes has kernels only with `backend="{WITH_KERNELS}"`: the processes\' '
            "records of proven kernels may differ, and their programs must not"
        )
    if _chip.present() is None:
        backend = f'`backend="{WITH_KERNELS}"`'
        return f"this process has no GPU, so no kernel is proven on it; {backend} uses unproven kernels too"
    found = record()
    if found is None:
        return UNPROVEN
    if not found.proven:
        failures = "; ".join(f"`{name}`: {reason}" for name, reason in sorted(found.failed.items()))
        return f"no kernel passed its proof on this chip: {failures}"
    return None


def proven() -> frozenset[str]:
    """Return the names of the kernels that are proven on this chip."""
    found = record()
    return frozenset() if found is None else frozenset(found.proven)


def warn_if_failed(name: str) -> None:
    """Warn if a kernel, which a program is about to use, failed its proof on this chip."""
    found = record()
    if found is not None and name in found.failed:
        warn_user(
            f"The kernel `{name}` failed its proof on this chip and is used, because it was asked for: "
            f"{found.failed[name]}",
            ProofWarning,
        )


def only(names: frozenset[str]) -> contextlib.AbstractContextManager[None]:
    """Return a context in which traces use the kernels `names`, and the references of all other kernels."""
    return assigned((_ONLY, names))


def is_replaced(name: str) -> bool:
    """Return whether a kernel is replaced by its reference: see :func:`only`."""
    names = kernels_in_use()
    return names is not None and name not in names


def kernels_in_use() -> frozenset[str] | None:
    """Return the names of the kernels that are not replaced: see :func:`only`. None means all."""
    return _ONLY.get()


def _read_record(path: Path, wanted: Mapping[str, str]) -> ProofRecord | None:
    try:
        held = json.loads(cache_folder.read_text(path))
        proven, failed = held["proven"], held["failed"]
        if held["key"] != dict(wanted):
            raise ValueError("its key is not the key of this process")
        if not isinstance(proven, list) or not isinstance(failed, dict) or set(proven) & set(failed):
            raise ValueError("it does not list proven and failed kernels")
        if not all(isinstance(text, str) for text in (*proven, *failed, *failed.values())):
            raise ValueError("a kernel's name or error in it is not a string")
    except FileNotFoundError:
        return None
    except (OSError, *cache_folder.MALFORMED) as error:
        return _warn_unreadable(path, error)
    return ProofRecord(tuple(proven), failed)


def _warn_unreadable(path: Path, error: Exception) -> None:
    warn_user(
        f"The record of proven kernels cannot be read, and `auto` uses no kernels: {path}: {type(error).__name__}: "
        f"{error}. Run `python -m jtbridge doctor`, which writes it again.",
        ProofWarning,
    )


@functools.cache
def _package_versions() -> dict[str, str]:
    return {"jtbridge": version.__version__, **{name: _package_version(name) for name in _PACKAGES}}


def _package_version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


@functools.cache
def _source_digest() -> str:
    """Return a digest of the kernels' source files. In a checkout, files change while the version stays the same."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()[:24]
