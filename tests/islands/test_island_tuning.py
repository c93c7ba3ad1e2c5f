"""Choices between torch and XLA that are measured on this machine. `Clock` replaces the measurements by given times."""

from __future__ import annotations

import contextvars
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import Mesh, PartitionSpec
from torch.nn import functional

import jtbridge
from jtbridge.core import tuning, version
from jtbridge.errors import TuningWarning
from jtbridge.translate import _choice, _measure, island_of, islands_in, translate
from jtbridge.translate._measure import Times
from tests.compare import assert_matches, assert_trees_close

from .programs import CALL, calls_in
from .tunable import IMAGE, KERNEL, W, X, grouped, product

torch.manual_seed(0)
A = torch.randn(256, 256)
TORCH, XLA = Times(xla=1.9, torch=0.8), Times(xla=0.5, torch=0.8)


class Clock:
    """Replaces the measurement: every operator takes `times`, and is recorded."""

    def __init__(self, patch: pytest.MonkeyPatch):
        self.times: Times | str = TORCH
        self.measured: list[str] = []
        patch.setattr(_measure, "measure", self.measure)

    def measure(self, fn, lowered):
        assert len(lowered.in_avals) == len(fn.in_types)
        self.measured.append(island_of(fn).operator)
        return self.times


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def another_process(patch: pytest.MonkeyPatch) -> None:
    """Forget the choices of this process, so that they are read from disk again."""
    patch.setattr(_choice, "_FOUND", {})
    patch.setattr(tuning, "_ENTERED", False)
    tuning._has_files.cache_clear()
    jax.clear_caches()


def tuned_file(clock: Clock, folder: Path) -> Path:
    """Have `grouped` tuned to run in XLA, and return the file of the result."""
    clock.times = XLA
    with jtbridge.config(tune=True):
        calls_in(jtbridge.wrap(grouped), X, W)
    (file,) = folder.iterdir()
    return file


def test_no_measurements_by_default(clock, folder):
    assert calls_in(jtbridge.wrap(grouped), X, W) == 1
    assert calls_in(jtbridge.wrap(product), jnp.asarray(A.numpy())) == 0
    assert clock.measured == []
    assert not folder.exists()


@pytest.mark.parametrize(("times", "calls"), [(TORCH, 1), (XLA, 0)])
@pytest.mark.parametrize(
    ("function", "tensors"),
    [(grouped, (IMAGE, KERNEL)), (product, (A,))],
    ids=["that the table leaves to torch", "that the table leaves to XLA"],
)
def test_the_faster_one_is_chosen(clock, times, calls, function, tensors):
    clock.times = times
    arrays = [jnp.asarray(t.numpy()) for t in tensors]
    f = jtbridge.wrap(function)
    with jtbridge.config(tune=True):
        assert calls_in(f, *arrays) == calls
        assert_matches(jax.jit(f)(*arrays), function(*tensors), 1e-4)
    assert len(clock.measured) == 1
    assert calls_in(f, *arrays) == calls


def test_operators_of_the_gradient_are_measured_too(clock):
    clock.times = XLA
    gradient = jax.grad(lambda x, w: jtbridge.wrap(grouped)(x, w).sum(), argnums=(0, 1))
    assert calls_in(gradient, X, W) == 2
    with jtbridge.config(tune=True):
        assert calls_in(gradient, X, W) == 0
    assert set(clock.measured) == {"aten.convolution.default", "aten.convolution_backward.default"}


def test_small_operators_are_not_measured(clock):
    with jtbridge.config(tune=True):
        assert calls_in(jtbridge.wrap(grouped), X[:1, :8, :2, :2], W[:8]) == 0
        assert calls_in(jtbridge.wrap(product), jnp.ones((16, 16))) == 0
        assert calls_in(jax.vmap(jtbridge.wrap(lambda x: x.cumsum(-1))), jnp.ones((4096, 64))) == 1
    assert clock.measured == ["aten.cumsum.default"]  # its rows count


@pytest.mark.parametrize("options", [{"islands": "needed"}, {"islands": "never"}, {"backend": "xla"}])
def test_no_measurements_with_options_that_disable_islands(clock, options):
    with jtbridge.config(tune=True):
        assert calls_in(jtbridge.wrap(grouped, **options), X, W) == 0
    assert clock.measured == []


