"""The folder where jtbridge keeps files, and files that are replaced as a whole."""

from __future__ import annotations

import json
import os
import stat
import uuid
from pathlib import Path
from typing import Any

_MAX_FILE_BYTES = 16 << 20  # bytes of a file that is read
# The exceptions that reading values from a damaged JSON file may raise. The last two are for a very long number and for
# deeply nested brackets.
MALFORMED = (ValueError, TypeError, KeyError, OverflowError, RecursionError)


def home() -> Path:
    """Return the user's home folder; for a user who has none, `/dev/null`, which cannot contain files."""
    try:
        return Path.home()
    except RuntimeError:  # no $HOME and no entry in the user database, as in a container
        return Path(os.devnull)


def folder() -> Path:
    """Return jtbridge's folder: `$XDG_CACHE_HOME/jtbridge`, or `~/.cache/jtbridge`."""
    base = os.environ.get("XDG_CACHE_HOME") or home() / ".cache"
    return Path(base) / "jtbridge"


def read_text(path: Path) -> str:
    """Return the text of a file, which may be anything that a user has put there.

    Raises:
        OSError: there is no such file, or it is a pipe, a device or a folder, or too large.
        UnicodeDecodeError: it is not UTF-8.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):  # reading from a pipe may wait, and a device may have no end
        raise OSError(f"{path} is not a regular file")
    if status.st_size > _MAX_FILE_BYTES:
        raise OSError(f"{path} has {status.st_size} bytes")
    return path.read_text()


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file, atomically: other processes that write or read it see a whole file.

    Raises:
        OSError: the file cannot be written. The file that was there stays.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not `tempfile`, whose files no other user can read: several users may share the folder.
    whole = path.with_name(f"{path.stem}-{uuid.uuid4().hex}")
    try:
        with whole.open("x") as file:
            json.dump(value, file, indent=1)
        os.replace(whole, path)
    except BaseException:
        whole.unlink(missing_ok=True)
        raise
