"""`jtbridge.purity`: each side effect of a function, by name, with its line and a pure alternative."""

from __future__ import annotations

import builtins
import datetime
import functools
import inspect
import logging
import os
import random
import re
import time
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jtbridge
from jtbridge import PurityReport

X = jnp.asarray([1.0, 2.0, 4.0])
SCALE = 3.0
total = 0
log = logging.getLogger(__name__)


def found(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[str, list[str]]:
    """Return the findings by kind, without state that is only read."""
    report = jtbridge.purity(fn, *args, **kwargs)
    assert isinstance(report, PurityReport)
    assert report.is_pure == all(finding.kind in ("state read", "lazily built") for finding in report.findings)
    kinds: dict[str, list[str]] = {}
    for finding in report.findings:
        assert finding.remedy
        if finding.kind != "state read":
            kinds.setdefault(finding.kind, []).append(finding.what)
    return kinds


def line_of(fn: Callable[..., Any], text: str) -> str:
    """Return the line of a function's source that contains a text, in the form of the report."""
    lines, first = inspect.getsourcelines(fn)
    return f"{__file__}:{first + next(i for i, line in enumerate(lines) if text in line)}"


# --- The classic list ------------------------------------------------------------------------------------------------


def test_a_local_list_is_pure():
    def f(x):
        seen = []
        for row in x:
            seen.append(row * 2)
        return torch.stack(seen)

    report = jtbridge.purity(f, X)
    assert report.is_pure
    assert report.findings == ()
    assert str(report) == "function  f\npure      yes"


def test_an_argument_that_is_appended_to():
    def f(xs):
        xs.append(xs[0] * 2)
        return xs[-1]

    xs = [X]
    report = jtbridge.purity(f, xs)
    (finding,) = report.findings
    assert (finding.kind, finding.what, finding.line) == ("argument mutated", "`xs`", line_of(f, "append"))
    assert len(xs) == 1


def test_an_array_argument_that_is_written_to():
    def f(x, scale):
        x.mul_(scale["by"])
        return x

    (finding,) = jtbridge.purity(f, X, {"by": jnp.asarray(2.0)}).findings
    assert (finding.kind, finding.what, finding.line) == ("argument mutated", "`x`", line_of(f, "mul_"))
    assert "return_mutated=True" in finding.remedy
    assert X.tolist() == [1, 2, 4]


def test_a_dict_argument_that_is_changed():
    def f(params):
        params["w"] = params["w"] * 2
        return params["w"]

    assert found(f, {"w": X}) == {"argument mutated": ['`params["w"]`']}


def test_a_global_counter():
    def f(x):
        global total
        total += 1
        return x * total

    report = jtbridge.purity(f, X)
    (finding,) = report.of_kind("state written")
    assert (finding.what, finding.line) == ("global `total`", line_of(f, "total += 1"))
    assert "Return the new value" in finding.remedy
    assert total == 0
    assert not report.is_pure


@pytest.mark.parametrize("length", [3, 10_000])
def test_a_tensor_that_numpy_writes_to(length):
    numbers = torch.zeros(length)

    def f(x):
        numbers.numpy()[1] += 1
        return x

    report = jtbridge.purity(f, X)
    assert "state written" in str(report)
    assert "`numbers`" in str(report)
    assert not numbers.any()


def test_a_global_that_is_read():
    def f(x):
        return x * SCALE

    report = jtbridge.purity(f, X)
    (finding,) = report.findings
    assert (finding.kind, finding.what, finding.line) == ("state read", "global `SCALE`", line_of(f, "SCALE"))
    assert "pass it as an argument" in finding.remedy
    assert report.is_pure


def test_a_variable_of_a_closure_that_is_read():
    scale = 2.0

    def helper(x):
        return x * scale

    (finding,) = jtbridge.purity(lambda x: helper(x), X).findings
    assert (finding.what, finding.line) == ("`scale`", line_of(helper, "x * scale"))


def test_print(capsys):
    def f(x):
        print("value", x.sum())  # noqa: T201
        return x

    (finding,) = jtbridge.purity(f, X).findings
    assert (finding.kind, finding.what, finding.line) == ("output", "`print`", line_of(f, "print"))
    assert "jax.debug.print" in finding.remedy
    assert "value" in capsys.readouterr().out


def test_input_is_reported_without_reading(monkeypatch):
    def f(x):
        return x * float(input("scale? "))

    (finding,) = jtbridge.purity(f, X).findings
    assert (finding.kind, finding.what, finding.line) == ("input", "`input`", line_of(f, "input"))
    assert builtins.input is input


def test_random_numbers_of_python_and_numpy():
    def f(x):
        return x * random.random() + np.random.rand()

    random.seed(3)
    np.random.seed(3)
    before = random.getstate(), np.random.get_state(legacy=False)["state"]["pos"]
    report = jtbridge.purity(f, X)
    assert [finding.what for finding in report.findings] == ["Python's global generator", "NumPy's global generator"]
    assert {finding.line for finding in report.findings} == {line_of(f, "random.random")}
    assert all("`rng=`" in finding.remedy for finding in report.findings)
    assert (random.getstate(), np.random.get_state(legacy=False)["state"]["pos"]) == before


def test_a_seed_of_torch():
    def f(x):
        torch.manual_seed(0)
        return x * 2

    (finding,) = jtbridge.purity(f, X).findings
    assert (finding.kind, finding.what, finding.line) == (
        "random numbers",
        "`torch.manual_seed`",
        line_of(f, "manual_seed"),
    )


class Counting(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.linear(x)


def test_a_module_that_counts_calls():
    module = Counting()
    report = jtbridge.purity(module, X)
    (finding,) = report.of_kind("state written")
    assert (finding.what, finding.line) == ("`self.calls`", line_of(Counting, "self.calls += 1"))
    assert module.calls == 0
    (finding,) = report.of_kind("state read")
    assert finding.what == "2 parameters and buffers of `Counting`"


def test_batch_norm_in_train_mode_and_in_evaluation():
    norm = torch.nn.BatchNorm1d(3)
    rows = jnp.ones((4, 3))
    report = jtbridge.purity(norm, rows)
    written = {finding.what: finding.remedy for finding in report.of_kind("state written")}
    assert written.keys() == {"`self.running_mean`", "`self.running_var`", "`self.num_batches_tracked`"}
    assert all("`.eval()`" in remedy for remedy in written.values())
    assert norm.running_mean.tolist() == [0, 0, 0]
    assert norm.running_var.tolist() == [1, 1, 1]
    assert int(norm.num_batches_tracked) == 0
    assert jtbridge.purity(norm.eval(), rows).is_pure


def test_a_cache_dictionary():
    cache: dict[str, Any] = {}

    def of_arguments(x):
        if "doubled" not in cache:
            cache["doubled"] = x * 2
        return x + cache["doubled"]

    def of_shapes(x):
        if x.shape not in cache:
            cache[x.shape] = torch.arange(len(x))
        return x + cache[x.shape]

    assert found(of_arguments, X) == {"state written": ['`cache["doubled"]`']}
    assert found(of_shapes, X) == {"lazily built": ["`cache[torch.Size([3])]`"]}
    assert cache == {}


def test_a_lazily_built_mask():
    class Lazy(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.mask = None

        def forward(self, x):
            if self.mask is None:
                self.mask = torch.triu(torch.ones(3, 3))
            return self.mask @ x

    module = Lazy()
    report = jtbridge.purity(module, X)
    (finding,) = report.of_kind("lazily built")
    assert (finding.what, finding.line) == ("`self.mask`", line_of(Lazy, "torch.triu"))
    assert report.is_pure
    assert module.mask is None


# --- Others ----------------------------------------------------------------------------------------------------------

CLOCKS: dict[str, Callable[[], float]] = {
    "`time.time`": lambda: time.time(),
    "`time.perf_counter`": lambda: time.perf_counter(),
    "`datetime.now`": lambda: datetime.datetime.now().microsecond,
    "`date.today`": lambda: datetime.date.today().day,
}


@pytest.mark.parametrize("name", CLOCKS)
def test_clocks(name):
    read = CLOCKS[name]
    assert found(lambda x: x * read(), X) == {"clock": [name]}


def test_files(tmp_path):
    (tmp_path / "a.txt").write_text("2")
    np.save(tmp_path / "a.npy", np.ones(3))

    def f(x):
        return x * float((tmp_path / "a.txt").read_text()) + torch.from_numpy(np.load(tmp_path / "a.npy"))

    assert found(f, X) == {"file": ["`open`"]}


def test_logging_warnings_and_the_environment(monkeypatch):
    monkeypatch.setenv("JTBRIDGE_TEST_SCALE", "2")

    def f(x):
        log.warning("%s", x)
        warnings.warn("careful", UserWarning, stacklevel=1)
        return x * float(os.environ["JTBRIDGE_TEST_SCALE"])

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = jtbridge.purity(f, X)
    assert [finding.what for finding in report.of_kind("output")] == ["logging", "`warnings.warn`"]
    assert "the environment" in [finding.what for finding in report.of_kind("state read")]


def test_draws_with_torch_are_pure_with_a_key():
    def f(x):
        return torch.nn.functional.dropout(x)

    torch.manual_seed(3)
    state = torch.get_rng_state()
    (finding,) = jtbridge.purity(f, X).findings
    assert (finding.kind, finding.line) == ("random numbers", line_of(f, "dropout"))
    assert jtbridge.purity(f, X, rng=jax.random.key(0)).findings == ()
    assert torch.equal(torch.get_rng_state(), state)


def test_results_that_differ():
    class Noise:
        """State that the search for state does not find."""

        __slots__ = ()
        made = iter(range(100))

    hidden = functools.lru_cache(maxsize=None)(lambda: [0])

    def f(x):
        hidden()[0] += 1
        return x * hidden()[0]

    assert found(f, X) == {"results differ": ["The result"]}
    assert Noise.made is not None


def test_training_step():
    """A gradient, an optimizer and its state, all of which are restored."""
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adam([weight])

    def step(x):
        (weight * x).sum().backward()
        optimizer.step()
        return x

    kinds = found(step, X)
    assert {"`weight`", "`weight.grad`"} <= set(kinds["state written"])
    assert any("optimizer.state" in what for what in kinds["state written"])
    assert weight.grad is None
    assert weight.tolist() == [1, 1, 1]
    assert len(optimizer.state) == 0


def test_exception_is_raised_and_state_is_restored():
    seen = []

    def f(x):
        seen.append(1)
        raise LookupError("on purpose")

    with pytest.raises(LookupError, match="on purpose"):
        jtbridge.purity(f, X)
    assert seen == []


def test_a_wrapped_function_keyword_and_static_arguments():
    @jtbridge.wrap
    def f(x, *, mode, others):
        others["y"].add_(1)
        return x if mode == "same" else x * 2

    report = jtbridge.purity(f, X, mode="same", others={"y": X})
    assert report.function == "f"
    assert [finding.what for finding in report.findings] == ['`others["y"]`']


def test_report_is_a_table():
    counter = {"n": 0}

    def f(x):
        counter["n"] += 1
        return x

    text = str(jtbridge.purity(f, X))
    assert re.search(r"^function +f\npure +no\nstate written +`counter\[\"n\"\]` \(.*:\d+\)\. Return", text)