def test_no_measurements_for_several_devices_or_export(clock):
    mesh = Mesh(np.array(jax.devices()[:2]), ("batch",))
    specs = PartitionSpec("batch"), PartitionSpec()
    on_shards = jax.shard_map(jtbridge.wrap(grouped), mesh=mesh, in_specs=specs, out_specs=specs[0])
    with jtbridge.config(tune=True):
        assert calls_in(on_shards, X, W) == 1  # by the table
        jtbridge.export(jtbridge.wrap(grouped), X, W)
    assert clock.measured == []


def test_known_choices_are_copied_to_another_folder(clock, folder, tmp_path):
    """A second folder gets the known choices as files, without new measurements."""
    file = tuned_file(clock, folder)
    other = tmp_path / "other"
    for tune in (False, True):
        with jtbridge.config(tune=tune, tuning_folder=other):
            calls_in(jtbridge.wrap(grouped), X, W)
        assert other.exists() is tune
    assert (other / file.name).read_text() == file.read_text()
    assert len(clock.measured) == 1


def test_unusable_second_folder_gives_a_warning(clock, folder, tmp_path):
    tuned_file(clock, folder)
    with jtbridge.config(tune=True, tuning_folder=tmp_path / ("n" * 300)), pytest.warns(TuningWarning, match="copied"):
        calls_in(jtbridge.wrap(grouped), X, W)
    assert len(clock.measured) == 1


def test_later_processes_read_the_choice(clock, folder, monkeypatch):
    clock.times = XLA
    f = jtbridge.wrap(grouped)
    with jtbridge.config(tune=True):
        calls_in(f, X, W)
    (file,) = folder.iterdir()
    held = json.loads(file.read_text())
    assert held["milliseconds"] == {"xla": 0.5, "torch": 0.8}
    assert held["key"]["inputs"] == ["float32[2, 32, 56, 56]", "float32[32, 4, 3, 3]"]
    another_process(monkeypatch)
    assert calls_in(f, X, W) == 0
    assert calls_in(f, X[:, :, :55], W) == 1  # of another shape
    assert len(clock.measured) == 1


def test_tuned_island_stays_an_island_in_later_processes(clock, monkeypatch):
    f, x = jtbridge.wrap(product), jnp.asarray(A.numpy())
    with jtbridge.config(tune=True):
        assert calls_in(f, x) == 1
    another_process(monkeypatch)
    assert calls_in(f, x) == 1


_CHILD = """
import sys
import jax
import jax.numpy as jnp
import jtbridge
f = jtbridge.wrap(lambda x: (x @ x).sin())
with jtbridge.config(tuning_folder=sys.argv[1]):
    print(jax.jit(f).lower(jnp.ones((256, 256))).as_text().count("_python_cpu_callback"))
"""


def test_choice_is_read_by_a_subprocess(clock, folder):
    with jtbridge.config(tune=True):
        calls_in(jtbridge.wrap(product), jnp.ones((256, 256)))
    root = Path(jtbridge.__file__).parent.parent
    command = [sys.executable, "-c", _CHILD, str(folder)]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1"]


def test_choice_is_unaffected_by_later_changes_of_the_file(clock, folder, monkeypatch):
    clock.times = XLA
    f = jtbridge.wrap(grouped)
    with jtbridge.config(tune=True):
        calls_in(f, X, W)
    (file,) = folder.iterdir()
    whole = file.read_text()
    file.unlink()
    jax.clear_caches()
    assert calls_in(f, X, W) == 0
    another_process(monkeypatch)
    assert calls_in(f, X, W) == 1
    file.write_text(whole)  # by another process, meanwhile
    jax.clear_caches()
    assert calls_in(f, X, W) == 1
    clock.times = TORCH
    with jtbridge.config(tune=True):
        assert calls_in(f, X, W) == 0  # by the other process's choice


