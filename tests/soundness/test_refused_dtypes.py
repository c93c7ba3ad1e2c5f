"""Under jit an operator refuses the dtypes that torch refuses; with dtypes that torch accepts it has torch's values."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.nn import functional as F

import jtbridge
from jtbridge.capture.modes import refused_dtypes
from jtbridge.errors import ShapeInferenceError, TranslationError
from tests.compare import assert_matches
from tests.conformance.convert import to_jax

ROWS = torch.tensor([0, 1, 1])
SQUARE = (3, 3)


def lstm(x: torch.Tensor, h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    weights = [w, w, w[:, 0], w[:, 0]]
    return torch.lstm(x[None], (h[None], h[None]), weights, True, 1, 0.0, False, False, True)[0]


def gru(x: torch.Tensor, h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.gru(x[None], h[None], [w[:9], w[:9], w[:9, 0], w[:9, 0]], True, 1, 0.0, False, False, True)[0]


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q[None, None], k[None, None], v[None, None])


# A function, and the shapes of its arguments, which are float32 unless a case has another dtype.
FUNCTIONS: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "mm": (torch.mm, (SQUARE, SQUARE)),
    "matmul": (torch.matmul, ((2, 3, 3), SQUARE)),
    "bmm": (torch.bmm, ((2, 3, 3), (2, 3, 3))),
    "addmm": (torch.addmm, (SQUARE, SQUARE, SQUARE)),
    "baddbmm": (torch.baddbmm, (SQUARE, (2, 3, 3), (2, 3, 3))),
    "mv": (torch.mv, (SQUARE, (3,))),
    "addmv": (torch.addmv, ((3,), SQUARE, (3,))),
    "dot": (torch.dot, ((3,), (3,))),
    "vdot": (torch.vdot, ((3,), (3,))),
    "outer": (torch.outer, ((3,), (3,))),
    "linear": (F.linear, (SQUARE, SQUARE, (3,))),
    "bilinear": (F.bilinear, (SQUARE, SQUARE, (2, 3, 3), (2,))),
    "einsum": (lambda a, b: torch.einsum("ij,jk->ik", a, b), (SQUARE, SQUARE)),
    "conv1d": (F.conv1d, ((1, 2, 5), (3, 2, 2), (3,))),
    "conv2d": (F.conv2d, ((1, 2, 5, 5), (3, 2, 2, 2), (3,))),
    "conv3d": (F.conv3d, ((1, 2, 4, 4, 4), (3, 2, 2, 2, 2), (3,))),
    "conv_transpose2d": (F.conv_transpose2d, ((1, 2, 4, 4), (2, 3, 2, 2), (3,))),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (3,), w, b), (SQUARE, (3,), (3,))),
    "rms_norm": (lambda x, w: F.rms_norm(x, (3,), w), (SQUARE, (3,))),
    "group_norm": (lambda x, w, b: F.group_norm(x, 2, w, b), ((2, 4, 3), (4,), (4,))),
    "batch_norm": (lambda x, m, v, w, b: F.batch_norm(x, m, v, w, b), ((2, 3, 4), (3,), (3,), (3,), (3,))),
    "lerp": (torch.lerp, (SQUARE, SQUARE, SQUARE)),
    "where": (lambda x, y: torch.where(x > 0, x, y), (SQUARE, SQUARE)),
    "cat": (lambda x, y: torch.cat([x, y]), (SQUARE, SQUARE)),
    "stack": (lambda x, y: torch.stack([x, y]), (SQUARE, SQUARE)),
    "scatter": (lambda x, y: x.scatter(0, ROWS[None], y), (SQUARE, SQUARE)),
    "scatter_add": (lambda x, y: x.scatter_add(0, ROWS[None], y), (SQUARE, SQUARE)),
    "scatter_reduce": (lambda x, y: x.scatter_reduce(0, ROWS[None], y, "amax"), (SQUARE, SQUARE)),
    "index_add": (lambda x, y: x.index_add(0, ROWS, y), (SQUARE, SQUARE)),
    "index_copy": (lambda x, y: x.index_copy(0, ROWS[:2], y[:2]), (SQUARE, SQUARE)),
    "index_put": (lambda x, y: x.index_put((ROWS,), y, accumulate=True), (SQUARE, SQUARE)),
    "setitem": (lambda x, y: x.clone().__setitem__(0, y[0]), (SQUARE, SQUARE)),
    "masked_scatter": (lambda x, y: x.masked_scatter(x > 0, y), (SQUARE, SQUARE)),
    "masked_fill": (lambda x, y: x.masked_fill(x > 0, y), (SQUARE, ())),
    "gather": (lambda x, i: x.gather(0, i), (SQUARE, SQUARE)),
    "index_select": (lambda x, i: x.index_select(0, i), (SQUARE, (3,))),
    "take": (torch.take, (SQUARE, (3,))),
    "getitem": (lambda x, i: x[i], (SQUARE, (3,))),
    "embedding": (F.embedding, ((3,), SQUARE)),
    "one_hot": (lambda i: F.one_hot(i, 4), ((3,),)),
    "attention": (attention, (SQUARE, SQUARE, SQUARE)),
    "grid_sample": (lambda x, g: F.grid_sample(x, g, align_corners=True), ((1, 1, 3, 3), (1, 2, 2, 2))),
    "cross_entropy": (F.cross_entropy, (SQUARE, (3,))),
    "cross_entropy_of_weights": (lambda x, w: F.cross_entropy(x, ROWS, w), (SQUARE, (3,))),
    "nll_loss": (F.nll_loss, (SQUARE, (3,))),
    "binary_cross_entropy": (lambda x, y: F.binary_cross_entropy(x.sigmoid(), y), (SQUARE, SQUARE)),
    "binary_cross_entropy_with_logits": (F.binary_cross_entropy_with_logits, (SQUARE, SQUARE)),
    "mse_loss": (F.mse_loss, (SQUARE, SQUARE)),
    "lstm": (lstm, (SQUARE, (1, 3), (12, 3))),
    "gru": (gru, (SQUARE, (1, 3), (12, 3))),
    "add_": (lambda x, y: x.clone().add_(y), (SQUARE, SQUARE)),
    "div_": (lambda x, y: x.clone().div_(y), (SQUARE, SQUARE)),
    "copy_": (lambda x, y: x.clone().copy_(y), (SQUARE, SQUARE)),
    "sub": (torch.sub, (SQUARE, SQUARE)),
    "softmax": (lambda x: torch.softmax(x, 0), (SQUARE,)),
    "gelu": (F.gelu, (SQUARE,)),
    "bitwise_and": (torch.bitwise_and, (SQUARE, SQUARE)),
    "topk": (lambda x: x.topk(2).values, (SQUARE,)),
    "cumsum": (lambda x: x.cumsum(0), (SQUARE,)),
    "cdist": (torch.cdist, (SQUARE, SQUARE)),
    "cross": (torch.linalg.cross, (SQUARE, SQUARE)),
    "complex": (torch.complex, (SQUARE, SQUARE)),
    "polar": (torch.polar, (SQUARE, SQUARE)),
    "solve": (lambda a, b: torch.linalg.solve(a + 3 * torch.eye(3), b), (SQUARE, SQUARE)),
}


def cases() -> list[tuple[str, tuple[torch.dtype, ...]]]:
    """Yield each function with int64 arguments only, and with one argument of another dtype than float32."""
    found = []
    for name, (_, shapes) in FUNCTIONS.items():
        combinations = {(torch.int64,) * len(shapes)}
        for i in range(len(shapes)):
            for dtype in (torch.bfloat16, torch.int64):
                combinations.add(tuple(dtype if i == j else torch.float32 for j in range(len(shapes))))
        found += [(name, dtypes) for dtypes in sorted(combinations, key=str)]
    return found


def example(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    fraction = 0.25 if dtype.is_floating_point else 0
    return (torch.from_numpy(np.random.default_rng(seed).integers(0, 2, shape)) * 0.5 + fraction).ceil().to(dtype)


def name_of(case: tuple[str, tuple[torch.dtype, ...]]) -> str:
    return "-".join([case[0], *(str(dtype).removeprefix("torch.") for dtype in case[1])])


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, of mixed dtypes
@pytest.mark.parametrize("case", cases(), ids=name_of)
def test_refused_dtypes_match_torch(case: tuple[str, tuple[torch.dtype, ...]]):
    name, dtypes = case
    function, shapes = FUNCTIONS[name]
    tensors = [example(shape, dtype, i) for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))]
    wrapped = jax.jit(jtbridge.wrap(function))
    try:
        expected = function(*tensors)
    except Exception:  # noqa: BLE001  (any refusal)
        with pytest.raises(Exception):  # noqa: B017
            wrapped(*map(to_jax, tensors))
    else:
        assert_matches(wrapped(*map(to_jax, tensors)), expected, 1e-2)


X, W = jnp.ones((3, 4)), jnp.ones((4, 5), jnp.bfloat16)


@pytest.mark.parametrize(
    "transformed",
    [
        jax.jit,
        lambda f: jax.jit(jax.grad(lambda x, w: f(x, w).sum())),
        lambda f: jax.jit(jax.vmap(f, (0, None))),
        lambda f: lambda x, w: jax.jvp(jax.jit(f), (x, w), (x, w)),
    ],
    ids=["jit", "grad", "vmap", "jvp"],
)
def test_error_names_both_dtypes(transformed: Callable[..., Any]):
    with pytest.raises(RuntimeError, match=r"same dtype.*float != c10::BFloat16"):
        transformed(jtbridge.wrap(lambda x, w: x @ w))(X[None], W)


def test_dtypes_of_large_tensors_are_refused():
    linear = jax.jit(jtbridge.wrap(F.linear))
    with pytest.raises(RuntimeError, match="same dtype"):
        linear(jnp.ones((2, 300, 512)), jnp.ones((512, 512), jnp.bfloat16))


def test_refused_dtypes_with_data_dependent_sizes():
    f = jax.jit(jtbridge.wrap(lambda x, w: (x[x[:, 0] > 0] @ w).sum(), islands="needed"))
    assert f(X, W.astype(jnp.float32)) == 60
    with pytest.raises(ShapeInferenceError, match="same dtype"):
        f(X, W)


def test_autocast_accepts_mixed_dtypes():
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return F.layer_norm(x @ w, (5,))

    assert jax.jit(jtbridge.wrap(f))(X, W).shape == (3, 5)


def test_a_narrow_dtype_without_a_kernel_is_computed():
    """Torch has no kernel of `cdist` for bfloat16 on a CPU, but has one on a GPU, and XLA has one."""
    x = jnp.ones((3, 2), jnp.bfloat16)
    assert jax.jit(jtbridge.wrap(torch.cdist))(x, x + 1).dtype == jnp.bfloat16


@pytest.mark.parametrize(
    "f",
    [
        lambda x: torch.complex(x, x).expand((2,) * 20) * 2,
        lambda x: torch.complex(x, x).expand((2,) * 10 + (1,) * 10) * x.expand((2,) * 10),
    ],
    ids=["argument", "result"],
)
def test_many_dimensions_allocate_no_memory(f: Callable[..., Any], monkeypatch: pytest.MonkeyPatch):
    """No dimension is long, so a run in smaller sizes would take as much memory as the program."""
    made = []
    full = torch.full
    monkeypatch.setattr(torch, "full", lambda size, *args, **kwargs: made.append(size) or full(size, *args, **kwargs))
    assert jax.eval_shape(jtbridge.wrap(f), jnp.ones(())).shape == (2,) * 20
    assert not [size for size in made if len(size) >= 10]


def test_dtypes_without_values():
    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x.view(torch.float4_e2m1fn_x2)] * 2).view(torch.uint8)

    with pytest.raises(TranslationError, match="which JAX does not have"):
        jax.jit(jtbridge.wrap(f, backend="xla"))(jnp.ones(3, jnp.uint8))


def test_large_out_gives_no_warning(recwarn: pytest.WarningsRecorder):
    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, x], out=torch.zeros(1 << 18, dtype=x.dtype))

    assert jax.eval_shape(jtbridge.wrap(f), jnp.ones(1 << 17, jnp.int32)).shape == (1 << 18,)
    assert not [warning for warning in recwarn if "resized" in str(warning.message)]


def test_writes_through_a_mask():
    def write(x, mask, values):
        x = x.clone()
        x[mask] = values
        return x

    x, mask = torch.zeros(2, 3, 4), torch.tensor([[True, False, True], [False, False, True]])
    wrapped = jax.jit(jtbridge.wrap(write, backend="xla"))
    for values in (torch.ones(3, 4), torch.ones(4), torch.tensor(1.0, dtype=torch.float64)):
        got = wrapped(to_jax(x), to_jax(mask), to_jax(values))
        np.testing.assert_array_equal(got, write(x, mask, values))
    with pytest.raises(RuntimeError, match="source and destination dtypes match"):
        write(x, mask, torch.ones(3, 4, dtype=torch.bfloat16))
    with pytest.raises(RuntimeError):
        wrapped(to_jax(x), to_jax(mask), jnp.ones((3, 4), jnp.bfloat16))


NUMBERS: dict[str, Callable[[torch.Tensor, Any], torch.Tensor]] = {
    "subtract": lambda x, number: x - number,
    "alpha": lambda x, number: torch.sub(x, x, alpha=number),
    "fill": lambda x, number: x.clone().fill_(number),
    "add_": lambda x, number: x.clone().add_(number),
    "clamp": lambda x, number: x.clamp(min=number),
    "lerp": lambda x, number: torch.lerp(x, x + x, number),
    "add": lambda x, number: x + number,
    "where": lambda x, number: torch.where(x == 1, x, number),
}


@pytest.mark.parametrize("number", [True, 1j])
@pytest.mark.parametrize("name", NUMBERS)
def test_booleans_and_complex_numbers_are_refused_as_in_torch(name, number):
    x = torch.tensor([[1.0, -2.0], [3.0, 4.0]])
    run = functools.partial(NUMBERS[name], number=number)
    wrapped = jax.jit(jtbridge.wrap(run, backend="xla"))
    try:
        expected = run(x)
    except (RuntimeError, NotImplementedError) as error:
        with pytest.raises((type(error), ShapeInferenceError), match=re.escape(str(error)[:40])):
            wrapped(to_jax(x))
    else:
        np.testing.assert_array_equal(wrapped(to_jax(x)), expected)


def test_one_value_of_another_dtype_is_only_written_through_a_mask():
    x = torch.tensor([True, False])
    with pytest.raises(RuntimeError, match="source and destination dtypes match"):
        jax.jit(jtbridge.wrap(lambda x, value: x.index_put((torch.tensor([0]),), value)))(to_jax(x), jnp.float32(2))
    write = jax.jit(jtbridge.wrap(lambda x, value: x.index_put((x,), value)))
    assert write(to_jax(x), jnp.float32(0)).tolist() == [False, False]


@pytest.mark.parametrize(
    "solve",
    [
        lambda matrix, pivots, b: torch.linalg.ldl_solve(matrix, pivots, b),
        lambda matrix, pivots, b: torch.linalg.lu_solve(matrix, pivots.int(), b),
        lambda matrix, pivots, b: torch.lu_unpack(matrix, pivots.int())[2] + b,
    ],
)
def test_no_operator_runs_on_example_pivots(solve, monkeypatch):
    run = []
    monkeypatch.setattr(refused_dtypes._Call, "error", lambda call, *_: run.append(call.func))
    jax.eval_shape(jtbridge.wrap(solve), jnp.eye(3), jnp.ones(3, jnp.int32), jnp.ones((3, 3)))
    assert not [func for func in run if "lu" in str(func) or "ldl" in str(func)]


# Functions with a number that is too large for a dtype: torch refuses some of them.
LARGE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "clamp": lambda x: x.half().clamp(max=1e6),
    "clamp_min": lambda x: x.half().clamp_min(-1e6),
    "fill_": lambda x: x.half().fill_(1e6),
    "full_like": lambda x: torch.full_like(x.half(), 1e6),
    "pad": lambda x: F.pad(x.half(), (1, 1), value=1e6),
    "hardtanh": lambda x: F.hardtanh(x.half(), -1e6, 1e6),
    "threshold": lambda x: F.threshold(x.half(), 1e6, -1e6),
    "alpha": lambda x: x.half().add(x.half(), alpha=1e6),
    "power": lambda x: x.half() ** 1e6,
    "hardshrink": lambda x: F.hardshrink(x.half(), 1e6),
    "elu": lambda x: F.elu(x.half(), 1e6),
    "lerp": lambda x: torch.lerp(x.half(), x.half(), 1e6),
    "addcmul": lambda x: torch.addcmul(x.half(), x.half(), x.half(), value=1e6),
    "nan_to_num": lambda x: torch.nan_to_num(x.half(), 0.0, 1e6, -1e6),
    "masked_fill": lambda x: x.half().masked_fill(x > 0, torch.finfo(torch.float32).min),
    "infinity": lambda x: x.half().masked_fill(x > 0, -torch.inf),
    "compared": lambda x: x.half() > 1e6,
    "product": lambda x: x.half() * 1e6,
    "quotient": lambda x: x.half() / 1e6,
    "integers selected": lambda x: torch.where(x > 0, x.to(torch.uint8), 300),
    "integers compared": lambda x: x.to(torch.uint8) > 300,
    "integers clamped": lambda x: x.to(torch.uint8).clamp(max=300),
    "wide integers clamped": lambda x: x.int().clamp(max=2**40),
    "integers full": lambda x: torch.full_like(x.int(), 2**31),
    "integers added": lambda x: x.to(torch.uint8) + 300,
    "integers shifted": lambda x: x.to(torch.int8) << 9,
    "integers filled": lambda x: x.to(torch.uint8).index_fill(0, torch.tensor([0]), 300),
}


@pytest.mark.parametrize("size", [2, 70000], ids=["small", "large"])
@pytest.mark.parametrize("name", LARGE)
def test_numbers_out_of_range_are_refused_as_in_torch(name: str, size: int):
    f, x = LARGE[name], torch.ones(size)
    try:
        want = f(x)
    except RuntimeError as refusal:
        with pytest.raises(type(refusal), match=re.escape(str(refusal)[:40])):
            jax.jit(jtbridge.wrap(f))(jtbridge.to_jax(x))
    else:
        assert_matches(jax.jit(jtbridge.wrap(f))(jtbridge.to_jax(x)), want)
