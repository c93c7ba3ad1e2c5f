"""vmap: nested, over any axes in and out, with arguments that are not batched; against a loop in torch."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jtbridge
from tests.compare import assert_matches

from . import functions
from .problem import ALL, Problem, tensor

ROWS = 3

# torch.vmap refuses to write batched values into an unbatched tensor, so these run row by row.
WRITES_ROWS_INTO_UNBATCHED = ["cross_entropy", "in_place_inside", "in_place_on_argument"]


class Batch:
    """Rows of arguments for one case: `axes` has the batch axis of each array leaf, or None."""

    def __init__(self, name: str, axes: Any):
        problems = [Problem(name, seed) for seed in range(ROWS)]
        self.problem = problems[0]
        arrays = [i for i, leaf in enumerate(self.problem.leaves) if isinstance(leaf, np.ndarray)]
        self.axes = {i: axes(number, self.problem.leaves[i].ndim) for number, i in enumerate(arrays)}
        if all(axis is None for axis in self.axes.values()):
            self.axes[arrays[0]] = 0
        self.columns = {
            i: self.problem.leaves[i] if axis is None else np.stack([p.leaves[i] for p in problems], axis)
            for i, axis in self.axes.items()
        }

    def run(self, out_axes: Any = 0) -> list[jax.Array]:
        """Return the array results of one vmapped call."""

        def one(columns: dict[int, Any]) -> list[Any]:
            out = self.problem.wrapped(*self.problem.tree.unflatten(self._leaves(columns)))
            return [y for y in jax.tree.leaves(out) if isinstance(y, jax.Array)]

        columns = {i: jnp.asarray(x) for i, x in self.columns.items()}
        return jax.vmap(one, in_axes=(self.axes,), out_axes=out_axes)(columns)

    def expected(self, out_axis: int = 0) -> list[torch.Tensor]:
        rows = []
        for row in range(ROWS):
            columns = {i: x if self.axes[i] is None else np.take(x, row, self.axes[i]) for i, x in self.columns.items()}
            out = jax.tree.leaves(self.problem.torch_result(self._leaves(columns)))
            rows.append([y for y in out if isinstance(y, torch.Tensor)])
        return [torch.stack(column, out_axis) for column in zip(*rows, strict=True)]

    def _leaves(self, columns: dict[int, Any]) -> list[Any]:
        return [columns.get(i, leaf) for i, leaf in enumerate(self.problem.leaves)]


@pytest.mark.parametrize("name", ALL)
def test_first_axis(name: str, backend: str):
    batch = Batch(name, lambda number, ndim: 0)
    with batch.problem.batching():
        out = batch.run()
    assert_matches(out, batch.expected())


@pytest.mark.parametrize("name", ALL)
def test_mixed_axes_under_jit(name: str, x64: None):
    """Batch axes are the last or the first axis, or missing; the rows of the results are last."""
    batch = Batch(name, lambda number, ndim: [ndim, None, 0][number % 3])
    with batch.problem.batching():
        out = jax.jit(lambda: batch.run(out_axes=-1))()
    assert_matches(out, batch.expected(-1))


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("backend", ["dlpack", "xla"], indirect=True)
def test_only_the_last_argument_is_batched(name: str, backend: str, x64: None):
    leaves = sum(isinstance(leaf, np.ndarray) for leaf in Problem(name).leaves)
    batch = Batch(name, lambda number, ndim: 0 if number == leaves - 1 else None)
    if name in WRITES_ROWS_INTO_UNBATCHED and backend == "dlpack":
        with pytest.warns(jtbridge.errors.SequentialVmapWarning, match="vmap: inplace arithmetic"):
            out = batch.run()
    else:
        with batch.problem.batching():
            out = batch.run()
    assert_matches(out, batch.expected())


@pytest.mark.parametrize("outer", [0, 1, 2, -1])
@pytest.mark.parametrize("inner", [0, 1, -1])
def test_nested(outer: int, inner: int, backend: str, rng: np.random.Generator):
    f = jtbridge.wrap(lambda x, y: torch.cumsum(x, 0) * y)
    x, y = rng.normal(size=(2, 3, 4)).astype(np.float32), np.float32(1.5)
    twice = jax.vmap(jax.vmap(f, in_axes=(inner, None)), in_axes=(outer, None))
    got = jax.jit(twice)(jnp.asarray(x), jnp.asarray(y))
    rows = np.moveaxis(np.moveaxis(x, outer, 0), inner if inner < 0 else inner + 1, 1)
    assert_matches(got, torch.cumsum(tensor(rows), 2) * 1.5)


def test_three_deep_with_different_arguments(backend: str, rng: np.random.Generator):
    f = jtbridge.wrap(lambda x, y, z: torch.outer(x, y) * z)
    x, y, z = (rng.normal(size=s).astype(np.float32) for s in [(2, 3), (4, 2), (5,)])
    outer = jax.vmap(jax.vmap(jax.vmap(f, in_axes=(None, None, 0)), in_axes=(None, 0, None)), in_axes=(0, None, None))
    got = jax.jit(outer)(jnp.asarray(x), jnp.asarray(y), jnp.asarray(z))
    assert_matches(got, torch.einsum("ai,bj,c->abcij", tensor(x), tensor(y), tensor(z)))


def test_function_without_batched_arguments_is_called_once(backend: str):
    """A vmap whose rows do not reach the function calls it once, unbatched."""
    f = jtbridge.wrap(torch.sin)
    x = jnp.ones(3)
    got = jax.vmap(lambda row: row + f(x))(jnp.zeros((2, 3)))
    assert_matches(got, torch.sin(torch.ones(2, 3)))


@pytest.mark.parametrize("jit", [False, True])
def test_no_rows(jit: bool, backend: str):
    f = jax.vmap(jtbridge.wrap(lambda x: (torch.sin(x), x.argmax())))
    out = (jax.jit(f) if jit else f)(jnp.zeros((0, 3)))
    assert_matches(out, (torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64)))


def test_one_row(backend: str):
    got = jax.vmap(jtbridge.wrap(lambda x: x.sum()))(jnp.ones((1, 3)))
    assert_matches(got, torch.tensor([3.0]))


def test_spmd_axis_and_axis_size(backend: str):
    f = jtbridge.wrap(torch.sin)
    got = jax.vmap(f, in_axes=0, axis_size=2)(jnp.zeros((2, 3)))
    assert got.shape == (2, 3)


def test_result_that_does_not_depend_on_the_row(backend: str):
    f = jtbridge.wrap(lambda x: torch.arange(3.0))
    assert_matches(jax.vmap(f)(jnp.zeros((2, 4))), torch.arange(3.0).expand(2, 3))


@pytest.mark.parametrize("backend", ["dlpack", "callback"], indirect=True)
def test_sequential_rows_give_one_warning(backend: str):
    f = jtbridge.wrap(lambda x: functions.TripledGradient.apply(x))
    with pytest.warns(jtbridge.errors.SequentialVmapWarning, match="its rows run one after another"):
        first = jax.vmap(f)(jnp.arange(3.0))
    second = jax.vmap(f)(jnp.arange(3.0))  # a second warning would be an error
    assert first.tolist() == second.tolist() == [0, 1, 4]


def test_error_of_a_row_is_raised_unchanged(backend: str):
    def fail(x):
        if x.shape == (2,):
            raise ValueError("no such row")
        return x

    with pytest.raises(ValueError, match="no such row"):
        jax.vmap(jtbridge.wrap(fail))(jnp.zeros((3, 2)))


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_rows_are_as_contiguous_as_arguments(axis: int, backend: str):
    """A function may rely on the memory layout of its argument: every row looks like a whole JAX array."""
    f = jtbridge.wrap(lambda x: (x.view(-1), torch.view_as_complex(x)))
    x = np.arange(8.0, dtype=np.float32).reshape(2, 2, 2)
    rows = tensor(np.ascontiguousarray(np.moveaxis(x, axis, 0)))
    expected = (rows.reshape(2, -1), torch.view_as_complex(rows))
    assert_matches(jax.vmap(f, in_axes=axis)(jnp.asarray(x)), expected)


def test_a_called_batch_is_one_graph_unless_an_operator_has_no_batching_rule():
    runs = []

    def ruled(x: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        return torch.tanh(x).sum()

    def unruled(x: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        return torch.renorm(x, 2, 0, 1.0)

    xs = jnp.arange(240.0).reshape(40, 2, 3)
    for fn, expected in ((ruled, 0), (unruled, 1)):
        f = jax.jit(jax.vmap(jtbridge.wrap(fn, backend="dlpack", purity="allow")))
        got = f(xs)
        runs.clear()
        np.testing.assert_array_equal(f(xs), got)
        assert len(runs) == expected
        np.testing.assert_allclose(got, np.stack([fn(torch.tensor(np.array(x))).numpy() for x in xs]), rtol=1e-6)


@pytest.mark.parametrize("name", ["number", "branch", "guarded"])
def test_caught_errors(name: str):
    """Torch.vmap raises an error that the function catches. The batch must equal the rows, where none is raised."""

    def number(x: torch.Tensor) -> torch.Tensor:
        try:
            total = float(x.sum())
        except Exception:  # noqa: BLE001
            total = 0.0
        return x * total

    def branch(x: torch.Tensor) -> torch.Tensor:
        try:
            return x * 2 if x.sum() > 0 else x * 3
        except RuntimeError:
            return x * 7

    def guarded(x: torch.Tensor) -> torch.Tensor:
        try:
            return x[:2] * torch.as_strided(x.flip(0), (2,), (1,), 1)
        except Exception:  # noqa: BLE001
            return x[:2] * 0

    function = {"number": number, "branch": branch, "guarded": guarded}[name]
    rows = np.array([[0.5, -1.0, 2.0], [1.0, -3.0, 0.25]], np.float32)
    wrapped = jtbridge.wrap(function)
    tensors = [torch.tensor(row, requires_grad=True) for row in rows]
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # rows one after another; torch's, of numbers from tensors that require gradients
        results = [function(x) for x in tensors]
        found = jax.vmap(wrapped)(rows), jax.vmap(jax.grad(lambda x: wrapped(x).sum()))(rows)
    gradients = [torch.autograd.grad(y.sum(), x)[0] for x, y in zip(tensors, results, strict=True)]
    for have, want in zip(found, [results, gradients], strict=True):
        np.testing.assert_allclose(have, torch.stack(want).detach(), rtol=1e-6)


@pytest.mark.filterwarnings("ignore::jtbridge.errors.SequentialVmapWarning")
@pytest.mark.parametrize("backend", ["auto", "xla", "dlpack"])
def test_the_number_of_writes_to_a_tensor(backend: str):
    def f(x):
        y = x * 1
        before = y._version
        y.add_(1)
        return y * (y._version - before)

    rows = jnp.arange(6.0).reshape(3, 2)
    np.testing.assert_array_equal(jax.vmap(jtbridge.wrap(f, backend=backend))(rows), rows + 1)
