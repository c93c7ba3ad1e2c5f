"""Tuning: what is timed, kept and read again. No GPU is needed: the timing is injected."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import jtbridge
from jtbridge.errors import TuningWarning
from jtbridge.kernels import (
    _chip,
    _timing,
    _tuning,
    attention,
    cross_entropy,
    layer_norm,
    linear_cross_entropy,
    matmul,
    rms_norm,
    softmax,
    swiglu,
)
from jtbridge.kernels._chip import Chip
from jtbridge.kernels._launch import interpreting
from jtbridge.kernels.attention import configurations
from jtbridge.kernels.cross_entropy import configurations as losses
from jtbridge.kernels.gated import configurations as gated
from jtbridge.kernels.gated.op import operation as gated_operation
from jtbridge.kernels.matmul.configurations import CONFIGURATIONS, choose
from jtbridge.kernels.norms import configurations as norms
from jtbridge.kernels.norms.op import operation as norm_operation
from jtbridge.kernels.norms.reference import Norm

from .harness import launches, needs_compiler, needs_interpreter, needs_triton, normal

pytestmark = needs_triton

HALF = CONFIGURATIONS["half"]
A, B = normal(512, 256, dtype="bfloat16"), normal(256, 512, dtype="bfloat16")


class Clock:
    """Stands in for the GPU: a candidate takes what `times` says of its (block_m, block_n), or 1 ms, and is counted."""

    def __init__(self, patch: pytest.MonkeyPatch):
        self.times: dict[tuple[int, int], float | str] = {}
        self.timed: list[tuple[int, int]] = []
        self.seen: list[dict] = []
        patch.setattr(_timing, "why_not", lambda: None)
        patch.setattr(_timing, "milliseconds", self.milliseconds)

    def milliseconds(self, kernel, operands, *, out_types, grid, constants, num_warps, num_stages):
        assert [x.shape for x in out_types] == [(512, 512)]
        self.seen.append({"grid": grid, **constants})
        block = constants["block_m"], constants["block_n"]
        self.timed.append(block)
        return self.times.get(block, 1.0)


@pytest.fixture(autouse=True)
def alone(tmp_path, monkeypatch):
    """Nothing found yet, a folder of its own, and a GPU that is not there."""
    monkeypatch.setattr(_tuning, "_FOUND", {})
    monkeypatch.setattr(_chip, "present", lambda: Chip("NVIDIA H100 80GB HBM3", 90))
    with jtbridge.config(tuning_folder=tmp_path):
        yield


@pytest.fixture
def clock(monkeypatch):
    if interpreting():
        pytest.skip("kernels are interpreted in this process: nothing is tuned")
    return Clock(monkeypatch)


def another_process(monkeypatch):
    monkeypatch.setattr(_tuning, "_FOUND", {})


def blocks(m: int = 512) -> tuple[int, int]:
    """The blocks that a product is launched with."""
    (launch,) = launches(lambda a, b: matmul(a, b), jnp.zeros((m, 256), "bfloat16"), B)
    return launch.constants["block_m"], launch.constants["block_n"]


def default_blocks(m: int = 512) -> tuple[int, int]:
    chosen = choose("half", m, 512, Chip("", 90))
    return chosen.block_m, chosen.block_n


def test_nothing_is_timed_unless_it_is_asked_for(clock, tmp_path):
    assert blocks() == default_blocks()
    assert clock.timed == []
    assert list(tmp_path.iterdir()) == []


def test_the_fastest_is_kept_and_read_by_later_processes(clock, tmp_path, monkeypatch):
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


def test_a_choice_stays_whatever_becomes_of_the_file(clock, tmp_path, monkeypatch):
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


def test_another_chip_source_or_triton_is_another_key(clock, monkeypatch):
    import triton

    from jtbridge.kernels.matmul.triton_kernel import matmul_forward

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


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"key": {}}', b"\xff\xfe"])
def test_a_file_that_cannot_be_understood_is_ignored(clock, tmp_path, monkeypatch, damage):
    clock.times = {(16, 64): 0.25}
    with jtbridge.config(tune=True):
        blocks()
    (file,) = tmp_path.iterdir()
    file.write_bytes(damage if isinstance(damage, bytes) else damage.encode())
    another_process(monkeypatch)
    with pytest.warns(TuningWarning, match="the default is used"):
        assert blocks() == default_blocks()
    with jtbridge.config(tune=True), pytest.warns(TuningWarning, match="the default is used"):
        assert blocks() == (16, 64)  # it is written anew
    another_process(monkeypatch)
    assert blocks() == (16, 64)


def test_a_configuration_that_is_no_candidate_is_ignored(clock, tmp_path, monkeypatch):
    with jtbridge.config(tune=True):
        blocks()
    (file,) = tmp_path.iterdir()
    held = json.loads(file.read_text())
    held["configuration"]["block_m"] = 512
    file.write_text(json.dumps(held))
    another_process(monkeypatch)
    assert blocks() == default_blocks()


def test_a_folder_that_cannot_be_written_costs_a_warning(clock, tmp_path):
    clock.times = {(16, 64): 0.25}
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "folder"
    with jtbridge.config(tune=True, tuning_folder=folder), pytest.warns(TuningWarning):
        assert blocks() == (16, 64)


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
def test_without_a_gpu_nothing_is_tuned(monkeypatch):
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
            lowered.append(_tuning.chosen(KERNEL(), HALF, HALF[0], key, lambda c: clock.timed.append(c) or c.block_m))

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
from jtbridge.kernels.matmul.configurations import CONFIGURATIONS, choose
every, path = CONFIGURATIONS["half"], Path(sys.argv[1])
for i in range(300):
    _tuning._write(path, {"kernel": "k"}, every[i % 7], dict.fromkeys(every, 1.0))
    assert _tuning._read(path, {"kernel": "k"}, every) in every
"""


