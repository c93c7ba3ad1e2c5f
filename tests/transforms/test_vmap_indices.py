"""Batches of writes at indices, where torch.vmap's own rule is wrong or raises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
import torch

import jtbridge

FIRST, SECOND = torch.tensor([1, 0]), torch.tensor([0, 1])


def _write(y: torch.Tensor, index: Any, value: Any) -> torch.Tensor:
    y[index] = value
    return y


def _add(y: torch.Tensor, index: Any, value: Any) -> torch.Tensor:
    y[index] += value
    return y


# The function of a row, and the shapes of a row's tensor and of the value.
CASES: dict[str, tuple[Callable[..., torch.Tensor], tuple[int, ...], tuple[int, ...]]] = {
    "behind a slice": (lambda y, i, v: _write(y, (slice(None), i), v), (2, 2), (2, 2)),
    "added behind a slice": (lambda y, i, v: _add(y, (slice(None), i), v), (2, 2), (2, 2)),
    "behind an ellipsis": (lambda y, i, v: _write(y, (..., i), v), (2, 2), (2, 2)),
    "behind a number and a slice": (lambda y, i, v: _write(y, (0, slice(None), i), v), (2, 2, 2), (2, 2)),
    "before a slice": (lambda y, i, v: _write(y, (slice(None), i, slice(1, 3)), v[:, :, None]), (2, 2, 4), (2, 2)),
    "two behind a slice": (lambda y, i, v: _write(y, (slice(None), i, i), v), (2, 3, 4), (2, 2)),
    "apart": (lambda y, i, v: _write(y, (FIRST, slice(None), SECOND), v), (2, 3, 2), (2, 3)),
    "apart, added": (lambda y, i, v: _add(y, (i, slice(1, None), SECOND), v[:, :1]), (2, 3, 4), (2, 2)),
    "a list": (lambda y, i, v: _write(y, (slice(None), [1, 0]), v), (2, 2), (2, 2)),
    "index_put_": (lambda y, i, v: torch.ops.aten.index_put_(y, [None, i], v), (2, 2), (2, 2)),
    "index_put": (lambda y, i, v: torch.ops.aten.index_put(y, [None, i], v, True), (2, 2), (2, 2)),
    "first": (lambda y, i, v: _write(y, i, v), (2, 2), (2, 2)),
}


@pytest.mark.filterwarnings("ignore::jtbridge.errors.SequentialVmapWarning")
@pytest.mark.parametrize("axes", [(0, 0, None), (0, 0, 0), (0, None, None), (0, None, 0), (None, 0, 0)])
@pytest.mark.parametrize("name", CASES)
def test_a_batched_write(name, axes):
    fn, of_row, of_value = CASES[name]
    draw = np.random.default_rng(0)
    rows = [
        draw.standard_normal((*([3] if axes[0] == 0 else []), *of_row)).astype(np.float32),
        np.array([[1, 0], [0, 1], [1, 0]]) if axes[1] == 0 else np.array([1, 0]),
        draw.standard_normal((*([3] if axes[2] == 0 else []), *of_value)).astype(np.float32),
    ]
    want = np.stack(
        [fn(*(torch.tensor(x if axis is None else x[i]) for x, axis in zip(rows, axes, strict=True))) for i in range(3)]
    )
    for backend in ("auto", "dlpack"):
        f = jtbridge.wrap(fn, backend=backend)
        np.testing.assert_array_equal(jax.vmap(f, in_axes=axes)(*rows), want)
        np.testing.assert_array_equal(jax.jit(jax.vmap(f, in_axes=axes))(*rows), want)
    got = jax.vmap(jax.grad(lambda y, i, v: (jtbridge.wrap(fn)(y, i, v) ** 2).sum()), in_axes=axes)(*rows)
    expected = [
        torch.func.grad(lambda y, i, v: (fn(y.clone(), i, v) ** 2).sum())(
            *(torch.tensor(x if axis is None else x[j]) for x, axis in zip(rows, axes, strict=True))
        )
        for j in range(3)
    ]
    np.testing.assert_allclose(got, np.stack(expected), rtol=1e-6)
