"""Distances between rows, whose gradients torch defines at the kinks."""

from typing import Any

import pytest
import torch

from .harness import check

P = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, torch.inf]
TOLERANCE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("p", P)
def test_cdist(p):
    x = torch.randn(2, 4, 3)
    y = torch.cat([x[:, :2], torch.randn(2, 3, 3)], 1)  # two distances of 0
    check(lambda x, y: torch.cdist(x, y, p=p), x, y, grad=True, **TOLERANCE)


@pytest.mark.parametrize("p", P[:-1])
def test_cdist_propagates_nan(p):
    x = torch.tensor([[1.0, torch.nan], [torch.inf, 2.0], [1.0, 2.0]])
    check(lambda x: torch.cdist(x, x, p=p), x, **TOLERANCE)


@pytest.mark.parametrize("p", P)
@pytest.mark.parametrize("rows", [1, 5])
def test_pdist(p, rows):
    check(lambda x: torch.nn.functional.pdist(x, p=p), torch.randn(rows, 3), grad=True, **TOLERANCE)


@pytest.mark.parametrize("mode", ["use_mm_for_euclid_dist", "donot_use_mm_for_euclid_dist"])
def test_cdist_of_many_rows(mode):
    x, y = torch.randn(30, 4), torch.randn(28, 4)
    check(lambda x, y: torch.cdist(x, y, compute_mode=mode), x, y, grad=True, **TOLERANCE)


@pytest.mark.parametrize(("m", "n", "k"), [(0, 3, 2), (3, 0, 2), (3, 2, 0)])
def test_empty_input(m, n, k):
    check(torch.cdist, torch.randn(m, k), torch.randn(n, k))
