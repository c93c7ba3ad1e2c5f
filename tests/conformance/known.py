"""The checked-in list of cases that are known to fail, each with its reason.

The list is exact: a failure that is not in it and an entry that does not fail are both errors.
"""

from __future__ import annotations

import json
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .modes import MODES
from .worker import Case

PATH = Path(__file__).with_name("known_failures.toml")
_HEADER = """\
# Cases that fail, under the reason they have in common: an operator, its samples, the modes they fail in.
# `python -m tests.conformance --update` adds and drops cases and keeps the reasons written here by hand.
"""
# dtype, backend, reason
_Group = tuple[str, str, str]


@dataclass(frozen=True)
class Known:
    """The entries of the list for one dtype; "" stands for the first dtype that each operator supports."""

    reasons: Mapping[Case, str]
    dtype: str = ""


def load(path: Path = PATH, dtype: str = "") -> Known:
    return Known({case: reason for (found, case), reason in _read(path).items() if found == dtype}, dtype)


def _read(path: Path) -> dict[tuple[str, Case], str]:
    if not path.exists():
        return {}
    table: dict[tuple[str, Case], str] = {}
    for group in tomllib.loads(path.read_text()).get("failures", []):
        if not group["reason"].strip():
            raise ValueError(f"{path.name} gives no reason for {group['cases']}.")
        for line in group["cases"]:
            for case in _cases(group["backend"], line):
                key = group.get("dtype", ""), case
                if key in table:
                    raise ValueError(f"{path.name} lists {key} twice.")
                table[key] = group["reason"]
    return table


def _cases(backend: str, line: str) -> list[Case]:
    operator, samples, modes = line.split()
    return [Case(backend, operator, int(sample), mode) for sample in samples.split(",") for mode in modes.split(",")]


def update(failed: Mapping[Case, str], ran: Sequence[Case], dtype: str = "", path: Path = PATH) -> None:
    """Rewrite the list: the cases that ran and failed, and the old entries of cases that did not run."""
    before = _read(path)
    cases = set(ran)
    after = {key: reason for key, reason in before.items() if key[0] != dtype or key[1] not in cases}
    for case, detail in failed.items():
        after[dtype, case] = before.get((dtype, case), detail)
    groups: dict[_Group, list[Case]] = defaultdict(list)
    for (dtype_, case), reason in after.items():
        groups[dtype_, case.backend, reason].append(case)
    path.write_text("\n".join([_HEADER, *(_table(group, cases) for group, cases in sorted(groups.items()))]))


def _table(group: _Group, cases: Iterable[Case]) -> str:
    dtype, backend, reason = group
    modes: dict[tuple[str, int], list[str]] = defaultdict(list)
    for case in sorted(cases, key=lambda case: MODES.index(case.mode)):
        modes[case.operator, case.sample].append(case.mode)
    samples: dict[tuple[str, str], list[int]] = defaultdict(list)
    for (operator, sample), failing in sorted(modes.items()):
        samples[operator, ",".join(failing)].append(sample)
    lines = [f"{operator} {','.join(map(str, found))} {failing}" for (operator, failing), found in samples.items()]
    # A JSON string is a TOML basic string.
    head = {"dtype": dtype} if dtype else {}
    head |= {"backend": backend, "reason": reason}
    return "".join(
        [
            "[[failures]]\n",
            *(f"{key} = {json.dumps(value)}\n" for key, value in head.items()),
            "cases = [\n",
            *(f"    {json.dumps(line)},\n" for line in lines),
            "]\n",
        ]
    )
