"""A profiler that runs while jtbridge traces: it goes on, and the results are the same as without it."""

from __future__ import annotations

import contextlib
import cProfile
import pstats
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jtbridge
from jtbridge import errors

pytestmark = pytest.mark.filterwarnings("ignore:.*Profiler clears events:UserWarning")  # torch 2.11
X = jnp.ones(3)


def pure(x: torch.Tensor) -> torch.Tensor:
    return x * random.Random(0).random()


def draws_from_python(x: torch.Tensor) -> torch.Tensor:
    return x * random.random()


def draws_from_numpy(x: torch.Tensor) -> torch.Tensor:
    return x * float(np.random.rand())


@contextlib.contextmanager
def c_profile() -> Iterator[Any]:
    profiler = cProfile.Profile()
    profiler.enable()
    try:
        yield profiler
    finally:
        profiler.disable()


@contextlib.contextmanager
def python_profile() -> Iterator[Any]:
    events: list[str] = []

    def profile(frame: Any, event: str, _: Any) -> None:
        events.append(f"{event} {frame.f_code.co_name}")

    sys.setprofile(profile)
    try:
        yield events
    finally:
        sys.setprofile(None)


@contextlib.contextmanager
def torch_profile() -> Iterator[Any]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], with_stack=True) as profiler:
        yield profiler


PROFILERS = {"cProfile": c_profile, "Python": python_profile, "torch": torch_profile}
CALLS: dict[str, Callable] = {
    "jit": lambda f: jax.jit(jtbridge.wrap(f))(X),
    "gradient": lambda f: jax.jit(jax.grad(lambda x: jtbridge.wrap(f)(x).sum()))(X),
    "xla": lambda f: jtbridge.wrap(f, backend="xla")(X),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("profiler", PROFILERS)
def test_pure_function(profiler: str, call: str):
    expected = random.Random(0).random()
    with PROFILERS[profiler]():
        before = sys.getprofile()
        assert CALLS[call](pure).tolist() == pytest.approx([expected] * 3)
        assert type(sys.getprofile()) is type(before)
        assert sys.getprofile() is before or profiler == "torch"  # whose profiler is a new object for each question


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("draw", [draws_from_python, draws_from_numpy])
@pytest.mark.parametrize("profiler", PROFILERS)
def test_draws_are_refused_and_put_back(profiler: str, draw: Callable, call: str):
    random.seed(1)
    np.random.seed(1)
    expected = random.random(), np.random.rand()
    random.seed(1)
    np.random.seed(1)
    with PROFILERS[profiler](), pytest.raises(errors.RandomnessError, match="global generator"):
        CALLS[call](draw)
    assert (random.random(), np.random.rand()) == expected


def marker() -> int:
    return sum(range(9))


@pytest.mark.parametrize("examine", [lambda: jax.jit(jtbridge.wrap(pure))(X), lambda: jtbridge.purity(pure, X)])
def test_cprofile_counts_what_runs_afterwards(examine: Callable):
    with c_profile() as profiler:
        examine()
        marker()
    counts = {name: calls for (_, _, name), (_, calls, *_) in pstats.Stats(profiler).stats.items()}  # type: ignore[attr-defined]
    assert counts["marker"] == 1


def test_a_profiler_in_python_sees_all_calls():
    with python_profile() as events:
        jax.jit(jtbridge.wrap(pure))(X)
    assert "call pure" in events


def test_purity_reads_the_calls_beside_a_profiler():
    for profiler in (c_profile, python_profile):
        with profiler():
            assert "Python's global generator" in str(jtbridge.purity(draws_from_python, X))
    with torch_profile(), pytest.raises(errors.JtbridgeError, match=r"leave `torch\.profiler`"):
        jtbridge.purity(pure, X)
