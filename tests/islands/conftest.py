"""Fixtures that keep tests of islands independent of choices that were tuned on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import jtbridge
from jtbridge.core import tuning
from jtbridge.translate import _choice


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder in which a test stores the choices that it tunes."""
    return tmp_path / "tuning"


@pytest.fixture(autouse=True)
def untuned(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Start without tuned choices, and with a separate folder."""
    monkeypatch.setattr(_choice, "_FOUND", {})
    monkeypatch.setattr(tuning, "_ENTERED", False)
    monkeypatch.setattr(tuning, "_UNTUNED", {})
    with jtbridge.config(tuning_folder=folder):
        yield