def test_processes_that_write_at_once_leave_a_whole_file(tmp_path):
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


def test_attention_is_tuned_in_each_direction(clock, tmp_path, monkeypatch):
    def milliseconds(kernel, operands, *, out_types, grid, constants, num_warps, num_stages):
        table = {
            "attention_forward": configurations.FORWARD,
            "attention_backward_query": configurations.BACKWARD_QUERY,
            "attention_backward_key_value": configurations.BACKWARD_KEY_VALUE,
        }[kernel.__name__]
        last = table[64, 2][-1]
        given = constants["block_q"], constants["block_k"], num_warps, num_stages
        return 0.5 if given == (last.queries, last.keys, last.warps, last.stages) else 1.0

    monkeypatch.setattr(_timing, "milliseconds", milliseconds)
    x = jnp.zeros((1, 2, 128, 64), "bfloat16")
    with jtbridge.config(tune=True):
        found = launches(lambda x: jax.grad(lambda x: attention(x, x, x).astype("float32").sum())(x), x)
    assert len(list(tmp_path.iterdir())) == 3
    tables = (configurations.FORWARD, configurations.BACKWARD_KEY_VALUE, configurations.BACKWARD_QUERY)
    for launch, table in zip(found, tables, strict=True):
        last = table[64, 2][-1]
        assert (launch.constants["block_q"], launch.constants["block_k"]) == (last.queries, last.keys)


def test_softmax_is_tuned(clock, monkeypatch):
    monkeypatch.setattr(_timing, "milliseconds", lambda *_, num_warps, **__: abs(num_warps - 8))
    x = jnp.zeros((16, 1024))
    with jtbridge.config(tune=True):
        found = launches(lambda x: jax.grad(lambda x: softmax(x)[0, 0])(x), x)
    assert [launch.num_warps for launch in found] == [8, 8]  # not 4


def _gradients(f):
    """The results, and the gradients of all arguments."""

    def run(*args):
        y, pull = jax.vjp(f, *args)
        return y, pull(jax.tree.map(jnp.ones_like, y))

    return run


def _lowered(f, *shapes, dtype="bfloat16"):
    return launches(_gradients(f), *(jnp.zeros(shape, dtype) for shape in shapes))


