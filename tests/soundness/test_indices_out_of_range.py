"""Indices for which torch raises: a compiled program cannot, so it gives NaN."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jtbridge

X = np.array([1.0, 2.0, 3.0, 4.0], np.float32)


@pytest.mark.parametrize(
    ("fn", "count"),
    [
        (lambda x, i: x.gather(0, i), 1),
        (lambda x, i: x.scatter(0, i, 5.0), 4),
        (lambda x, i: x.index_add(0, i, torch.ones(2)), 4),
        (lambda x, i: x.index_copy(0, i, torch.ones(2)), 4),
        (lambda x, i: torch.nn.functional.embedding(i, x[:, None]), 1),
    ],
)
@pytest.mark.parametrize("index", [-1, 4, -5])
def test_refused_indices_give_nan(fn: Callable[..., Any], count: int, index: int):
    got = jax.jit(jtbridge.wrap(fn, backend="xla"))(jnp.asarray(X), jnp.asarray([0, index]))
    with pytest.raises((IndexError, RuntimeError)):
        fn(torch.from_numpy(X.copy()), torch.tensor([0, index]))
    assert int(jnp.isnan(got).sum()) == count


def test_every_index_of_an_empty_axis_is_out_of_range():
    f = jtbridge.wrap(lambda x, i: x.gather(0, i), backend="xla")
    np.testing.assert_array_equal(jax.jit(f)(jnp.ones((0, 2)), jnp.zeros((3, 2), int)), np.full((3, 2), np.nan))


@pytest.mark.parametrize("by", ["auto", "xla", "dlpack"])
@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x.max(),
        lambda x: x.min(),
        lambda x: x.argmax(),
        lambda x: x.amax(),
        lambda x: x.amin(1),
        lambda x: x.median(1).values,
        lambda x: x.max(1).values,
        lambda x: (x + 1).T.max() * 2,
        lambda x: (x > 0).max(),
    ],
)
def test_extremes_of_an_empty_tensor_are_refused(fn: Callable[..., Any], by: str):
    refusal = r"reduction dim|non-zero size"
    with pytest.raises((RuntimeError, IndexError), match=refusal):
        fn(torch.ones(3, 0))
    with pytest.raises(Exception, match=refusal):
        jax.jit(jtbridge.wrap(fn, backend=by))(jnp.ones((3, 0)))


def test_reductions_defined_for_empty_tensors():
    f = jtbridge.wrap(
        lambda x: (x.sum(), x.prod(), x.max(0).values, (x > 0).all(), x[:, :0].reshape(0).as_strided((0,), (1,)))
    )
    for got, want in zip(jax.jit(f)(jnp.ones((3, 0))), f(jnp.ones((3, 0))), strict=True):
        np.testing.assert_array_equal(got, want)
