"""Transformations are tried with every backend, those that translate included."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import jtbridge


@pytest.fixture(params=["xla", "dlpack", "callback"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs the test once with each backend."""
    with jtbridge.config(backend=request.param):
        yield request.param
