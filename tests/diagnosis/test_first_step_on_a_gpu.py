"""The first step of `make test-gpu` fails if no GPU runs a kernel."""

from __future__ import annotations

import pathlib
import platform
import re
import subprocess
import sys

import jax
import pytest
import torch

import tests.gpu
from jtbridge.diagnosis import ProofReport

ROOT = pathlib.Path(__file__).parents[2]


def report(proven: tuple[str, ...], **failed: str) -> ProofReport:
    return ProofReport({"chip": "a chip"}, proven, failed, "a file", "", 1.0)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a GPU that JAX and torch can use, and Triton."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(tests.gpu, "unsupported_reason", lambda platform: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


def test_fails_without_a_gpu():
    done = subprocess.run([sys.executable, "-m", "tests.gpu"], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 1
    assert 'No kernel runs on a GPU here: JAX\'s default backend is "cpu": install jax[cuda12]' in done.stderr


@pytest.mark.usefixtures("gpu")
def test_fails_without_triton_or_a_torch_gpu(monkeypatch, capsys):
    assert tests.gpu.missing_gpu_reason() is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert tests.gpu.main(lambda: report(("a",))) == 1
    assert "this torch has no GPU" in capsys.readouterr().err
    monkeypatch.setattr(tests.gpu, "unsupported_reason", lambda platform: "`triton` is not installed")
    assert tests.gpu.main(lambda: report(("a",))) == 1
    assert "Triton cannot be used: `triton` is not installed" in capsys.readouterr().err


@pytest.mark.usefixtures("gpu")
def test_prints_the_proof_report(capsys):
    assert tests.gpu.main(lambda: report(("a", "b"))) == 0
    out = capsys.readouterr().out
    assert "a chip: 2 kernels proven, 0 failed" in out
    assert f"Python {platform.python_version()}, jax {jax.__version__}, jaxlib " in out
    assert tests.gpu.main(lambda: report(("a",), b="killed by SIGSEGV")) == 1
    assert tests.gpu.main(lambda: report(())) == 1


def test_make_target_starts_with_the_proof_and_runs_tests_once():
    makefile = (ROOT / "Makefile").read_text().replace("\\\n\t\t", "")
    target = re.search(r"^test-gpu:.*\n((?:\t.*\n)+)", makefile, re.MULTILINE)
    assert target is not None
    first, on_gpu, *without = target[1].splitlines()
    assert first.strip() == "$(PY) -m tests.gpu"
    assert "-m 'gpu or not (compiles or cpu)'" in on_gpu
    assert "JAX_PLATFORMS=cpu" in without[0]
    assert "-m '(compiles or cpu) and not gpu'" in without[0]
