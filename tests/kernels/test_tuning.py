"""Tuning: candidates are timed, and the results are stored and read again. The times are simulated."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jtbridge
from jtbridge.core import tuning
from jtbridge.errors import ArgumentError, TuningWarning
from jtbridge.kernels import _chip, _timing, _tuning, matmul
from jtbridge.kernels._chip import Chip
from jtbridge.kernels._matmul.configurations import CONFIGURATIONS, default
from jtbridge.triton import COMPILER_OPTIONS

from .harness import another_process, launches, needs_compiler, needs_interpreter, needs_triton, normal

pytestmark = [needs_triton, pytest.mark.usefixtures("untuned"), pytest.mark.cpu]

HALF = CONFIGURATIONS["half"]
A, B = normal(512, 256, dtype="bfloat16"), normal(256, 512, dtype="bfloat16")


class Clock:
    """Replaces the GPU: a candidate takes its time in `times`, by (block_m, block_n), or 1 ms, and is counted."""

    def __init__(self, patch: pytest.MonkeyPatch):
        self.times: dict[tuple[int, int], float | str] = {}
        self.timed: list[tuple[int, int]] = []
        self.seen: list[dict] = []
        patch.setattr(_timing, "milliseconds", self.milliseconds)

    def milliseconds(self, kernel, operands, *, out_types, grid, constants, num_warps, num_stages):
        assert [x.shape for x in out_types] == [(512, 512)]
        self.seen.append({"grid": grid, **constants})
        block = constants["block_m"], constants["block_n"]
        self.timed.append(block)
        return self.times.get(block, 1.0)


@pytest.fixture
def clock(timed, monkeypatch):
    return Clock(monkeypatch)


def blocks(m: int = 512) -> tuple[int, int]:
    """Return the blocks with which a product is launched."""
    (launch,) = launches(lambda a, b: matmul(a, b), jnp.zeros((m, 256), "bfloat16"), B)
    return launch.constants["block_m"], launch.constants["block_n"]


def default_blocks(m: int = 512) -> tuple[int, int]:
    chosen = default("half", m, 512, Chip("", 90))
    return chosen.block_m, chosen.block_n


def test_no_timing_by_default(clock, tmp_path):
    assert blocks() == default_blocks()
    assert clock.timed == []
    assert list(tmp_path.iterdir()) == []


def test_fastest_is_stored_and_read_by_later_processes(clock, tmp_path, monkeypatch):
    clock.times = {(16, 64): 0.25}
    with jtbridge.config(tune=True):
        assert blocks() == (16, 64)
        assert sorted(clock.timed) == sorted((c.block_m, c.block_n) for c in HALF)
        for how in clock.seen:
            assert how["grid"] == (-(-512 // how["block_m"]) * -(-512 // how["block_n"]),)
        assert blocks() == (16, 64)
    assert len(clock.timed) == len(HALF)  # once
    (file,) = tmp_path.iterdir()
    held = json.loads(file.read_text())
    assert held["key"]["chip"] == "NVIDIA H100 80GB HBM3"
    assert len(held["milliseconds"]) == len(HALF)

    another_process(monkeypatch)
    assert blocks() == (16, 64)
    assert blocks(400) == (16, 64)  # of the same bucket
    assert blocks(300 + 256) == default_blocks(556)  # of another
    assert len(clock.timed) == len(HALF)


def test_choice_is_unaffected_by_later_changes_of_the_file(clock, tmp_path, monkeypatch):
    clock.times = {(16, 64): 0.25}
    with jtbridge.config(tune=True):
        blocks()
    (file,) = tmp_path.iterdir()
    whole = file.read_text()
    file.unlink()
    assert blocks() == (16, 64)
    another_process(monkeypatch)
    assert blocks() == default_blocks()
    file.write_text(whole)  # by another process, meanwhile
    assert blocks() == default_blocks()
    with jtbridge.config(tune=True):
        assert blocks() == (16, 64)


def test_key_depends_on_chip_source_and_triton(clock, monkeypatch):
    import triton

    from jtbridge.kernels._matmul.triton_kernel import matmul_forward

    clock.times = {(16, 64): 0.25}
    with jtbridge.config(tune=True):
        blocks()
    for patched in (
        (_chip, "present", lambda: Chip("NVIDIA A100-SXM4-80GB", 80)),
        (triton, "__version__", "3.10.0"),
        (type(matmul_forward), "cache_key", "another"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(_tuning, "_FOUND", {})
            patch.setattr(*patched)
            assert blocks() == default_blocks()
        assert blocks() == (16, 64)


def test_a_candidate_that_does_not_run_is_skipped(clock, tmp_path):
    clock.times = {(c.block_m, c.block_n): "OutOfResources: shared memory" for c in HALF} | {(64, 64): 3.0}
    with jtbridge.config(tune=True):
        assert blocks() == (64, 64)
    (file,) = tmp_path.iterdir()
    assert "OutOfResources" in file.read_text()


def test_no_candidate_runs(clock, tmp_path):
    clock.times = {(c.block_m, c.block_n): "OutOfMemoryError: no room" for c in HALF}
    with jtbridge.config(tune=True), pytest.warns(TuningWarning, match="no candidate runs.*OutOfMemoryError: no room"):
        assert blocks() == default_blocks()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"key": {}}', b"\xff\xfe", pickle.dumps({"key": {}})])
def test_invalid_file_is_ignored(clock, tmp_path, monkeypatch, damage):
    clock.times = {(16, 64): 0.25}
    with jtbridge.config(tune=True):
        blocks()
    (file,) = tmp_path.iterdir()
    file.write_bytes(damage if isinstance(damage, bytes) else damage.encode())
    another_process(monkeypatch)
    with pytest.warns(TuningWarning, match="the default is used"):
        assert blocks() == default_blocks()
    with jtbridge.config(tune=True), pytest.warns(TuningWarning, match="the default is used"):
        assert blocks() == (16, 64)  # the file is written again
    another_process(monkeypatch)
    assert blocks() == (16, 64)


def test_stored_configuration_that_is_not_a_candidate_is_ignored(clock, tmp_path, monkeypatch):
    with jtbridge.config(tune=True):
        blocks()
    (file,) = tmp_path.iterdir()
    held = json.loads(file.read_text())
    held["configuration"]["block_m"] = 512
    file.write_text(json.dumps(held))
    another_process(monkeypatch)
    assert blocks() == default_blocks()


def test_unwritable_folder_gives_a_warning(clock, tmp_path):
    clock.times = {(16, 64): 0.25}
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "folder"
    with jtbridge.config(tune=True, tuning_folder=folder), pytest.warns(TuningWarning):
        assert blocks() == (16, 64)


@pytest.mark.parametrize("folder", ["", 3, b"/tmp/bytes", "~no_such_user/x", "a\0b"])
def test_a_folder_is_a_path(folder: Any):
    with pytest.raises(ArgumentError, match="`tuning_folder` must be"), jtbridge.config(tuning_folder=folder):
        pass


def test_a_program_of_several_processes_only_reads(clock, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with jtbridge.config(tune=True), pytest.warns(TuningWarning, match="several processes"):
        assert blocks() == default_blocks()
    assert clock.timed == []
    monkeypatch.setattr(jax, "process_count", lambda: 1)
    clock.times = {(16, 64): 0.25}
    with jtbridge.config(tune=True):
        blocks()
    another_process(monkeypatch)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with jtbridge.config(tune=True):
        assert blocks() == (16, 64)


@needs_compiler
def test_no_tuning_without_a_gpu(monkeypatch):
    with jtbridge.config(tune=True), pytest.warns(TuningWarning, match="this torch has no GPU"):
        blocks()
    monkeypatch.setattr(_chip, "present", lambda: None)
    with jtbridge.config(tune=True), pytest.warns(TuningWarning, match="this process has no GPU"):
        assert blocks() == default_blocks()


def test_threads_tune_once(clock, tmp_path):
    lowered = []

    def lower():
        with jtbridge.config(tune=True, tuning_folder=tmp_path):  # which are the settings of a thread
            key = {"kernel": "matmul_forward"}
            lowered.append(_tuning.chosen(KERNEL(), HALF, key, lambda c: clock.timed.append(c) or c.block_m))

    threads = [threading.Thread(target=lower) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(clock.timed) == len(HALF)
    assert len(lowered) == 8
    assert len(set(lowered)) == 1


class KERNEL:
    __name__ = "matmul_forward"
    cache_key = "source"


WRITER = """
import sys
from pathlib import Path
from jtbridge.kernels import _tuning
from jtbridge.kernels._matmul.configurations import CONFIGURATIONS, default
every, path = CONFIGURATIONS["half"], Path(sys.argv[1])
for i in range(300):
    _tuning._write(path, {"kernel": "k"}, every[i % 7], dict.fromkeys(every, 1.0))
    assert _tuning._read_configuration(path, {"kernel": "k"}, every) in every
