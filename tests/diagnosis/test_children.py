"""Capabilities that crash, hang, raise or are wrong, in the doctor's children: each is named, and the others run."""

from __future__ import annotations

import time

import pytest

import jtbridge

from .conftest import named

CHECKS = ("eager call", "eager gradient", "eager vmap", "jit, translated")
RIGHT = "runs, and its value is right"

# Replaces the code of a capability, in a child process.
REPLACED = """
import dataclasses, os, signal, time
import jtbridge.diagnosis.checks.capabilities as capabilities

def faulty():
{body}

capabilities.CHECKS = tuple(
    dataclasses.replace(check, run=faulty) if check.name == "eager gradient" else check
    for check in capabilities.CHECKS
)
"""


def replaced(*lines: str) -> str:
    return REPLACED.format(body="\n".join(f"    {line}" for line in lines))


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "killed by SIGSEGV, at File "),
        ("os._exit(7)", "the process ended with exit status 7"),
        ("raise RuntimeError('no such thing')", "RuntimeError: no such thing"),
        ("capabilities.expect([1.0, 2.0], [1.0, 3.0])", "wrong value: [1.0, 2.0] where [1.0, 3.0] is right"),
        ("capabilities.expect([1.0, 2.0], [1.0])", "wrong shape: (2,) where (1,) is right"),
    ],
)
def test_crashing_check_is_named_and_the_others_run(prelude, only, body, text):
    only(*CHECKS)
    prelude(replaced(body))
    report = jtbridge.doctor(timeout=60)
    found = named(report, "eager gradient")
    assert (found.status, report.healthy) == ("failure", False)
    assert found.text.startswith(text)
    assert "Report it with this whole report" in found.fix
    for name in set(CHECKS) - {"eager gradient"}:
        assert named(report, name).text == RIGHT


def test_hanging_check_is_killed_and_named(prelude, only):
    only(*CHECKS)
    prelude(replaced("time.sleep(600)"))
    started = time.monotonic()
    report = jtbridge.doctor(timeout=15)
    assert time.monotonic() - started < 120
    found = named(report, "eager gradient")
    assert found.status == "failure"
    assert found.text.startswith("hangs: it did not end, at File ")
    for name in set(CHECKS) - {"eager gradient"}:
        assert named(report, name).text == RIGHT


def test_check_that_crashes_only_after_others_is_distinguished(prelude, only):
    only(*CHECKS)
    prelude(replaced("os._exit(7) if len(plan['checks']) > 1 else None", "return []"))
    report = jtbridge.doctor(timeout=60)
    found = named(report, "eager gradient")
    assert found.status == "warning"
    assert found.text == "the process ended with exit status 7; run alone in a process it does not fail"
    assert report.healthy


def test_a_process_that_dies_after_its_checks_is_a_warning(prelude, only):
    only("eager call")
    prelude("import atexit, os\natexit.register(os._exit, 9)")
    report = jtbridge.doctor(timeout=60)
    assert named(report, "eager call").text == RIGHT
    assert named(report, "exit").text == (
        "the process of these checks was ended after them: the process ended with exit status 9"
    )
    assert named(report, "exit").status == "warning"


def test_failed_import_is_reported_for_every_check(prelude, only):
    only("eager call", "eager vmap")
    prelude("raise ImportError('libcudnn.so.9: cannot open shared object file')")
    report = jtbridge.doctor(timeout=60)
    assert len(report.of("failure")) == 2
    for finding in report.findings:
        assert "ImportError: libcudnn.so.9: cannot open shared object file" in finding.text
