"""Reductions of segments."""

import pytest
import torch

from .harness import check

_DATA = torch.tensor([1.0, 3.0, 3.0, -2.0, 0.0, 4.0, 0.0, 0.0, 5.0])


@pytest.mark.parametrize("reduce", ["sum", "mean", "prod", "max", "min"])
@pytest.mark.parametrize("initial", [None, 2.0])
def test_segments_by_length(reduce, initial):
    lengths = torch.tensor([3, 0, 3, 1, 2])
    check(lambda x: torch.segment_reduce(x, reduce, lengths=lengths, initial=initial), _DATA, grad=initial is not None)
    check(lambda x: torch.segment_reduce(x.reshape(1, 9, 1), reduce, lengths=lengths[None], axis=1, initial=1), _DATA)


@pytest.mark.parametrize("reduce", ["sum", "mean", "prod", "max", "min"])
def test_gradients_of_segments(reduce):
    lengths = torch.tensor([3, 3, 3])
    x = torch.stack([_DATA, -_DATA, _DATA.flip(0)], 1)
    check(lambda x: torch.segment_reduce(x, reduce, lengths=lengths), x, grad=True)
    offsets = torch.tensor([[0, 2, 3], [0, 1, 3]])
    check(lambda x: torch.segment_reduce(x[:6].reshape(2, 3, 3), reduce, offsets=offsets, axis=1), x, grad=True)


@pytest.mark.parametrize("reduce", ["prod", "max", "min", "sum"])
def test_segments_with_nan(reduce):
    x = torch.tensor([1.0, torch.nan, 2.0, 0.0, torch.nan, torch.nan, 3.0, 4.0])
    check(lambda x: torch.segment_reduce(x, reduce, lengths=torch.tensor([3, 2, 3])), x, grad=True)


def test_no_segments_of_elements():
    none = torch.zeros(0, dtype=torch.int64)
    check(lambda x: torch.segment_reduce(x, "sum", lengths=none, unsafe=True), _DATA, grad=True)