"""


def test_concurrent_writers_leave_a_valid_file(tmp_path):
    path = tmp_path / "k.json"
    root = Path(jtbridge.__file__).parent.parent
    writers = [
        subprocess.Popen(
            [sys.executable, "-W", "error", "-c", WRITER, path], cwd=root, stderr=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    for writer in writers:
        _, errors = writer.communicate()
        assert writer.returncode == 0, errors
    assert [file.name for file in tmp_path.iterdir()] == ["k.json"]


def test_default_folder_is_the_user_cache(monkeypatch):
    token = tuning._FOLDER.set(None)
    try:
        monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
        assert tuning.results_folder() == Path("/somewhere/jtbridge/tuning")
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setenv("HOME", "/home/someone")
        assert tuning.results_folder() == Path("/home/someone/.cache/jtbridge/tuning")
    finally:
        tuning._FOLDER.reset(token)


@needs_interpreter
def test_timing_runs_the_launch_of_the_program(monkeypatch):
    import torch
    import triton.testing

    from jtbridge.kernels._matmul.triton_kernel import matmul_forward

    written = []

    def once(run, **_):
        run()
        written.append(made[-1])
        return 0.5

    made = []
    make = _timing._made_up
    monkeypatch.setattr(_timing, "_DEVICE", "cpu")
    monkeypatch.setattr(_timing, "wait_for_device", lambda: None)
    monkeypatch.setattr(_timing, "_made_up", lambda x: made.append(make(x)) or made[-1])
    monkeypatch.setattr(triton.testing, "do_bench", once)
    a, b = jax.ShapeDtypeStruct((20, 30), "float32"), jax.ShapeDtypeStruct((30, 40), "float32")
    sizes = {"m": 20, "n": 40, "k": 30, "block_m": 16, "block_n": 32, "block_k": 32, "group": 8}
    constants = {**sizes, "biased": False, "transpose_b": False, "activation": None, "precision": "ieee"}
    how = {"grid": (4,), "constants": constants, "num_warps": 2, "num_stages": 3}
    out = [jax.ShapeDtypeStruct((20, 40), "float32")]
    assert _timing.milliseconds(matmul_forward, [a, b, b], out_types=out, **how) == 0.5
    torch.testing.assert_close(written[0], made[0] @ made[1])

    def fails(run, **_):
        raise triton.errors.TritonError("out of resource: shared memory")

    monkeypatch.setattr(triton.testing, "do_bench", fails)
    found = _timing.milliseconds(matmul_forward, [a, b, b], out_types=out, **how)
    assert found == "TritonError: out of resource: shared memory"


class Broken:
    """An array whose program failed."""

    def block_until_ready(self):
        raise RuntimeError("of somebody else")


def test_timing_waits_for_the_gpu_and_uses_program_options(monkeypatch):
    import torch
    import triton.testing

    events: list[Any] = []

    class Running:
        def block_until_ready(self):
            events.append("JAX's array")

    class Kernel:
        def __getitem__(self, grid):
            return lambda *given, **options: events.append(options)

    monkeypatch.setattr(jax, "live_arrays", lambda: [Broken(), Running()])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: events.append("every stream"))
    monkeypatch.setattr(triton.testing, "do_bench", lambda run, **_: run() or 0.5)
    how = {"grid": (1,), "constants": {"n": 3}, "num_warps": 2, "num_stages": 3}
    for _ in range(2):
        assert _timing.milliseconds(Kernel(), [], out_types=[], **how) == 0.5
    options = {"n": 3, "num_warps": 2, "num_stages": 3, "enable_fp_fusion": True}
    assert events == ["JAX's array", "every stream", options] * 2
    assert options.items() >= COMPILER_OPTIONS.items()


@pytest.mark.gpu
def test_a_gpu_times_every_candidate(tmp_path, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(_tuning, "_FOUND", {})
    with jtbridge.config(tune=True, tuning_folder=tmp_path):
        y = jax.jit(matmul)(A, B)
    assert y.shape == (512, 512)
    (file,) = tmp_path.iterdir()
    times = [t for _, t in json.loads(file.read_text())["milliseconds"]]
    assert sum(isinstance(t, float) and t > 0 for t in times) == len(HALF)
