"""Kernels are used by "auto" once they are proven on a chip. The chip is simulated, and Triton interprets kernels."""

from __future__ import annotations

import importlib
import json
import pickle
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
import torch

import jtbridge
from jtbridge.diagnosis import _prove
from jtbridge.diagnosis._children import ChildOutcome
from jtbridge.errors import BackendError, ProofWarning
from jtbridge.kernels import _chip, _proofs, _proving
from jtbridge.kernels._chip import Chip
from jtbridge.kernels._proofs import UNPROVEN, ProofRecord
from tests.kernels.harness import kernels_in, needs_compiler, needs_triton

from .conftest import named

_xla = importlib.import_module("jtbridge._backends.xla")

pytestmark = [needs_triton, needs_compiler]

H100 = Chip("NVIDIA H100 80GB HBM3", 90)
X = jnp.arange(24.0).reshape(4, 6) / 7
BOTH = ["softmax backward", "softmax forward"]
# The first cases of two kernels of the table. The children simulate the same chip.
CHILDREN = """
from jtbridge.kernels import _chip, _proving
_chip.present = lambda: _chip.Chip("NVIDIA H100 80GB HBM3", 90)
_proving.folders = lambda: ["softmax", "gated"]
every = _proving.cases
_proving.cases = lambda folder: every(folder)[:2]
"""


def softmax(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, -1)


def gradient(backend: str = "auto"):
    f = jtbridge.wrap(softmax, backend=backend)
    return jax.grad(lambda x: (f(x) ** 2).sum())


@pytest.fixture
def chip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Simulate a process with a GPU and without a record."""
    monkeypatch.setattr(_chip, "present", lambda: H100)
    monkeypatch.setattr(_proofs, "_LAST", None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield tmp_path / "jtbridge" / "proofs"


@pytest.fixture
def interpreted(chip: Path, prelude, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let the children interpret kernels, so that a record is about interpreted kernels."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    prelude(CHILDREN)
    return chip


def write(proven: list[str], **failed: str) -> Path:
    reasons = {name.replace("_", " "): reason for name, reason in failed.items()}
    return _proofs.write_record(_proofs.key() or {}, ProofRecord(tuple(proven), reasons))


def status() -> str:
    (found,) = [status for status in jtbridge.backends("cuda") if status.name == "triton"]
    assert found.available  # by name
    return found.reason


@pytest.mark.usefixtures("chip")
def test_auto_without_a_record_uses_no_kernels_and_gives_reason(monkeypatch):
    assert kernels_in(gradient(), X) == []
    assert sorted(kernels_in(gradient("triton"), X)) == ["softmax_backward", "softmax_forward"]
    assert status() == UNPROVEN == "not proven on this chip: run `python -m jtbridge doctor`"
    monkeypatch.setattr(_xla, "GPU_PLATFORMS", ("cpu",))
    report = jtbridge.explain(jtbridge.wrap(softmax), X)
    assert (report.backend, report.reasons, report.kernels) == ("xla", {"triton": UNPROVEN}, {})
    by_name = jtbridge.explain(jtbridge.wrap(softmax, backend="triton"), X)
    assert (by_name.backend, by_name.kernels) == ("triton", {"softmax forward": 1})


@pytest.mark.usefixtures("chip")
def test_auto_uses_the_kernels_proven_by_a_record(monkeypatch):
    write(BOTH)
    assert status() == ""
    assert sorted(kernels_in(gradient(), X)) == ["softmax_backward", "softmax_forward"]
    write(BOTH[1:], softmax_backward="result 0 differs")
    assert kernels_in(gradient(), X) == ["softmax_forward"]
    rows = jnp.stack([X, X + 1])
    assert kernels_in(jax.vmap(gradient()), rows) == ["softmax_forward"]
    monkeypatch.setattr(_xla, "GPU_PLATFORMS", ("cpu",))
    report = jtbridge.explain(jtbridge.wrap(softmax), X)
    assert (report.backend, report.reasons, report.kernels) == ("triton", {}, {"softmax forward": 1})
    plain = jtbridge.wrap(softmax, backend="xla")
    assert jnp.allclose(jax.jit(gradient())(X), jax.jit(jax.grad(lambda x: (plain(x) ** 2).sum()))(X), atol=1e-6)


@pytest.mark.usefixtures("chip")
def test_a_kernel_that_failed_is_used_by_name_with_a_warning():
    write(BOTH[1:], softmax_backward="result 0 differs")
    with pytest.warns(ProofWarning, match="`softmax backward` failed its proof on this chip and is used, .* differs"):
        assert sorted(kernels_in(gradient("triton"), X)) == ["softmax_backward", "softmax_forward"]


@pytest.mark.usefixtures("chip")
def test_no_kernel_passed():
    write([], softmax_forward="killed by SIGSEGV")
    assert status() == "no kernel passed its proof on this chip: `softmax forward`: killed by SIGSEGV"
    assert kernels_in(gradient(), X) == []


@pytest.mark.usefixtures("chip")
def test_several_processes_have_no_kernels_unless_asked_for(monkeypatch):
    write(BOTH)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert status().startswith('a program of several processes has kernels only with `backend="triton"`')


def test_process_without_a_gpu_gives_the_reason():
    assert status().startswith("this process has no GPU")


@pytest.mark.parametrize(
    "change",
    [
        (_chip, "present", lambda: Chip("NVIDIA A100-SXM4-80GB", 80)),
        (_proofs, "driver", lambda: "999.1"),
        (_proofs, "_package_versions", lambda: {"jtbridge": "9.9"}),
        (_proofs, "_source_digest", lambda: "another"),
    ],
    ids=["chip", "driver", "versions", "source"],
)
def test_record_is_valid_for_one_chip_driver_and_versions(chip, monkeypatch, change):
    write(BOTH)
    assert _proofs.unproven_reason() is None
    monkeypatch.setattr(*change)
    assert _proofs.unproven_reason() == UNPROVEN


def test_record_contains_its_chip_driver_and_versions(chip):
    path = write(BOTH)
    assert path.parent == chip
    held = json.loads(path.read_text())
    assert held["proven"] == BOTH
    assert held["key"]["chip"] == H100.name
    assert {"driver", "jtbridge", "triton", "jax-triton", "jax", "jaxlib", "source"} <= set(held["key"])


@pytest.mark.parametrize(
    "damage", [b"", b"{", b"[]", b'{"key": {}, "proven": [], "failed": {}}', b"\xff\xfe", b"null", pickle.dumps({})]
)
def test_unreadable_record_gives_a_warning_and_is_ignored(chip, damage):
    path = write(BOTH)
    path.write_bytes(damage)
    with pytest.warns(ProofWarning, match="cannot be read, and `auto` uses no kernels.*Run `python -m"):
        assert _proofs.unproven_reason() == UNPROVEN
    assert _proofs.unproven_reason() == UNPROVEN  # it is told only once
    write(BOTH)
    assert _proofs.unproven_reason() is None


def test_the_folder_of_records_is_a_file(chip):
    chip.parent.mkdir()
    chip.write_text("")
    with pytest.warns(ProofWarning, match="NotADirectoryError"):
        assert _proofs.unproven_reason() == UNPROVEN
    with pytest.raises(OSError, match=r"exists|directory"):
        write(BOTH)


WRITER = """
import json, sys
from jtbridge.kernels import _proofs
key, name = json.loads(sys.argv[1]), sys.argv[2]
for _ in range(300):
    _proofs.write_record(key, _proofs.ProofRecord(tuple(f"{name} {i}" for i in range(50)), {}))
