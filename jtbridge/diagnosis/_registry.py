"""The checks of the files of the folder `checks`, in the order of the report."""

from __future__ import annotations

import importlib
import pkgutil

from ._checks import Check

# Groups in the order of the report; others follow in the order of their names.
_ORDER = (
    "versions",
    "libraries",
    "devices",
    "memory",
    "threads",
    "caches",
    "backends",
    "dlpack",
    "arithmetic",
    "capabilities",
    "kernels",
    "speed",
)


def all_checks() -> list[Check]:
    """Return the `CHECKS` of all files of the folder `checks`, in the order of the report."""
    package = f"{__name__.rpartition('.')[0]}.checks"
    found: list[Check] = []
    for file in pkgutil.iter_modules(importlib.import_module(package).__path__):
        found += importlib.import_module(f"{package}.{file.name}").CHECKS
    return sorted(found, key=lambda check: rank(check.group))


def rank(group: str) -> tuple[int, str]:
    """Return the position of a group in the report, as a key to sort by."""
    return (_ORDER.index(group) if group in _ORDER else len(_ORDER), group)
