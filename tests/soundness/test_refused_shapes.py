"""Shapes, dimensions and numbers that torch refuses when it computes, and accepts on fake tensors, are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from torch.nn import functional as F

import jtbridge

X = jnp.ones((2, 2))
REFUSED: dict[str, Callable[[torch.Tensor], Any]] = {
    "addmm, bias of three dimensions": lambda x: torch.addmm(x[None], x, x),
    "addmm, bias of more rows": lambda x: torch.addmm(x, x[:1], x),
    "linear, bias of three dimensions": lambda x: F.linear(x, x, x[None]),
    "addmv, bias of two dimensions": lambda x: torch.addmv(x, x, x[0]),
    "bucketize, boundaries of two dimensions": lambda x: torch.bucketize(x, x),
    "cummax, no such dimension": lambda x: x[0, 0].cummax(-2),
    "softmax, no such dimension": lambda x: x.softmax(2),
    "log_softmax, no such dimension": lambda x: x.log_softmax(-3),
    "softmin, no such dimension": lambda x: F.softmin(x, 2),
    "cummin, no such dimension": lambda x: x[0, 0].cummin(1),
    "diagonal_scatter, source of other sizes": lambda x: x[None].diagonal_scatter(x[0]),
    "select_scatter, source of one element": lambda x: x.select_scatter(x[0, :1], 0, 1),
    "select_scatter, source of other dimensions": lambda x: x.select_scatter(x, 0, 1),
    "slice_scatter, source of one row": lambda x: x.slice_scatter(x[:1], 0, 0, 2),
    "slice_scatter, source without dimensions": lambda x: x.slice_scatter(x[0, 0], 1, 0, 2, 2),
    "index_select, index of two dimensions": lambda x: x.index_select(0, torch.tensor([[0]])),
    "index_select, two elements of one number": lambda x: x[0, 0].index_select(0, torch.tensor([0, 0])),
    "put, fewer values": lambda x: x.put(torch.tensor([0, 1]), x[0, :1]),
    "put_, fewer values": lambda x: x.clone().put_(torch.tensor([0, 1]), x[0, 0]),
    "mask of fewer rows": lambda x: x[torch.tensor([True])],
    "mask of one column": lambda x: x[torch.ones(2, 1, dtype=torch.bool)],
    "mask of fewer columns": lambda x: x[:, [True]],
    "write to a mask of fewer rows": lambda x: x.clone().index_put_((torch.tensor([True]),), x[0, 0]),
    "write to a mask of one column that depends on data": lambda x: x.clone().index_put_((x[:, :1] > 0,), x[0, 0]),
    "as_strided_scatter, past the end": lambda x: x.as_strided_scatter(x, (2, 2), (200, 200)),
    "multinomial, no samples": lambda x: torch.multinomial(x, 0),
    "multinomial, weights of integers": lambda x: torch.multinomial(x.long(), 1),
    "uniform, bounds in the wrong order": lambda x: torch.empty_like(x).uniform_(3, -1),
    "bernoulli, probability above 1": lambda x: torch.empty_like(x).bernoulli_(1.5),
}
ACCEPTED: dict[str, Callable[[torch.Tensor], Any]] = {
    "addmm, bias of one element": lambda x: torch.addmm(x[0, 0], x, x),
    "addmm, bias of one column": lambda x: torch.addmm(x[:, :1], x, x),
    "addmv, bias without dimensions": lambda x: torch.addmv(x[0, 0], x, x[0]),
    "cummax without dimensions": lambda x: x[0, 0].cummax(-1).values,
    "diagonal_scatter": lambda x: x.diagonal_scatter(x[0]),
    "mask behind an index": lambda x: x[None][torch.tensor([0]), :, [True, False]],
    "write to a mask": lambda x: torch.ops.aten.index_put(x, [None, x[0] > 0], x[0, 0] + 1),
    "select_scatter": lambda x: x.select_scatter(x[0] + 1, 1, -1),
    "slice_scatter": lambda x: x.slice_scatter(x[:1] + 1, 0, -1),
    "index_select of one number": lambda x: x[0, 0].index_select(0, torch.tensor([0])),
    "as_strided_scatter": lambda x: x.as_strided_scatter(x[0], (2,), (3,)),
    "as_strided_scatter of nothing": lambda x: x.as_strided_scatter(x[:0], (0, 2), (200, 200)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_shapes_refused_by_torch_are_refused(name: str):
    with pytest.raises((RuntimeError, IndexError)) as in_torch:
        REFUSED[name](torch.ones(2, 2))
    wrapped = jax.jit(jtbridge.wrap(REFUSED[name]))
    with pytest.raises((RuntimeError, IndexError)) as in_jax:
        wrapped(X, rng=jax.random.key(0))
    assert type(in_jax.value) is type(in_torch.value)
    assert str(in_jax.value).splitlines()[0] == str(in_torch.value).splitlines()[0]


@pytest.mark.parametrize("name", ACCEPTED)
def test_shapes_accepted_by_torch_are_accepted(name: str):
    expected = ACCEPTED[name](torch.ones(2, 2))
    assert jnp.array_equal(jax.jit(jtbridge.wrap(ACCEPTED[name]))(X), expected.numpy())
