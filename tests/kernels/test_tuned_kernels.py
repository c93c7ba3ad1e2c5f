"""Which kernels are tuned, forward or backward, and which shapes and dtypes share one tuned configuration."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import jtbridge
from jtbridge.kernels import (
    _timing,
    attention,
    cross_entropy,
    layer_norm,
    linear_cross_entropy,
    rms_norm,
    rope,
    rope_qk,
    softmax,
    swiglu,
)
from jtbridge.kernels._attention import configurations
from jtbridge.kernels._cross_entropy import configurations as losses
from jtbridge.kernels._gated import configurations as gated
from jtbridge.kernels._gated.op import differentiable_kernel as gated_operation
from jtbridge.kernels._norms import configurations as norms
from jtbridge.kernels._norms.op import differentiable_kernel as norm_operation
from jtbridge.kernels._norms.reference import Norm
from jtbridge.kernels._rope import configurations as rotations
from jtbridge.kernels._rope.op import differentiable_kernel as rope_operation
from jtbridge.kernels._rope.reference import Rotation

from .harness import another_process, launches, needs_triton

pytestmark = [needs_triton, pytest.mark.usefixtures("timed"), pytest.mark.cpu]


def test_attention_is_tuned_in_each_direction(tmp_path, monkeypatch):
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


def test_softmax_is_tuned(monkeypatch):
    monkeypatch.setattr(_timing, "milliseconds", lambda *_, num_warps, **__: abs(num_warps - 8))
    x = jnp.zeros((16, 1024))
    with jtbridge.config(tune=True):
        found = launches(lambda x: jax.grad(lambda x: softmax(x)[0, 0])(x), x)
    assert [launch.num_warps for launch in found] == [8, 8]  # not 4


def _gradients(f):
    """Return the results, and the gradients of all arguments."""

    def run(*args):
        y, pull = jax.vjp(f, *args)
        return y, pull(jax.tree.map(jnp.ones_like, y))

    return run


def _lowered(f, *shapes, dtype="bfloat16"):
    return launches(_gradients(f), *(jnp.zeros(shape, dtype) for shape in shapes))


ROWS, WIDTH = (64, 4096), (4096,)
LABELS = jnp.zeros(64, "int32")
HEADS, ANGLES = (8, 64, 128), (64, 128)
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
    "rope_qk": (
        lambda: launches(
            lambda *args: rope_qk(*args), *(jnp.zeros(shape, "bfloat16") for shape in (HEADS, HEADS, ANGLES, ANGLES))
        ),
        {"rope_rotate": rotations.candidates(8, 64, 64, interleaved=False)},
    ),
    "rope of neighbours": (
        lambda: launches(
            lambda *args: rope(*args, interleaved=True), *(jnp.zeros(shape) for shape in (HEADS, ANGLES, ANGLES))
        ),
        {"rope_rotate": rotations.candidates(8, 64, 64, interleaved=True)},
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
def test_each_operation_is_tuned_in_each_direction(name, tmp_path, monkeypatch):
    lowered, tables = EACH[name]
    seen = {}

    def milliseconds(kernel, operands, *, out_types, grid, constants, num_warps, num_stages):
        del operands, num_stages
        seen.setdefault(kernel.__name__, []).append((grid, constants, num_warps, [t.shape for t in out_types]))
        return 1.0 / len(seen[kernel.__name__])  # the last is the fastest

    monkeypatch.setattr(_timing, "milliseconds", milliseconds)
    with jtbridge.config(tune=True):
        found = lowered()
    assert sorted(seen) == sorted(tables) == sorted(launch.kernel.__name__ for launch in found)
    assert len(list(tmp_path.iterdir())) == len(tables)
    for launch in found:
        table, of_kernel = tables[launch.kernel.__name__], seen[launch.kernel.__name__]
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


def test_timed_rows_are_never_ignored_labels(monkeypatch):
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


def _rotated(*flags):
    return lambda x, cos, sin: rope_operation(1, Rotation(*flags))(x[None, None], cos[None, None], sin[None, None])[0]


def _loss(labels=LABELS, **options):
    return lambda x: cross_entropy(x, labels, **options)


# By kernel: functions, shapes and dtypes that are separate tuning problems, and one that shares the first problem.
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
    "rope_rotate": (  # in both directions
        [
            (_rotated(), HEADS, ANGLES, ANGLES),
            (_rotated(True), HEADS, ANGLES, ANGLES),
            (_rotated(False, True), HEADS, ANGLES, ANGLES),
            (_rotated(False, False, True), (64, 8, 128), ANGLES, ANGLES),
            (_rotated(), (16, 64, 128), ANGLES, ANGLES),
            (_rotated(), (8, 128, 128), (128, 128), (128, 128)),
            (_rotated(), (8, 64, 64), (64, 64), (64, 64)),
            (rope_qk, HEADS, HEADS, ANGLES, ANGLES),
            (rope_qk, HEADS, (2, 64, 128), ANGLES, ANGLES),
            (rope, (3, *HEADS), ANGLES, ANGLES),
            (rope, (3, *HEADS), (3, *ANGLES), (3, *ANGLES)),
            (lambda x, cos, sin: rope(x, cos.astype("float32"), sin), HEADS, ANGLES, ANGLES),
        ],
        (rope, (1, 6, 50, 120), (50, 120), (50, 120)),
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
def test_one_choice_per_generated_code_and_size(kernel, tmp_path, monkeypatch):
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
