"""New tensors: how numbers become elements."""

import pytest
import torch

from .harness import check


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.full_like(x, -1, dtype=torch.uint8),
        lambda x: torch.full_like(x, 2.7, dtype=torch.int64),
        lambda x: torch.full_like(x, 0.5, dtype=torch.bool),
        lambda x: x.new_full((2, 0), 3),
        lambda x: torch.full((2,), 1 + 2j) * x[0],
        lambda x: torch.zeros_like(x, dtype=torch.int8),
        lambda x: x.new_ones(3, 2),
        lambda x: torch.scalar_tensor(3, dtype=torch.float16) * x.half(),
        lambda x: torch.arange(0.5, 5, dtype=torch.int64),
        lambda x: torch.arange(0, 1, 0.1),
        lambda x: torch.arange(5, -4, -3),
        lambda x: torch.arange(0, 300, 0.7, dtype=torch.bfloat16),
        lambda x: torch.linspace(0, 10, 7, dtype=torch.int64),
        lambda x: torch.linspace(-3, 3, 6, dtype=torch.int64),
        lambda x: torch.linspace(1, 5, 1),
        lambda x: torch.linspace(1, 5, 0),
        lambda x: torch.linspace(0, 1 + 1j, 5),
        lambda x: torch.linspace(x[0], 4, 5),
        lambda x: torch.logspace(0, 3, 5, dtype=torch.int64),
        lambda x: torch.logspace(-1, x[1], 5, base=2),
        lambda x: torch.eye(2, 3, dtype=torch.bool),
        lambda x: torch.tril_indices(3, 4, -1),
        lambda x: torch.triu_indices(3, 4, 1, dtype=torch.int32),
        lambda x: torch.triu_indices(2, 2, 5),
    ],
)
def test_factory(function):
    check(lambda x: function(x).clone(), torch.tensor([1.0, 2.0]))


@pytest.mark.parametrize("diagonal", [-4, -1, 0, 2])
@pytest.mark.parametrize("function", [torch.tril, torch.triu])
def test_tril_and_triu_zero_nan(function, diagonal):
    x = torch.randn(2, 3, 4)
    check(lambda x: function(x, diagonal), x, grad=True)
    check(lambda x: function(x, diagonal), torch.full((3, 4), torch.nan))
    check(lambda x: function(x, diagonal), x > 0)
