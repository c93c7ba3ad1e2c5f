"""The class of a check of the doctor, and helpers of the checks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ._report import Finding


@dataclasses.dataclass(frozen=True)
class Check:
    """One check.

    Attributes:
        group: the heading under which the report shows it.
        name: the name of the check, unique in its group.
        run: returns findings. If it raises an exception, the finding is a failure.
        process: the name of the child process that the check shares with others, see `PROCESSES` in `_doctor.py`;
            empty for the doctor's own process, in which a check may not start JAX's backends.
        fix: what to do if the check raises, kills its process or does not end.
    """

    group: str
    name: str
    run: Callable[[], Sequence[Finding]]
    process: str = ""
    fix: str = ""

    @property
    def key(self) -> str:
        return f"{self.group}: {self.name}"


class WrongValue(Exception):
    """Exception: a computed value is not the expected one."""


def expect(got: Any, want: Any, tolerance: float = 1e-5) -> None:
    """Raise `WrongValue` unless `got` has the shape of `want` and its values, up to `tolerance`."""
    found, expected = np.asarray(got), np.asarray(want)
    if found.shape != expected.shape:
        raise WrongValue(f"wrong shape: {found.shape} where {expected.shape} is right")
    if not np.allclose(found, expected, rtol=tolerance, atol=tolerance, equal_nan=True):
        raise WrongValue(f"wrong value: {found.ravel()[:4].tolist()} where {expected.ravel()[:4].tolist()} is right")
