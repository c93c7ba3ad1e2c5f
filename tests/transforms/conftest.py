"""Transformations are tested with a backend that translates and one that calls, values and gradients with all."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import jtbridge

_ALL = ("xla", "dlpack", "callback")
_TWO = ("xla", "dlpack")  # `callback` runs the same derivatives of torch as `dlpack` does
_WITH_ALL = ("test_results", "test_grad", "test_vmap", "test_shard_map")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give every test that asks for a backend its backends."""
    marked = any("backend" in mark.args[0] for mark in metafunc.definition.iter_markers("parametrize"))
    if "backend" in metafunc.fixturenames and not marked:
        module = metafunc.module.__name__.rpartition(".")[2]
        metafunc.parametrize("backend", _ALL if module in _WITH_ALL else _TWO, indirect=True)


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs the test with this backend."""
    with jtbridge.config(backend=request.param):
        yield request.param
