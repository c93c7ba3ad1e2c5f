"""Set up before jax is imported: eight CPU devices. Then the fixtures that most tests use."""

from __future__ import annotations

import os

os.environ["XLA_FLAGS"] = " ".join(
    [os.environ.get("XLA_FLAGS", ""), "--xla_force_host_platform_device_count=8"]
).strip()

import gc
import logging
import logging.handlers
import zlib
from collections.abc import Iterator

import hypothesis
import jax
import numpy as np
import pytest

import jtbridge

# Thousands of traced programs are alive in a run; repeated garbage collections of them take an eighth of its time.
gc.set_threshold(200_000, 20, 100)

hypothesis.settings.register_profile("dev", max_examples=25, deadline=None)
hypothesis.settings.register_profile("ci", max_examples=25, deadline=None, derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "dev")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option with which CI runs a sample of a long suite."""
    parser.addoption("--every", type=int, default=1, metavar="N", help="run one test in N, the same ones each time")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep one test in N, chosen by a hash of its name: a stride would choose the same parameters again and again."""
    every = config.getoption("every")
    chosen = [item for item in items if zlib.crc32(item.nodeid.encode()) % every == 0]
    kept = set(chosen)
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = chosen


@pytest.fixture(autouse=True)
def strict_promotion() -> Iterator[None]:
    """Make JAX refuse implicit promotion, so that no test passes because JAX changed a dtype."""
    with jax.numpy_dtype_promotion("strict"):
        yield


@pytest.fixture(params=[status.name for status in jtbridge.backends("cpu") if status.kind == "call"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run the test once with each backend that calls torch."""
    with jtbridge.config(backend=request.param):
        yield request.param


@pytest.fixture
def log_records() -> Iterator[list[logging.LogRecord]]:
    """Collect the warnings and errors that are logged, also by loggers that do not propagate, such as torch's."""
    loggers = [logging.getLogger(name) for name in logging.root.manager.loggerDict]
    handler = logging.handlers.BufferingHandler(capacity=10_000)
    handler.setLevel(logging.WARNING)
    ends = [logging.root, *(logger for logger in loggers if not logger.propagate)]
    for logger in ends:
        logger.addHandler(handler)
    yield handler.buffer
    for logger in ends:
        logger.removeHandler(handler)


@pytest.fixture
def x64() -> Iterator[None]:
    """Enable 64-bit types, so that derivatives of high order can be compared to ten digits instead of three."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def rng() -> np.random.Generator:
    """Return a generator of random numbers, the same in every run."""
    return np.random.default_rng(20240607)
