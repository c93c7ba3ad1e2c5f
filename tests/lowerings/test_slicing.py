"""Slices, selections and diagonals, and their `_scatter` and gradient forms."""

import pytest
import torch

from .harness import check

_SLICES = [
    (0, None, None, 1),
    (-1, -3, None, 1),
    (1, 1, -1, 2),
    (1, 3, 100, 3),
    (1, -100, 2, 1),
    (1, 4, 2, 1),
    (1, 0, 5, 4),
    (1, 0, 3, 2),
    (1, 0, 2, 2),
]


@pytest.mark.parametrize("where", _SLICES)
def test_slice_and_its_gradient(where):
    dim, start, end, step = where
    check(lambda x: torch.ops.aten.slice.Tensor(x, dim, start, end, step), torch.randn(3, 5), grad=True)


@pytest.mark.parametrize("where", _SLICES)
def test_slice_scatter(where):
    x = torch.randn(3, 5)
    part = torch.randn(torch.ops.aten.slice.Tensor(x, *where).shape)
    check(lambda x, y: torch.slice_scatter(x, y, *where), x, part, grad=True)


@pytest.mark.parametrize("index", [0, 2, -1, -3])
@pytest.mark.parametrize("dim", [0, -1])
def test_select_and_select_scatter(dim, index):
    x = torch.randn(3, 4)
    check(lambda x: x.select(dim, index), x, grad=True)
    check(lambda x, y: x.select_scatter(y, dim, index), x, torch.randn(x.select(dim, 0).shape), grad=True)


@pytest.mark.parametrize("start", [1, -3])
def test_narrow_copy(start):
    check(lambda x: torch.narrow_copy(x, -1, start, 2), torch.randn(2, 5))


@pytest.mark.parametrize("shape", [(3, 5), (5, 3), (2, 4, 3)])
@pytest.mark.parametrize("offset", [0, 1, 2, -1, -2, 7, -7])
def test_diagonal_and_diagonal_scatter(shape, offset):
    x = torch.randn(shape)
    check(lambda x: x.diagonal(offset, -1, 0), x, grad=True)
    check(lambda x, y: x.diagonal_scatter(y, offset, 0, -1), x, torch.randn(x.diagonal(offset, 0, -1).shape), grad=True)


@pytest.mark.parametrize(("offset", "dims"), [(0, (-2, -1)), (2, (0, 2)), (-1, (2, 0))])
def test_diag_embed(offset, dims):
    check(lambda x: torch.diag_embed(x, offset, *dims), torch.randn(2, 3), grad=True)


def test_mutated_views():
    def function(x):
        x = x.clone()
        x[1:, ::2] *= 2
        x.diagonal().add_(10)
        x[-1] = x[0]
        return x

    check(function, torch.randn(4, 5), grad=True)
