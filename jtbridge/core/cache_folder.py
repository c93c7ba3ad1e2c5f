"""The folder where jtbridge keeps files, and files that are replaced as a whole."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

# The exceptions of reading JSON values from a damaged file: the last two for a long number and for many brackets.
MALFORMED = (ValueError, TypeError, KeyError, OverflowError, RecursionError)


def home() -> Path:
    """Return the user's home; below `/dev/null`, where there are no files, for a user who has none."""
    try:
        return Path.home()
    except RuntimeError:  # neither $HOME nor an entry among the users, as in a container with a user of its own
        return Path(os.devnull)


def folder() -> Path:
    """Return jtbridge's folder: `$XDG_CACHE_HOME/jtbridge`, or `~/.cache/jtbridge`."""
    base = os.environ.get("XDG_CACHE_HOME") or home() / ".cache"
    return Path(base) / "jtbridge"


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file, atomically: other processes that write or read it see a whole file.

    Raises:
        OSError: the file cannot be written. The file that was there stays.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=path.stem, delete=False) as file:
        try:
            json.dump(value, file, indent=1)
            file.flush()
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise
