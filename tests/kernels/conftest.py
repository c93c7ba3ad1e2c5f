"""What the kernels are compared with is exact on a GPU too, and what needs none is told apart."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(autouse=True)
def exact_products() -> Iterator[None]:
    """JAX's own default takes ten bits of float32 there."""
    with jax.default_matmul_precision("highest"):
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test whose name says that something compiles does so for GPUs that need not be there."""
    for item in items:
        if "_compiles" in item.name:
            item.add_marker("compiles")