@pytest.mark.parametrize(
    "patched",
    [
        (_choice, "_processor", lambda: "another"),
        (_choice, "_threads_of_xla", lambda: ["64"]),
        (torch, "get_num_threads", lambda: 64),
        (torch, "__version__", "3.0"),
        (jax, "__version__", "1.0"),
        (version, "__version__", "1.0"),
    ],
    ids=lambda patched: patched[1],
)
def test_key_depends_on_machine_and_versions(clock, monkeypatch, patched):
    clock.times = XLA
    f = jtbridge.wrap(grouped)
    with jtbridge.config(tune=True):
        assert calls_in(f, X, W) == 0
    another_process(monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(*patched)
        assert calls_in(f, X, W) == 1


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"{",
        b"[]",
        b'{"key": {}}',
        b"\xff\xfe",
        b'{"key": {}, "milliseconds": {"xla": -1, "torch": null}}',
        b'{"key": {}, "milliseconds": {"xla": NaN, "torch": 1}}',
        b'{"key": {}, "milliseconds": {"xla": 1' + b"0" * 400 + b', "torch": 1}}',
        b"[" * 100_000,
    ],
    ids=lambda damage: damage[:60],
)
def test_invalid_file_is_ignored(clock, folder, monkeypatch, damage):
    file = tuned_file(clock, folder)
    f = jtbridge.wrap(grouped)
    file.write_bytes(damage)
    another_process(monkeypatch)
    with pytest.warns(TuningWarning, match="the default is used"):
        assert calls_in(f, X, W) == 1
    with jtbridge.config(tune=True), pytest.warns(TuningWarning, match="the default is used"):
        assert calls_in(f, X, W) == 0  # the file is written again
    another_process(monkeypatch)
    assert calls_in(f, X, W) == 0


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_irregular_file_is_not_read(clock, folder, monkeypatch, kind):
    file = tuned_file(clock, folder)
    assert file.stat().st_mode & 0o777 == 0o666 & ~_umask()  # another user can read it
    file.unlink()
    {"pipe": os.mkfifo, "device": lambda path: path.symlink_to("/dev/zero"), "folder": Path.mkdir}[kind](file)
    another_process(monkeypatch)
    with pytest.warns(TuningWarning, match="is not a regular file"):
        assert calls_in(jtbridge.wrap(grouped), X, W) == 1


def _umask() -> int:
    done = subprocess.run(["sh", "-c", "umask"], capture_output=True, text=True, check=True)
    return int(done.stdout, 8)


def test_unwritable_folder_gives_a_warning(clock, tmp_path):
    clock.times = XLA
    (tmp_path / "file").write_text("")
    with jtbridge.config(tune=True, tuning_folder=tmp_path / "file" / "folder"), pytest.warns(TuningWarning):
        assert calls_in(jtbridge.wrap(grouped), X, W) == 0


@pytest.mark.parametrize("reason", ["no home", "no access"])
def test_unreadable_folder_counts_as_empty(clock, monkeypatch, reason):
    def refuse(*args):
        raise RuntimeError("Could not determine home directory.") if reason == "no home" else PermissionError(reason)

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(tuning.Path, "home" if reason == "no home" else "glob", refuse)
    monkeypatch.setattr(tuning, "_FOLDER", contextvars.ContextVar("folder", default=None))
    another_process(monkeypatch)
    assert calls_in(jtbridge.wrap(grouped), X, W) == 1


def test_an_operator_that_cannot_be_measured_is_chosen_by_the_table(clock, folder):
    clock.times = "XlaRuntimeError: out of memory"
    with jtbridge.config(tune=True), pytest.warns(TuningWarning, match="is not tuned: XlaRuntimeError"):
        assert calls_in(jtbridge.wrap(grouped), X, W) == 1
    assert not folder.exists()


def test_a_program_of_several_processes_only_reads(clock, monkeypatch):
    clock.times = XLA
    f = jtbridge.wrap(grouped)
    with monkeypatch.context() as patch:
        patch.setattr(jax, "process_count", lambda: 2)
        with jtbridge.config(tune=True), pytest.warns(TuningWarning, match="several processes"):
            assert calls_in(f, X, W) == 1
    assert clock.measured == []
    another_process(monkeypatch)
    with jtbridge.config(tune=True):
        calls_in(f, X, W)
    another_process(monkeypatch)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert calls_in(f, X, W) == 0


