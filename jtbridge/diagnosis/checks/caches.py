"""The folders that jtbridge, JAX, torch and Triton write to."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from jtbridge.core import cache_folder
from jtbridge.diagnosis._checks import Check
from jtbridge.diagnosis._report import OK, WARNING, Finding

_GROUP = "caches"


def _of_triton() -> Path:
    # Triton's default, from its documentation of TRITON_CACHE_DIR.
    return Path(os.environ.get("TRITON_CACHE_DIR") or cache_folder.home() / ".triton" / "cache")


def _of_jax() -> Path | None:
    import jax

    folder = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    return Path(folder) if folder and "://" not in folder else None


_USES: dict[str, tuple[Callable[[], Path | None], str, str]] = {
    "jtbridge": (
        cache_folder.folder,
        "tuned configurations and records of proven kernels are not kept",
        "Make the folder writable, or set XDG_CACHE_HOME to a folder that is.",
    ),
    "triton": (
        _of_triton,
        "Triton cannot compile kernels",
        "Make the folder writable, or set TRITON_CACHE_DIR to a folder that is.",
    ),
    "jax": (
        _of_jax,
        "JAX compiles every program again in every process",
        "Make the folder writable, or set JAX_COMPILATION_CACHE_DIR to a folder that is.",
    ),
}


def _folder_findings() -> Sequence[Finding]:
    found = []
    for name, (folder_of, consequence, fix) in _USES.items():
        folder = folder_of()
        if folder is None:
            continue
        reason = unwritable_reason(folder)
        if reason is None:
            found.append(Finding(_GROUP, name, OK, str(folder)))
        else:
            found.append(Finding(_GROUP, name, WARNING, f"{folder} cannot be written to: {reason}; {consequence}", fix))
    return found


def unwritable_reason(folder: Path) -> str | None:
    """Return why a folder, or a file in it, cannot be created; None if both can. The test leaves nothing behind."""
    missing: list[Path] = []
    try:
        missing = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix="jtbridge-doctor-") as file:
            file.write(b"x" * 4096)
            file.flush()
    except OSError as error:
        return f"{type(error).__name__}: {error.strerror or error}"
    finally:
        for path in missing:
            with contextlib.suppress(OSError):  # another process may use it by now
                path.rmdir()
    return None


CHECKS = (Check(_GROUP, "folders", _folder_findings),)
