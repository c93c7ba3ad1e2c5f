"""The references of the kernels are exact on a GPU too. Tests that need no GPU are marked."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

import jtbridge
from jtbridge.kernels import _chip, _eager, _timing, _tuning
from jtbridge.kernels._chip import Chip
from jtbridge.kernels._launch import interpreting

from .harness import all_proven


@pytest.fixture(autouse=True)
def exact_products() -> Iterator[None]:
    """Use full float32 products: JAX's default on a GPU uses ten bits."""
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture(autouse=True)
def new_programs() -> None:
    """Compile the programs of eager calls again: a test may have changed their configurations."""
    _eager._program.clear_cache()


@pytest.fixture
def proven() -> Iterator[None]:
    """Let "auto" use every kernel, as on a GPU on which all are proven."""
    with all_proven():
        yield


@pytest.fixture
def untuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Start without tuned configurations, with a separate folder and a simulated GPU."""
    monkeypatch.setattr(_tuning, "_FOUND", {})
    monkeypatch.setattr(_chip, "present", lambda: Chip("NVIDIA H100 80GB HBM3", 90))
    with jtbridge.config(tuning_folder=tmp_path):
        yield


@pytest.fixture
def timed(untuned: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tuning run on the simulated GPU. A test gives the times by replacing `_timing.milliseconds`."""
    if interpreting():
        pytest.skip("kernels are interpreted in this process: nothing is tuned")
    monkeypatch.setattr(_timing, "untimed_reason", lambda: None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that compile kernels for GPUs that the machine need not have."""
    for item in items:
        if re.search("_compiles?(_|$)", item.name.partition("[")[0]):
            item.add_marker("compiles")
