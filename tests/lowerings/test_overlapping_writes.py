"""Writes to a part of a tensor of values that are computed from the overwritten part."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jtbridge

X = np.arange(1, 17, dtype=np.float32)


def shifted(s: torch.Tensor) -> None:
    s[1:] = s[:-1].clone()


def shifted_back(s: torch.Tensor) -> None:
    s[:-1] = s[1:].clone()


def shifted_in_rows(s: torch.Tensor) -> None:
    s[:, 1:] = s[:, :-1].clone()


def combined(s: torch.Tensor) -> None:
    s[1:3] = s[:2] - 2 * s[2:]


def accumulated(s: torch.Tensor) -> None:
    s[1:].add_(s[:-1].clone())


def flipped(s: torch.Tensor) -> None:
    s[1:4] = s[1:4].flip(0)


def rolled_row(s: torch.Tensor) -> None:
    s[2] = s[2].roll(1)


def flipped_columns(s: torch.Tensor) -> None:
    s[:, 0] = s[:, 0].flip(0)


def every_other(s: torch.Tensor) -> None:
    s[1::2] = s[::2].clone()


def by_index(s: torch.Tensor) -> None:
    s[torch.tensor([1, 2, 3])] = s[torch.tensor([0, 1, 2])]


def by_mask(s: torch.Tensor) -> None:
    s[:, torch.tensor([False, True, True, True])] = s[:, :3].clone()


def diagonal(s: torch.Tensor) -> None:
    s.diagonal()[1:] = s.diagonal()[:-1].clone()


WRITES = [
    shifted,
    shifted_back,
    shifted_in_rows,
    combined,
    accumulated,
    flipped,
    rolled_row,
    flipped_columns,
    every_other,
    by_index,
    by_mask,
    diagonal,
]


def scaled(x: torch.Tensor) -> torch.Tensor:
    return (x * 3).view(4, 4)


def written(x: torch.Tensor) -> torch.Tensor:
    y = x * 3
    y.as_strided((2,), (1,)).mul_(torch.tensor([2.0, 5.0]))
    return y.view(4, 4)


def sorted_(x: torch.Tensor) -> torch.Tensor:
    return x.sin().sort().values.view(4, 4)


@pytest.mark.filterwarnings("ignore::jtbridge.errors.SequentialVmapWarning")
@pytest.mark.parametrize("start", [scaled, written, sorted_])
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("times", [1, 2])
def test_every_kind_of_write(
    times: int, write: Callable[[torch.Tensor], None], start: Callable[[torch.Tensor], torch.Tensor]
):
    def fn(x: torch.Tensor) -> torch.Tensor:
        s = start(x)
        for _ in range(times):
            write(s)
        return s

    f = jtbridge.wrap(fn, backend="xla")
    expected = fn(torch.tensor(X)).numpy()
    np.testing.assert_allclose(jax.jit(f)(X), expected, rtol=1e-6)
    rows = np.stack([X, X[::-1] - 3])
    batched = jax.jit(jax.vmap(f))(rows)
    np.testing.assert_allclose(batched, [fn(torch.tensor(row)).numpy() for row in rows.copy()], rtol=1e-6)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return (fn(x).sin() * torch.arange(16.0).view(4, 4)).sum()

    x = torch.tensor(X, requires_grad=True)
    (gradient,) = torch.autograd.grad(loss(x), x)
    got = jax.jit(jax.grad(jtbridge.wrap(loss, backend="xla")))(X)
    np.testing.assert_allclose(got, gradient.numpy(), rtol=2e-5, atol=1e-4)


def test_by_strides():
    def fn(x: torch.Tensor) -> torch.Tensor:
        s = x * 3
        s.as_strided((12,), (1,), 4).copy_(s.as_strided((12,), (1,), 0).clone())
        return s.view(4, 4)

    np.testing.assert_array_equal(jax.jit(jtbridge.wrap(fn, backend="xla"))(X), fn(torch.tensor(X)))


@pytest.mark.filterwarnings("ignore::jtbridge.errors.SequentialVmapWarning")
@pytest.mark.parametrize("axes", [(0, None), (None, 0), (1, 0)])
def test_batches_of_one_argument(axes: tuple[int | None, int | None]):
    def fn(x: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        x[1] = row
        x[:, 2:] = x[:, :2] * 2
        return x

    rng = np.random.default_rng(0)
    x = rng.normal(size={0: (3, 4, 4), 1: (4, 3, 4), None: (4, 4)}[axes[0]]).astype(np.float32)
    row = rng.normal(size=(3, 4) if axes[1] == 0 else 4).astype(np.float32)
    got = jax.jit(jax.vmap(jtbridge.wrap(fn, backend="xla"), in_axes=axes))(x, row)
    for i in range(3):
        one = x if axes[0] is None else np.take(x, i, axes[0])
        other = row if axes[1] is None else row[i]
        np.testing.assert_array_equal(got[i], fn(torch.tensor(one), torch.tensor(other)))


def test_exported():
    def fn(x: torch.Tensor) -> torch.Tensor:
        s = scaled(x)
        shifted(s)
        return s

    program = jax.export.export(jax.jit(jtbridge.wrap(fn, backend="xla")))(jnp.asarray(X))
    assert "custom_call" not in program.mlir_module()
    loaded = jax.export.deserialize(program.serialize())
    np.testing.assert_array_equal(loaded.call(jnp.asarray(X)), fn(torch.tensor(X)))