ROWS, WIDTH = (64, 4096), (4096,)
LABELS = jnp.zeros(64, "int32")
EACH = {
    "layer_norm": (
        lambda: _lowered(lambda x, w, b: layer_norm(x, w, b), ROWS, WIDTH, WIDTH),
        {
            "norm_forward": norms.candidates_forward(64, 4096),
            "norm_backward": norms.candidates_backward(64, 4096, loaded=4),
        },
    ),
    "rms_norm of long rows": (
        lambda: _lowered(lambda x, w: rms_norm(x, w), (64, 20_000), (20_000,)),
        {
            "norm_forward_pieces": norms.candidates_forward(64, 20_000),
            "norm_backward_sums": norms.candidates_sums(),
            "norm_backward": norms.candidates_backward(64, 20_000, loaded=4),
        },
    ),
    "swiglu": (
        lambda: _lowered(swiglu, ROWS, ROWS),
        {"gated_forward": gated.candidates(), "gated_backward": gated.candidates()},
    ),
    "cross_entropy": (
        lambda: _lowered(lambda x: cross_entropy(x, LABELS), (64, 30_000)),
        {
            "cross_entropy_forward": losses.candidates_forward(30_000),
            "cross_entropy_backward": losses.candidates_backward(30_000),
        },
    ),
    "linear_cross_entropy": (
        lambda: _lowered(lambda x, w: linear_cross_entropy(x, w, LABELS), (64, 16), (30_000, 16)),
        {
            "cross_entropy_forward": losses.candidates_forward(30_000),
            "cross_entropy_backward": losses.candidates_backward(30_000),
        },
    ),
}


@pytest.mark.parametrize("name", EACH)
def test_each_operation_is_tuned_in_each_direction(name, clock, tmp_path, monkeypatch):
    lowered, tables = EACH[name]
    timed = {}

    def milliseconds(kernel, operands, *, out_types, grid, constants, num_warps, num_stages):
        del operands, num_stages
        timed.setdefault(kernel.__name__, []).append((grid, constants, num_warps, [t.shape for t in out_types]))
        return 1.0 / len(timed[kernel.__name__])  # the last is the fastest

    monkeypatch.setattr(_timing, "milliseconds", milliseconds)
    with jtbridge.config(tune=True):
        found = lowered()
    assert sorted(timed) == sorted(tables) == sorted(launch.kernel.__name__ for launch in found)
    assert len(list(tmp_path.iterdir())) == len(tables)
    for launch in found:
        table, of_kernel = tables[launch.kernel.__name__], timed[launch.kernel.__name__]
        assert len(of_kernel) == len(table) > 1
        assert [warps for _, _, warps, _ in of_kernel] == [c.warps for c in table]
        assert len({(grid, str(constants), warps) for grid, constants, warps, _ in of_kernel}) == len(table)
        assert all(shapes == [t.shape for t in launch.out_types] for *_, shapes in of_kernel)
        given = dataclasses.asdict(table[-1])
        assert launch.num_warps == given.pop("warps")
        held = launch.constants
        assert all(held[name] == value for name, value in given.items() if name in held)
        assert {name for name in ("tile", "block", "stages", "pieces", "lanes") if name in held} <= set(given)
    another_process(monkeypatch)
    assert [(launch.constants, launch.num_warps) for launch in lowered()] == [
        (launch.constants, launch.num_warps) for launch in found
    ]


def test_rows_whose_label_is_ignored_are_read_where_they_are_timed(clock, monkeypatch):
    ignored = []

    def milliseconds(*_, constants, **__):
        ignored.append(constants["ignore_index"])
        return 1.0

    monkeypatch.setattr(_timing, "milliseconds", milliseconds)
    with jtbridge.config(tune=True):
        found = _lowered(lambda x: cross_entropy(x, LABELS, ignore_index=0), (64, 30_000))
    assert ignored
    assert 0 not in ignored  # made-up labels are 0
    assert [launch.constants["ignore_index"] for launch in found] == [0, 0]


def _norm(**options):
    return lambda x, w: rms_norm(x, w, **options)


def _rounded(x, w):
    norm = Norm(False, 1e-6, 0.0, False, True, False, rounded=True)
    return norm_operation(norm, (str(w.dtype),))(x[None], w[None])[0]


