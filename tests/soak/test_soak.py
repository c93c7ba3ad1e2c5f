"""The load test finds each fault that it looks for, and all its functions pass for a short time."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import threading
from collections.abc import Callable

import jax
import pytest
import torch

from . import _dropped, _load
from .__main__ import failures
from ._function import TIGHT, Failure, Function
from ._functions import functions

HELD: list[object] = []

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def released():
    yield
    HELD.clear()


def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def found(call: Callable, *, seconds: float = 0.5, **options) -> _load.Report:
    """Return the report of the load test on one function that must double its argument."""
    return _load.run([Function("planted", "planted", 1, call, doubled, **options)], seconds=seconds, threads=2)


def sometimes(bad: Callable[[], object]) -> Callable[[jax.Array], jax.Array]:
    """Double; in one of a hundred calls also do something else. The first calls compute the expected results."""
    calls = iter(range(1, sys.maxsize))

    def call(x: jax.Array) -> jax.Array:
        return x * 2 if next(calls) % 100 or (other := bad()) is None else other

    return call


def test_correct_function_has_no_findings():
    report = found(lambda x: x * 2)
    assert report.calls["planted"] > 10
    assert (report.wrong, report.hung, report.disturbed, report.raised, report.new_threads) == (0, [], [], 0, 0)


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (lambda: 3, "returned int64()"),
        (lambda: (1, 2), "expected PyTreeDef"),
        (lambda: jax.numpy.zeros((3, 3)), "returned float32(3, 3), expected float32("),
    ],
)
def test_a_wrong_result(result, text):
    report = found(sometimes(result))
    assert report.wrong > 0
    assert text in report.problems[0]
    assert "wrong" in failures(report)


@pytest.mark.parametrize("factor", [2.00001, float("nan")])
def test_wrong_values(factor):
    turns = iter(range(1, sys.maxsize))
    report = found(lambda x: x * (2 if next(turns) % 100 else factor), tolerance=TIGHT)
    assert report.wrong > 0
    assert ", expected [[" in report.problems[0]
    # A factor that is wrong by less is within the tolerance.
    assert found(lambda x: x * 2.000001, tolerance=TIGHT).wrong == 0


def test_an_exception():
    def bad() -> None:
        raise KeyError("unplanned")

    report = found(sometimes(bad))
    assert report.wrong > 0
    assert "KeyError: 'unplanned'" in report.problems[0]
    assert "wrong" in failures(report)


def raise_lookup(x: jax.Array) -> None:
    raise LookupError("as planned")


@pytest.mark.parametrize(
    ("failing", "text"),
    [(lambda x: x, "raised nothing"), (lambda x: {}["other"], "KeyError"), (raise_lookup, None)],
)
def test_a_call_that_must_raise(failing, text):
    report = found(lambda x: x * 2, failure=Failure(failing, LookupError, "as planned"))
    assert report.raised == report.calls["planted"] > 10
    assert (report.wrong > 0) == (text is not None)
    assert text is None or text in report.problems[0]


def test_memory_growth():
    report = found(sometimes(lambda: HELD.append(bytearray(b"1") * 2_000_000)), seconds=4)
    assert report.growth > 0.01
    assert "memory" in failures(report)


def test_leaked_threads():
    end = threading.Event()
    report = found(sometimes(lambda: threading.Thread(target=end.wait, daemon=True).start()), seconds=2)
    end.set()
    assert report.new_threads > 0
    assert "threads" in failures(report)


def test_leaked_functions():
    report = found(sometimes(lambda: HELD.append(_dropped._new())))
    assert report.kept > 0
    assert "functions kept" in failures(report)


def test_leaked_setting():
    def bad() -> None:
        torch.set_grad_enabled(False)

    report = found(sometimes(bad))
    assert "grad mode: True -> False" in report.disturbed
    assert "disturbed" in failures(report)


def test_global_random_state_that_changed():
    with torch.random.fork_rng():
        report = found(sometimes(lambda: torch.rand(1) and None))
    assert report.disturbed == ["the random numbers of torch or numpy"]


HANGS = """
import sys, time
from tests.soak import __main__ as soak
from tests.soak._function import Function
calls = iter(range(10**9))
def call(x):
    if next(calls) == 50:
        HOW
    return x * 2
soak.functions = lambda: [Function("planted", "planted", 1, call, lambda x: x * 2)]
sys.argv = ["soak", "--seconds", "60", "--threads", "2", "--hang-seconds", "1"]
sys.exit(soak.main())
"""


def test_a_call_that_hangs():
    code = HANGS.replace("HOW", "time.sleep(1000)")
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert ended.returncode == 1
    assert "['planted']" in ended.stdout
    assert "in call" in ended.stderr  # the stack of the thread that hangs


def test_a_call_that_hangs_with_the_lock_of_the_interpreter():
    how = "import ctypes; ctypes.PyDLL(None).sleep(1000)"
    code = HANGS.replace("HOW", how).replace("sys.exit(", "soak._load._process.PATIENCE = 5\nsys.exit(")
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert ended.returncode == 1
    assert "Timeout" in ended.stderr
    assert "in call" in ended.stderr


def test_all_functions_for_a_short_time():
    every = functions()
    assert len({function.name for function in every}) == len(every) >= 50
    assert {function.kind for function in every} >= {"eager", "translated", "called", "islands", "raises", "dropped"}
    alike = [dataclasses.replace(function, weight=1.0) for function in every]
    report = _load.run(alike, seconds=10)
    assert report.problems == []
    assert (report.wrong, report.hung, report.disturbed, report.kept) == (0, [], [], 0)
    assert report.calls.total() > 100


def test_share_of_raising_functions_is_bounded():
    every = functions()
    raising = sum(function.weight for function in every if function.failure)
    # Each also makes the call that must work.
    assert raising / (sum(function.weight for function in every) + raising) == pytest.approx(0.01, rel=0.1)
