"""The checked-in list of cases that are known to fail, each with its reason.

The list is exact: a failure that is not in it and an entry that does not fail are both errors.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .worker import Case

PATH = Path(__file__).with_name("known_failures.toml")
_HEADER = """\
# Cases that fail for a reason that lies in torch or JAX, not in what is measured: one line each, with the reason.
# `python -m tests.conformance --update` adds and drops lines and keeps the reasons written here by hand.
"""


@dataclass(frozen=True)
class Known:
    """The entries for one dtype; `dtype` is "" for every operator's own first choice."""

    reasons: Mapping[Case, str]
    dtype: str = ""


def load(path: Path = PATH, dtype: str = "") -> Known:
    return Known({case: reason for (found, case), reason in _read(path).items() if found == dtype}, dtype)


def _read(path: Path) -> dict[tuple[str, Case], str]:
    if not path.exists():
        return {}
    entries = tomllib.loads(path.read_text()).get("failures", [])
    table: dict[tuple[str, Case], str] = {}
    for entry in entries:
        key = entry.get("dtype", ""), Case(entry["backend"], entry["op"], entry["sample"], entry["mode"])
        if key in table:
            raise ValueError(f"{path.name} lists {key} twice.")
        if not entry["reason"].strip():
            raise ValueError(f"{path.name} gives no reason for {key}.")
        table[key] = entry["reason"]
    return table


def update(failed: Mapping[Case, str], ran: Sequence[Case], dtype: str = "", path: Path = PATH) -> None:
    """Rewrite the list: of the cases that ran, those that failed. Entries that did not run stay as they are."""
    before = _read(path)
    cases = set(ran)
    after = {key: reason for key, reason in before.items() if key[0] != dtype or key[1] not in cases}
    for case, detail in failed.items():
        after[dtype, case] = before.get((dtype, case), detail)
    lines = [_line(dtype, case, reason) for (dtype, case), reason in sorted(after.items())]
    path.write_text(f"{_HEADER}failures = [\n{''.join(lines)}]\n")


def _line(dtype: str, case: Case, reason: str) -> str:
    # A JSON string is a TOML basic string.
    fields: dict[str, str | int] = {"dtype": dtype} if dtype else {}
    fields |= {"backend": case.backend, "op": case.operator, "sample": case.sample, "mode": case.mode}
    fields["reason"] = reason
    return f"    {{ {', '.join(f'{key} = {json.dumps(value)}' for key, value in fields.items())} }},\n"