def _of(activation, rounded):
    return lambda x, y: gated_operation(activation, rounded=rounded)(x, y)[0]


def _loss(labels=LABELS, **options):
    return lambda x: cross_entropy(x, labels, **options)


# By kernel: functions, shapes and dtypes of which each is a problem of its own, and one that is the first's.
PROBLEMS = {
    "norm_forward": (
        [
            (_norm(), ROWS, WIDTH),
            (_norm(), (256, 4096), WIDTH),
            (_norm(), (64, 2048), (2048,)),
            (lambda x, w: rms_norm(x, w.astype("float32")), ROWS, WIDTH),
            (lambda x, w: layer_norm(x, w), ROWS, WIDTH),
            (lambda x, w: layer_norm(x, None, w), ROWS, WIDTH),
            (rms_norm, ROWS),
            (_rounded, ROWS, WIDTH),
            (lambda x, w: rms_norm(x, w, residual=x), ROWS, WIDTH),
            (jax.vmap(_norm()), (4, 16, 4096), (4, 4096)),
        ],
        (_norm(eps=1e-3, offset=1.0), (50, 4000), (4000,)),
    ),
    "norm_backward": (
        [
            (_norm(), ROWS, WIDTH),
            (_norm(), (256, 4096), WIDTH),
            (lambda x, w: layer_norm(x, w), ROWS, WIDTH),
            (lambda x, w: layer_norm(x, None, w), ROWS, WIDTH),
            (lambda x, w: rms_norm(x, w, residual=x), ROWS, WIDTH),
            (jax.vmap(_norm()), (4, 16, 4096), (4, 4096)),
            (jax.vmap(_norm(), (0, None)), (4, 16, 4096), (4096,)),
        ],
        (_norm(eps=1e-3, offset=1.0), (50, 4000), (4000,)),
    ),
    "gated_forward": (
        [
            (_of("silu", False), ROWS, ROWS),
            (_of("silu", True), ROWS, ROWS),
            (_of("gelu", False), ROWS, ROWS),
            (_of("silu", False), (128, 4096), (128, 4096)),
        ],
        (swiglu, (50, 4000), (50, 4000)),
    ),
    "cross_entropy_backward": (
        [
            (_loss(), (64, 30_000)),
            (_loss(label_smoothing=0.1), (64, 30_000)),
            (_loss(), (64, 60_000)),
            (_loss(jnp.zeros(256, "int32")), (256, 30_000)),
        ],
        (_loss(jnp.zeros(50, "int32"), ignore_index=7), (50, 32_000)),
    ),
}


@pytest.mark.parametrize("kernel", PROBLEMS)
def test_a_problem_is_what_changes_the_code_and_the_sizes(kernel, clock, tmp_path, monkeypatch):
    monkeypatch.setattr(_timing, "milliseconds", lambda *_, **__: 1.0)
    problems, same = PROBLEMS[kernel]

    def kept():
        return len(list(tmp_path.glob(f"{kernel}-*")))

    with jtbridge.config(tune=True):
        for count, (f, *shapes) in enumerate(problems, 1):
            _lowered(f, *shapes)
            assert kept() == count
        _lowered(same[0], *same[1:])
        assert kept() == len(problems)
        f, *shapes = problems[0]
        _lowered(f, *shapes, dtype="float16")
        assert kept() == len(problems) + 1


def test_the_folder_is_the_users_cache_where_none_is_given(monkeypatch):
    token = _tuning._FOLDER.set(None)
    try:
        monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
        assert _tuning._folder() == Path("/somewhere/jtbridge/tuning")
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setenv("HOME", "/home/someone")
        assert _tuning._folder() == Path("/home/someone/.cache/jtbridge/tuning")
    finally:
        _tuning._FOLDER.reset(token)


@needs_interpreter
def test_what_is_timed_is_the_launch(monkeypatch):
    import torch
    import triton.testing

    from jtbridge.kernels.matmul.triton_kernel import matmul_forward

    written = []

    def once(run, **_):
        run()
        written.append(made[-1])
        return 0.5

    made = []
    make = _timing._made_up
    monkeypatch.setattr(_timing, "_DEVICE", "cpu")
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
