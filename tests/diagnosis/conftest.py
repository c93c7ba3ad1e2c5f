"""Fixtures that inject faults into the children of the doctor, and findings of a report by name."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from jtbridge.diagnosis import _children, _doctor
from jtbridge.diagnosis._registry import all_checks
from jtbridge.diagnosis._report import DoctorReport, Finding


def named(report: DoctorReport, name: str) -> Finding:
    """Return the only finding with a name."""
    (found,) = [finding for finding in report.findings if finding.name == name]
    return found


@pytest.fixture
def prelude(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return a function that makes every child run some code first."""
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    return lambda code: monkeypatch.setattr(_children, "PRELUDE", code)


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that keeps only some checks, by name."""

    def keep(*names: str) -> None:
        kept = [check for check in all_checks() if check.name in names]
        assert len(kept) == len(names)
        monkeypatch.setattr(_doctor, "all_checks", lambda: kept)

    return keep
