"""The parts of the GPU benchmarks that need no GPU: contestants, targets, table and command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest
import torch

from benchmarks._results import Failed
from benchmarks.gpu import _table
from benchmarks.gpu._rows import Goal, Options, Row
from benchmarks.gpu._turns import Contestant, attempt, milliseconds

ROOT = Path(__file__).parent.parent
DRY = Options(dry=True, rounds=1, turn_seconds=0)


def bench(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "benchmarks.gpu", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_a_dry_run_measures_every_row(tmp_path):
    # A contestant of the last family needs a C++ compiler when it is first imported.
    left_out = ["--only", "forward", "--only", "gradient", "--only", "loss", "--only", "block"]
    done = bench("--dry-run", *left_out, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "a dry run: the numbers mean nothing" in done.stdout
    (file,) = (tmp_path / "build" / "bench").iterdir()
    held = json.loads(file.read_text())
    assert held["machine"]["dry run"] is True
    rows = {row["key"]: row for row in held["rows"]}
    listed = bench("--list", folder=tmp_path).stdout.split()
    assert set(rows) == set(listed) - {"call"}
    assert len(listed) == 16 + 10 + 2 + 1 + 1
    for key, row in rows.items():
        assert row["targets"], key
        wanted = {"attention": {"own kernel", "chosen", "torch SDPA"}, "loss": {"jtbridge.kernels", "plain JAX"}}
        family = key.split("-")[0]
        numbers = wanted.get(family, {"jtbridge.kernels", "XLA's fusion", "copy"})
        if key == "block":
            numbers = {"jtbridge xla", "torch.compile", "torch"}
        assert set(row["values"]) >= numbers, (key, row["failed"])
        assert all(value > 0 for value in row["values"].values())
        for reason in row["failed"].values():
            assert "wrong" not in reason
    reason = rows["attention-2k-64-forward"]["failed"]["jax.nn (cuDNN)"]
    assert "cuDNN" in reason or "not found for platform cpu" in reason  # the latter from jax 0.12 on
    assert "needs a GPU" in rows["block"]["failed"]["jtbridge triton"]


def test_missing_gpu_is_reported(tmp_path):
    done = bench(folder=tmp_path)
    assert done.returncode == 1
    assert "JAX runs on cpu: this needs a GPU that JAX and torch can use; `--dry-run`" in done.stderr
    assert not (tmp_path / "build").exists()
    assert "no row is called like that" in bench("--only", "nothing", folder=tmp_path).stderr


def test_rows_skipped_for_time_are_reported(tmp_path):
    done = bench("--dry-run", "--only", "loss", "--seconds", "-1", folder=tmp_path)
    assert done.returncode == 0
    assert done.stdout.count("the time was up") == 2


def test_contestants_alternate_and_are_checked():
    order = []

    def adding(name, result):
        def call():
            order.append(name)
            return result

        return Contestant(call)

    def fails():
        raise RuntimeError("out of memory")

    x = jnp.arange(4.0)
    contestants = {
        "ours": adding("ours", [x]),
        "wrong": adding("wrong", [x + 1]),
        "short": adding("short", [x[:2]]),
        "nothing": adding("nothing", [x * jnp.nan]),
        "failing": Contestant(fails),
        "missing": attempt(fails),
        "other": Contestant(adding("other", [x + 9]).call, checked=False),
        "torch": adding("torch", [torch.arange(4.0)]),
    }
    cells = milliseconds(contestants, Options(rounds=2, turn_seconds=0), judge="torch")
    assert list(cells) == list(contestants)
    assert [name for name, cell in cells.items() if isinstance(cell, float)] == ["ours", "other", "torch"]
    assert cells["wrong"].reason == "wrong: result 0 is off by 0.33 of its largest number"
    assert cells["short"].reason == "wrong: result 0 has another shape"
    assert "off by nan" in cells["nothing"].reason
    assert "out of memory" in cells["failing"].reason
    assert "out of memory" in cells["missing"].reason
    turns = [name for name in order if name in ("ours", "other", "torch")][3:]
    assert turns == [*turns[:3], *turns[:3]]
    assert sorted(turns[:3]) == ["other", "ours", "torch"]


@pytest.mark.parametrize(
    ("goal", "text"),
    [
        (Goal("ours", 0.95, ("a", "b")), ">= 0.95x of the fastest of a, b: yes, 1.00x"),
        (Goal("ours", 1.2, ("a",)), ">= 1.20x of a: yes, 1.50x"),
        (Goal("ours", 1.6, ("a",)), ">= 1.60x of a: NO, 1.50x"),
        (Goal("ours", 1.1, ("b",), at_most=True), "<= 1.10x of b: yes, 1.00x"),
        (Goal("ours", 0.25, ("a",), at_most=True), "<= 0.25x of a: NO, 0.67x"),
        (Goal("ours", 0.85, ("copy",), work=1.5), ">= 85% of copy's bandwidth: NO, 75%"),
        (Goal("ours", 0.7, ("gone",)), ">= 0.70x of gone"),
        (Goal("ours", 0.7, ("gone", "a")), ">= 0.70x of the fastest of gone, a: yes, 1.50x"),
        (Goal("gone", 0.7, ("a",)), ">= 0.70x of a"),
    ],
)
def test_targets(goal, text):
    assert goal.text({"ours": 2.0, "a": 3.0, "b": 2.0, "copy": 1.0, "gone": Failed("not installed")}) == text


def test_the_table_has_a_line_for_each_contestant(capsys, monkeypatch):
    goals = (Goal("ours", 1.0, ("theirs",)), Goal("ours", 0.5, ("gone",)))
    rows = [Row("case", "a case", "ms", {"ours": 2.0, "theirs": 3.0, "gone": Failed("not installed")}, goals)]
    assert rows[0].lines() == [
        ("ours", "2 ms", ">= 1.00x of theirs: yes, 1.50x\n>= 0.50x of gone"),
        ("theirs", "3 ms", ""),
        ("gone", "not installed", ""),
    ]
    monkeypatch.setitem(sys.modules, "rich.console", None)
    _table.show("cases", rows)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["cases", "a", "theirs", "gone"]
    assert ">= 1.00x of theirs: yes, 1.50x; >= 0.50x of gone" in lines[2]