"""


def test_concurrent_writers_leave_a_valid_record(chip):
    key = _proofs.key()
    assert key is not None
    path = _proofs.write_record(key, ProofRecord(("first",), {}))
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, json.dumps(key), name]) for name in ("a", "b")]
    counts = set()
    while any(writer.poll() is None for writer in writers):
        counts.add(len(json.loads(path.read_text())["proven"]))
    assert [writer.returncode for writer in writers] == [0, 0]
    assert counts == {1, 50}
    assert [file.name for file in chip.iterdir()] == [path.name]


def test_the_proof_writes_a_record_that_auto_reads(interpreted):
    report = jtbridge.prove(timeout=120)
    assert report.proven == ("gated backward", "gated forward", "softmax backward", "softmax forward")
    assert (report.failed, report.problem) == ({}, "")
    assert Path(report.path).parent == interpreted
    assert _proofs.unproven_reason() is None
    assert "4 kernels proven, 0 failed" in str(report)


@pytest.mark.parametrize(
    ("code", "kernel", "text"),
    [
        ("op._backward = lambda y, ct, *, log: [ct + 1]", "softmax backward", "result 0 differs by "),
        ("op._forward = lambda x, *, log: [x[:1]]", "softmax forward", "result 0 is float32[1, 5] where"),
        ("op._forward = lambda x, *, log: [x / 0]", "softmax forward", "result 0 has NaN or infinity at other"),
        ("op._forward = lambda x, *, log: fail()", "softmax forward", "RuntimeError: no kernel image is available"),
        ("op._backward = lambda y, ct, *, log: os.kill(os.getpid(), 11)", "softmax backward", "killed by SIGSEGV"),
    ],
    ids=["wrong", "shape", "nan", "raises", "crashes"],
)
def test_a_kernel_that_fails_is_named_and_the_others_are_proven(interpreted, prelude, code, kernel, text):
    fail = "def fail():\n    raise RuntimeError('no kernel image is available')\n"
    prelude(f"{CHILDREN}\nimport os\nfrom jtbridge.kernels._softmax import op\n{fail}{code}")
    report = jtbridge.prove(timeout=120)
    assert list(report.failed) == [kernel]
    assert report.failed[kernel].startswith("softmax of 3 rows of 5, float32: ")
    assert text in report.failed[kernel]
    others = {"gated backward", "gated forward", *BOTH} - {kernel}
    assert set(report.proven) == others
    assert _proofs.proven() == others


def test_kernel_that_hangs_fails(interpreted, prelude):
    hang = "import time\nfrom jtbridge.kernels._softmax import op\nop._backward = lambda y, ct, *, log: time.sleep(600)"
    prelude(CHILDREN.replace('["softmax", "gated"]', '["softmax"]') + hang)
    report = jtbridge.prove(timeout=15)
    assert report.failed == {"softmax backward": "softmax of 3 rows of 5, float32: did not end"}


def test_case_that_never_ran_fails_all_kernels_of_its_folder():
    names = {"softmax:0": "three rows", "softmax:1": "many rows", "gated:0": "one row"}
    results = {"softmax:0": {"kernels": [("softmax forward", None)]}, "gated:0": {"kernels": [("gated forward", None)]}}
    ended = ChildOutcome({}, "", "", [], "killed by SIGKILL", "")
    seen = _prove._seen(names, results, {"softmax:1": ended})
    assert seen == {"softmax forward": "many rows: killed by SIGKILL", "gated forward": None}
    outside = _prove._seen({"softmax:1": "many rows"}, {}, {"softmax:1": ended})
    assert outside == {"softmax (outside of its kernels)": "many rows: killed by SIGKILL"}


def test_case_that_fails_in_a_group_is_rerun_alone(monkeypatch):
    alone = []

    def run(self, keys):
        alone.extend(keys if len(keys) == 1 else [])
        wrong = None if len(keys) == 1 else "RESOURCE_EXHAUSTED"
        return {key: {"kernels": [("softmax forward", wrong if key == "softmax:1" else None)]} for key in keys}, {}

    monkeypatch.setattr(_prove.Runner, "run", run)
    names = {"softmax:0": "three rows", "softmax:1": "many rows"}
    assert _prove._seen(names, *_prove._run_cases([list(names)], 1.0)) == {"softmax forward": None}
    assert alone == ["softmax:1"]


def test_the_doctor_proves_the_kernels_once(interpreted, only):
    only("proof")
    first = jtbridge.doctor(timeout=120)
    assert named(first, "proof").text.startswith("4 of 4 kernels are right on this chip (NVIDIA H100")
    second = jtbridge.doctor(timeout=120)
    assert named(second, "proof").text.startswith("4 kernels are proven on NVIDIA H100 80GB HBM3, by ")
    assert first.healthy
    assert second.healthy


def test_doctor_names_failed_kernels_and_an_unwritable_folder(interpreted, prelude, only):
    only("proof")
    prelude(f"{CHILDREN}\nfrom jtbridge.kernels._softmax import op\nop._backward = lambda y, ct, *, log: [ct + 1]")
    interpreted.parent.mkdir()
    interpreted.write_text("a file where the folder should be")
    report = jtbridge.doctor(timeout=120)
    assert named(report, "softmax backward").status == "failure"
    record = named(report, "record")
    assert record.status == "warning"
    assert "cannot be written: " in record.text
    assert "XDG_CACHE_HOME" in record.fix
    assert not report.healthy


def test_prove_is_refused_without_a_gpu():
    with pytest.raises(BackendError, match='cannot be proven here: JAX has no GPU: its default backend is "cpu"'):
        jtbridge.prove()


@pytest.mark.parametrize("folder", _proving.folders())
def test_table_has_every_dtype_and_unique_case_names(folder):
    names = [case.name for case in _proving.cases(folder)]
    assert len(set(names)) == len(names)
    for dtype in _proving.dtypes():
        assert any(name.endswith(dtype) for name in names)


def test_every_kernel_that_a_lowering_uses_has_a_table():
    kernels = Path(_proving.__file__).parent
    with_lowerings = {file.parent.name.removeprefix("_") for file in kernels.glob("*/lowering.py")}
    assert with_lowerings <= set(_proving.folders())
    assert {file.parent.name.removeprefix("_") for file in kernels.glob("*/triton_*.py")} <= set(_proving.folders())
