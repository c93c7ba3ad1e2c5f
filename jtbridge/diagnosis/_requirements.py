"""Versions of installed packages, compared without the package `packaging`, which need not be installed."""

from __future__ import annotations

import importlib.metadata
import itertools
import re

_CLAUSE = re.compile(r"(===|==|>=|<=|!=|~=|<|>)\s*([\w.*+!-]+)")
_REQUIREMENT = re.compile(r"^([A-Za-z0-9._-]+)\s*(?:\[[^\]]*\])?\s*\(?([^;)]*)\)?\s*(?:;(.*))?$")


def version_of(package: str) -> str | None:
    """Return the version of an installed package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def release(version: str) -> tuple[int, ...]:
    """Return the numbers of a release: (2, 13, 0) for "2.13.0+cpu", (3, 8) for "3.8rc1"."""
    match = re.match(r"v?(\d+(?:\.\d+)*)", version)
    return tuple(int(part) for part in match[1].split(".")) if match else ()


def meets(version: str, specifier: str) -> bool:
    """Return whether a version meets a specifier such as ">=9.8,<10". Suffixes such as ``rc1`` do not count."""
    return all(_meets(release(version), operator, wanted) for operator, wanted in _CLAUSE.findall(specifier))


def requirements_of(package: str, extra: str = "") -> list[tuple[str, str]]:
    """Return the names and specifiers that an installed package requires, without those of extras except `extra`."""
    try:
        lines = importlib.metadata.requires(package) or []
    except importlib.metadata.PackageNotFoundError:
        return []
    found = []
    for line in lines:
        match = _REQUIREMENT.match(line.strip())
        marker = (match and match[3]) or ""
        if match and ("extra" not in marker or (extra and f'"{extra}"' in marker)):
            found.append((match[1], match[2].strip()))
    return found


def _meets(version: tuple[int, ...], operator: str, wanted: str) -> bool:
    numbers = release(wanted)
    if operator in ("==", "===", "!=") and wanted.endswith(".*"):
        same = version[: len(numbers)] == numbers
        return same if operator != "!=" else not same
    if operator == "~=":
        return _order(version, numbers) >= 0 and version[: len(numbers) - 1] == numbers[:-1]
    order = _order(version, numbers)
    return {
        "==": order == 0,
        "===": order == 0,
        "!=": order != 0,
        ">=": order >= 0,
        "<=": order <= 0,
        ">": order > 0,
        "<": order < 0,
    }[operator]


def _order(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Return -1, 0 or 1 if `one` is lower than, equal to or higher than `other`; missing numbers count as 0."""
    pairs = list(itertools.zip_longest(one, other, fillvalue=0))
    first, second = [a for a, _ in pairs], [b for _, b in pairs]
    return (first > second) - (first < second)
