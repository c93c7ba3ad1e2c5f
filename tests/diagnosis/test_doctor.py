"""The doctor on a healthy machine: every check runs, and the command prints and exits as documented."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

import jtbridge
from jtbridge.diagnosis import _report
from jtbridge.diagnosis._registry import all_checks, rank
from jtbridge.diagnosis._report import DoctorReport, Finding
from jtbridge.errors import ArgumentError

GROUPS = (
    *("versions", "libraries", "devices", "memory", "threads", "caches", "backends", "dlpack", "arithmetic"),
    *("capabilities", "kernels", "speed"),
)


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    # Without the devices that tests/conftest.py asks for.
    variables = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    return subprocess.run(
        [sys.executable, "-m", "jtbridge", "doctor", *arguments],
        capture_output=True,
        text=True,
        env={**variables, "JAX_PLATFORMS": "cpu", **environment},
        check=False,
    )


def test_no_check_fails_on_this_machine():
    done = run("--json")
    report = json.loads(done.stdout)
    failures = [finding for finding in report["findings"] if finding["status"] == "failure"]
    assert (done.returncode, failures, report["healthy"]) == (0, [], True), done.stderr[-2000:]
    assert list(dict.fromkeys(finding["group"] for finding in report["findings"])) == list(GROUPS)
    found = {finding["name"]: finding for finding in report["findings"]}
    for check in all_checks():
        if check.group == "capabilities":
            assert found[check.name]["text"] == "runs, and its value is right", check.name
    for backend in ("xla", "dlpack", "callback"):
        assert found[backend]["text"] == "runs on cpu"
        assert "us for 16 floats" in found[f"jit, {backend}"]["text"]
    assert found["triton"]["text"]
    assert "bfloat16, float32, float64, complex64" in found["cpu"]["text"]


def test_some_groups_as_text_without_colors():
    done = run("--only", "versions, caches")
    assert done.returncode == 0
    assert "\x1b[" not in done.stdout
    assert done.stdout.splitlines()[0] == "versions"
    assert "caches" in done.stdout.splitlines()
    assert "capabilities" not in done.stdout
    assert done.stdout.splitlines()[-1].startswith("Healthy: 0 failures, ")


def test_an_unknown_group_is_refused():
    for groups in (["version"], "version"):
        with pytest.raises(ArgumentError, match="there is no group 'version' of checks; the groups are versions, libr"):
            jtbridge.doctor(groups)
    command = [sys.executable, "-m", "jtbridge", "doctor", "--only", "version"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "there is no group 'version'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--timeout", "0"], "`timeout` must be a positive number of seconds, but it is 0.0"),
        (["--timeout", "nan"], "but it is nan"),
        (["--only", ""], "there is no group ''"),
        (["--only", "caches,"], "there is no group ''"),
    ],
)
def test_wrong_arguments(arguments: list[str], text: str):
    command = [sys.executable, "-m", "jtbridge", "doctor", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert text in done.stderr


def test_closed_stdout_pipe():
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "jtbridge", "doctor", "--only", "caches"]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert done.returncode == 1
    assert "Error" not in done.stderr


@pytest.mark.parametrize("stdout", [">&-", ">/dev/full"])
def test_a_report_that_cannot_be_written(stdout):
    command = f"exec {sys.executable} -m jtbridge doctor --only caches {stdout}"
    done = subprocess.run(command, shell=True, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    assert "doctor: error: the report cannot be written: " in done.stderr
    assert "Traceback" not in done.stderr


def test_a_process_without_stdout_and_stderr():
    command = f"exec {sys.executable} -m jtbridge doctor --only caches >&- 2>&-"
    assert subprocess.run(command, shell=True, check=False).returncode == 2


def test_a_path_that_stdout_cannot_encode(tmp_path):
    done = run("--only", "caches", XDG_CACHE_HOME=str(tmp_path / "\u00fc"), PYTHONIOENCODING="ascii")
    assert done.returncode == 0
    assert "Traceback" not in done.stderr
    assert r"\xfc" in done.stdout


def test_unknown_xla_flags():
    done = run("--only", "dlpack", XLA_FLAGS="--no_such_flag=1")
    assert done.returncode == 1
    assert "Unknown flag in XLA_FLAGS: --no_such_flag=1" in " ".join(done.stdout.split())


def test_a_machine_without_a_folder_for_temporary_files(monkeypatch):
    def none(**options):
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr("tempfile.TemporaryDirectory", none)
    report = jtbridge.doctor(["versions", "arithmetic"])
    assert not report.healthy
    assert {finding.text for finding in report.of("failure")} == {
        "no child process can be started: No usable temporary directory found"
    }
    assert any(finding.group == "versions" and finding.status == "ok" for finding in report.findings)


def test_check_keys_are_unique_and_groups_are_ordered():
    keys = [check.key for check in all_checks()]
    assert len(set(keys)) == len(keys)
    assert tuple(dict.fromkeys(check.group for check in all_checks())) == GROUPS
    assert rank("zebra") > rank("speed")


REPORT = DoctorReport(
    (
        Finding("versions", "jax", "ok", "0.10.2"),
        Finding("versions", "torch", "failure", "2.4.0 is not >=2.11", "pip install 'torch>=2.11'"),
        Finding("caches", "triton", "warning", "word " * 60, "a fix"),
    ),
    1.25,
)


def test_every_backend_has_its_checks():
    """The doctor lists its checks without the registry of the backends, whose import may fail."""
    names = {check.name for check in all_checks()}
    for backend in jtbridge.backends():
        assert f"jit, {backend.name}" in names
        assert backend.kind == "translate" or f"jit, called by {backend.name}" in names


def test_the_text_of_a_report():
    lines = str(REPORT).splitlines()
    assert lines[:4] == [
        "versions",
        "  ok       jax     0.10.2",
        "  failure  torch   2.4.0 is not >=2.11",
        "                   To do: pip install 'torch>=2.11'",
    ]
    assert max(map(len, lines)) <= 120
    assert lines[-1] == "Not healthy: 1 failure, 1 warning, 1.2 s"
    assert not REPORT.healthy
    assert [finding.name for finding in REPORT.of("warning")] == ["triton"]
    assert json.loads(REPORT.to_json())["findings"][1]["fix"] == "pip install 'torch>=2.11'"


def test_colors_are_for_terminals(monkeypatch, capsys):
    assert "\x1b[31mfailure\x1b[0m" in REPORT.text(colors=True)
    REPORT.show()
    assert "\x1b[" not in capsys.readouterr().out
    monkeypatch.setattr(_report, "in_terminal", lambda: True)
    REPORT.show()
    assert "\x1b[31m" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("variables", "terminal", "colors"),
    [({}, True, True), ({}, False, False), ({"NO_COLOR": "1"}, True, False), ({"TERM": "dumb"}, True, False)],
)
def test_color_environment_variables(monkeypatch, variables, terminal, colors):
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.stdout.isatty", lambda: terminal, raising=False)
    assert _report.in_terminal() is colors
