"""Functions that torch cannot trace because they read values: called as they are, on copies of their arguments."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jtbridge
from jtbridge.capture import _watchdog
from jtbridge.errors import DataDependentShapeError, MutationError, SequentialVmapWarning, ShapeInferenceError

from . import reference
from .compare import assert_matches

ROWS = np.array([[0.5, -0.25, 1.0], [-2.0, 0.5, 0.25]], np.float32)


def item(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x) * x.sum().item()


def branch(x: torch.Tensor) -> torch.Tensor:
    return x**2 if x.sum() > 0 else x**3


def loop(x: torch.Tensor) -> torch.Tensor:
    while x.abs().max() > 0.1:
        x = x * 0.5
    return x


def through_numpy(x: torch.Tensor) -> torch.Tensor:
    return x * float(np.median(x.detach().numpy())) + torch.exp(x)


def python_index(x: torch.Tensor) -> torch.Tensor:
    return x[int(x.argmax())] * x


OPAQUE: list[Callable[..., Any]] = [item, branch, loop, through_numpy, python_index]


def gradient(fn: Callable, row: np.ndarray) -> torch.Tensor:
    x = torch.from_numpy(row.copy()).requires_grad_()
    return torch.autograd.grad((fn(x) ** 2).sum(), x)[0]


@pytest.fixture(params=OPAQUE, ids=lambda fn: fn.__name__)
def fn(request: pytest.FixtureRequest) -> Callable[..., Any]:
    return request.param


@pytest.mark.parametrize("jit", [False, True])
def test_value(fn: Callable, jit: bool, backend: str):
    f = jtbridge.wrap(fn)
    f = jax.jit(f) if jit else f
    for row in ROWS:  # the rows take different branches
        x = jnp.asarray(row)
        assert_matches(f(x), fn(torch.from_numpy(row.copy())))
        assert x.tolist() == row.tolist()


@pytest.mark.parametrize("jit", [False, True])
def test_gradient(fn: Callable, jit: bool, backend: str):
    f = jtbridge.wrap(fn)
    run = jax.grad(lambda x: (f(x) ** 2).sum())
    run = jax.jit(run) if jit else run
    for row in ROWS:
        x = jnp.asarray(row)
        assert_matches(run(x), gradient(fn, row))
        assert x.tolist() == row.tolist()


def test_jvp(fn: Callable, backend: str):
    f = jtbridge.wrap(fn)
    tangent = np.array([1.0, 2.0, -1.0], np.float32)
    for row in ROWS:
        expected = reference.jvp(lambda x: [fn(x)], [torch.from_numpy(row.copy())], [torch.from_numpy(tangent)])
        value, moved = jax.jit(lambda x, dx: jax.jvp(f, (x,), (dx,)))(jnp.asarray(row), jnp.asarray(tangent))
        assert_matches(value, fn(torch.from_numpy(row.copy())))
        assert_matches(moved, expected[0])


def test_vmap_runs_row_by_row_and_gives_one_warning(fn: Callable, backend: str):
    f = jax.vmap(jtbridge.wrap(fn))
    rows = jnp.asarray(ROWS)
    expected = torch.stack([fn(torch.from_numpy(row.copy())) for row in ROWS])
    with pytest.warns(SequentialVmapWarning, match=re.escape(f"torch.vmap cannot batch `{fn.__name__}` (")):
        assert_matches(f(rows), expected)
    assert_matches(jax.jit(f)(rows), expected)  # a second warning would be an error
    assert rows.tolist() == ROWS.tolist()


@pytest.mark.filterwarnings("ignore::jtbridge.errors.SequentialVmapWarning")
def test_vmap_of_the_gradient_and_gradient_of_the_vmap(fn: Callable, backend: str):
    f = jtbridge.wrap(fn)
    rows, expected = jnp.asarray(ROWS), torch.stack([gradient(fn, row) for row in ROWS])
    assert_matches(jax.jit(jax.vmap(jax.grad(lambda x: (f(x) ** 2).sum())))(rows), expected)
    assert_matches(jax.jit(jax.grad(lambda rows: (jax.vmap(f)(rows) ** 2).sum()))(rows), expected)


@pytest.mark.filterwarnings("ignore::jtbridge.errors.SequentialVmapWarning")
def test_hessian(backend: str, x64: None):
    f = jtbridge.wrap(lambda x: branch(x).sum())
    for row in ROWS.astype(float):
        (expected,) = reference.hessian(lambda x: branch(x).sum(), [torch.from_numpy(row)])[0]
        assert_matches(jax.jit(jax.hessian(f))(jnp.asarray(row)), expected)


def test_scan(backend: str):
    f = jtbridge.wrap(branch)
    last, _ = jax.jit(lambda x: jax.lax.scan(lambda x, _: (f(x), None), x, None, length=3))(jnp.asarray(ROWS[0]))
    assert_matches(last, branch(branch(branch(torch.from_numpy(ROWS[0].copy())))))


def test_output_shapes_replace_the_run_on_zeros(backend: str):
    """The shape depends on the number of ones, so a run on zeros would report a wrong shape."""
    calls = []

    def take(x: torch.Tensor) -> dict[str, torch.Tensor]:
        calls.append(x.detach().numpy().tolist())
        return {"ones": x[x > 0.5], "first": x[: int(x[0].item())]}

    shapes = {"ones": jax.ShapeDtypeStruct((2,), jnp.float32), "first": jax.ShapeDtypeStruct((1,), jnp.float32)}
    f = jtbridge.wrap(take, output_shapes=shapes)
    found = jax.jit(f)(jnp.array([1.0, 0.0, 1.0]))
    assert_matches(found, {"ones": torch.ones(2), "first": torch.ones(1)})
    assert [0.0, 0.0, 0.0] not in calls
    assert_matches(jax.grad(lambda x: (f(x)["ones"] ** 2).sum())(jnp.array([1.0, 0.0, 1.0])), torch.tensor([2.0, 0, 2]))


def test_python_and_numpy_results_depend_on_the_data(backend: str):
    def f(x: torch.Tensor) -> tuple[Any, ...]:
        total = x.sum().item()
        return total, total > 1, int(total), x.numpy() * 2, np.float32(total)

    expected = (torch.tensor(3.0), torch.tensor(True), torch.tensor(3), torch.tensor([2.0, 4.0]), torch.tensor(3.0))
    assert_matches(jax.jit(jtbridge.wrap(f))(jnp.array([1.0, 2.0])), expected)


def test_writes_do_not_change_arguments(backend: str):
    """Torch does not see writes through NumPy, so an untraceable function always gets copies."""

    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if x.sum().item() > 0:
            x.numpy()[:] = 7
            y.detach().view(-1).numpy()[0] = 8
        return x + y

    wrapped = jtbridge.wrap(f)
    x, y = jnp.ones(2), jnp.zeros(2)
    for run in (wrapped, jax.jit(wrapped), jax.jit(lambda x, y: (wrapped(x, y), x + y)[0])):
        assert run(x, y).tolist() == [15, 7]
        assert (x.tolist(), y.tolist()) == ([1, 1], [0, 0])


def test_gradient_of_a_linear_function_is_batched(backend: str):
    """Its backward reads no row, but it must not run row by row: a warning would be an error."""
    f = jtbridge.wrap(lambda x: (x * 2).sum())
    assert jax.vmap(jax.grad(f))(jnp.ones((2, 3))).tolist() == [[2] * 3] * 2
    assert jax.jit(jax.vmap(jax.grad(f)))(jnp.ones((2, 3))).tolist() == [[2] * 3] * 2


def test_loop_that_never_ends_for_example_arguments_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_watchdog, "SECONDS", 1.0)

    def f(x):
        array = x.numpy()
        while array[0] != 10:
            with contextlib.suppress(Exception):  # user code cannot catch the exception that ends the run
                array = array * 1
        return x

    x = jnp.full(2, 10.0)
    assert jtbridge.wrap(f)(x).tolist() == [10, 10]
    with pytest.raises(ShapeInferenceError, match=r"it runs for 1 s without calling torch, and may not end"):
        jax.jit(jtbridge.wrap(f))(x)
    assert jtbridge.purity(torch.sin, x).findings == ()  # `purity` still works on a thread whose run was interrupted
    declared = jtbridge.wrap(f, backend="dlpack", output_shapes=jax.ShapeDtypeStruct((2,), jnp.float32))
    assert jax.jit(declared)(x).tolist() == [10, 10]


def test_a_long_call_of_a_compiled_library_is_not_ended(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_watchdog, "SECONDS", 0.2)

    def f(x):
        array = x.numpy()
        time.sleep(0.5)
        return torch.from_numpy(array * 2)

    assert jax.jit(jtbridge.wrap(f, backend="dlpack"))(ROWS).tolist() == (ROWS * 2).tolist()


def test_the_watchdog_does_not_outlive_its_block():
    """Garbage that its thread collected at the end of the process aborted the process."""
    for _ in range(20):
        with _watchdog.aborted_if_stuck(lambda: 0):
            pass
        assert "jtbridge-watchdog" not in [thread.name for thread in threading.enumerate()]


@pytest.mark.filterwarnings("ignore::jtbridge.errors.CalledWarning")
@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x * len(repr(x)),
        lambda x: x * len(str(x + 1)),
        lambda x: x * len(f"{x}, {x.sum()}"),
        lambda x: x * len(f"{x.sum()}"),
        lambda x: x * len(str([x])),
        lambda x: x * len(str(torch.arange(3))),
        lambda x: x if "5" in str(x) else -x,
        lambda x: (x if x.sum() > 0 else x + 1) * len(str(x)),
        lambda x: x[x > 0].sum() * len(str(x)),
    ],
)
def test_the_text_of_a_tensor_shows_values(fn):
    f = jtbridge.wrap(fn)
    for row in ROWS:
        np.testing.assert_allclose(jax.jit(f)(row), f(row), rtol=1e-6)


def test_tensor_text_as_a_result_key_is_refused():
    f = jtbridge.wrap(lambda x: {str(x): x})
    assert list(f(jnp.ones(2))) == ["tensor([1., 1.])"]
    with pytest.raises(DataDependentShapeError, match="for some values only"):
        jax.jit(f)(jnp.ones(2))


def test_stored_tensor_text_is_state():
    seen = set()
    with pytest.raises(MutationError, match="seen"):
        jax.jit(jtbridge.wrap(lambda x: (seen.add(str(x)), x)[1]))(jnp.ones(2))


def test_printed_tensor_text_does_not_prevent_tracing(capsys):
    @jtbridge.wrap
    def f(x):
        print(f"x is {x}")  # noqa: T201
        return x * 2

    report = jtbridge.explain(f, ROWS)
    assert report.backend == "xla"
    jax.jit(f)(ROWS)
    assert "x is FakeTensor(..., size=(2, 3))" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore::jtbridge.errors.CalledWarning")
def test_comparison_of_tensor_memory():
    """Tensors without values have no memory to compare, so torch runs the function."""
    f = jtbridge.wrap(lambda x: x * 2 if x.is_set_to(x.view(-1)) and not x.is_set_to(x[1:]) else x * 3)
    x = jnp.arange(1.0, 4.0)
    assert_matches(f(x), torch.tensor([2.0, 4.0, 6.0]))
    assert_matches(jax.jit(f)(x), torch.tensor([2.0, 4.0, 6.0]))
    assert_matches(jax.jit(jax.grad(lambda x: f(x).sum()))(x), torch.full((3,), 2.0))