def test_compiled_programs_are_recompiled_once(clock):
    clock.times = XLA
    traced = []
    wrapped = jtbridge.wrap(grouped)

    @jax.jit
    def f(x, w):
        traced.append(x.shape)
        return wrapped(x, w)

    def has_call() -> bool:
        return CALL in f.lower(X, W).as_text()

    f(X, W)
    assert has_call()
    assert len(traced) == 1
    for _ in range(3):
        with jtbridge.config(tune=True):
            f(X, W)
            assert not has_call()
        f(X, W)
        assert not has_call()
    assert len(traced) == 2
    assert_matches(f(X, W), grouped(IMAGE, KERNEL), 1e-4)


def test_programs_outside_the_config_block_are_recompiled_once(clock):
    traced = []
    wrapped = jtbridge.wrap(product)

    @jax.jit
    def outside(x):
        traced.append(x.shape)
        return wrapped(x)

    inside = jax.jit(jtbridge.wrap(grouped))
    for _ in range(4):
        outside(jnp.ones((256, 256)))
        with jtbridge.config(tune=True):
            inside(X, W)
    assert 2 <= len(traced) <= 3  # the first block allows more candidates, which the second block could measure
    assert clock.measured == ["aten.convolution.default"]


def test_threads_measure_once(clock):
    found = []

    def lower():
        with jtbridge.config(tune=True):
            found.append(calls_in(jtbridge.wrap(grouped), X, W))

    folder = tuning.results_folder()
    threads = [threading.Thread(target=in_folder, args=(folder, lower)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [1] * 4
    assert len(clock.measured) == 1


def in_folder(folder: Path, run) -> None:
    """Run with the folder of the test, which is a setting of each thread."""
    with jtbridge.config(tuning_folder=folder):
        run()


def test_explain_shows_measurements_without_measuring(clock):
    with jtbridge.config(tune=True):
        assert not any(island.tuned for island in jtbridge.explain(grouped, X, W).islands)
        assert clock.measured == []
        calls_in(jtbridge.wrap(grouped), X, W)
    report = jtbridge.explain(grouped, X, W)
    island, of_gradient = report.islands
    assert island.tuned
    assert "torch is faster: measured here 0.8 ms against 1.9 ms" in island.reason
    assert not of_gradient.tuned
    assert "times faster than XLA" in of_gradient.reason
    assert report.left_to_xla == ()


def test_explain_lists_operators_left_to_xla(clock):
    clock.times = XLA
    with jtbridge.config(tune=True):
        calls_in(jtbridge.wrap(grouped), X, W)
    report = jtbridge.explain(grouped, X, W)
    (left,) = report.left_to_xla
    assert (left.operator, left.tuned, left.gradient) == ("aten.convolution.default", True, False)
    assert "XLA is faster: measured here 0.5 ms against 0.8 ms of torch" in str(report)
    assert [island.operator for island in report.islands] == ["aten.convolution_backward.default"]


class _Block(torch.nn.Module):
    """A block of operators that tuning may give to torch, one of which draws."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(64)
        self.layer = torch.nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + functional.dropout(self.layer(self.norm(x)).tanh(), 0.5, self.training).sin()


@pytest.mark.parametrize("way", ["call", "scan"])
def test_repeated_blocks_that_draw(clock, way):
    model = torch.nn.Sequential(*[_Block() for _ in range(6)])
    x, key = jnp.ones((2048, 64)), jax.random.key(0)
    results = []
    for each in ("inline", way):
        net = jtbridge.module(model, repeated_blocks=each)
        params, state = net.init()
        run = jax.jit(lambda p, s, net=net: net(p, s, x, train=True, rng=key)[0])
        with jtbridge.config(tune=True):
            results.append(run(params, state))
    assert_trees_close(results[1], results[0], 1e-5)
    assert set(clock.measured) >= {"aten.native_layer_norm.default", "aten.addmm.default"}


def test_operators_in_the_measured_table_are_candidates_when_tuning():
    traced, _ = jtbridge.wrap(product).prepared((jnp.ones((256, 256)),), {})
    assert islands_in(translate(traced)) == []
    with jtbridge.config(tune=True):
        assert len(islands_in(translate(traced))) == 1
