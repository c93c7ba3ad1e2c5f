"""Fixtures of the tests of models."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture
def standard_promotion(strict_promotion: None) -> Iterator[None]:
    """Use JAX's standard promotion of dtypes, on which optax relies."""
    with jax.numpy_dtype_promotion("standard"):
        yield
