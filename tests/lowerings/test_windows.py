"""Sliding windows."""

import pytest
import torch
from torch.nn import functional

from .harness import check


@pytest.mark.parametrize(("size", "step"), [(3, 1), (3, 3), (2, 4), (4, 3), (20, 1), (1, 1), (21, 2), (18, 1)])
@pytest.mark.parametrize("dim", [0, -1])
def test_unfold(dim, size, step):
    check(lambda x: x.unfold(dim, size, step), torch.randn(22, 21), grad=True)


def test_unfold_without_dimensions():
    check(lambda x: x.unfold(0, 1, 1), torch.tensor(2.0), grad=True)


def test_unfold_of_half_precision():
    check(lambda x: x.unfold(0, 4, 2), torch.randn(12).bfloat16(), grad=True)


@pytest.mark.parametrize(
    ("kernel", "dilation", "padding", "stride"),
    [
        ((2, 3), 1, 0, 1),
        ((2, 3), (2, 1), (1, 2), (2, 3)),
        ((2, 2), 1, 0, 2),
        ((3, 1), (1, 3), (0, 1), (1, 2)),
        ((17, 2), (1, 1), (6, 0), (1, 1)),
        ((17, 2), (2, 1), (14, 0), (1, 1)),
    ],
)
def test_patches_of_images_and_back(kernel, dilation, padding, stride):
    x = torch.randn(2, 3, 6, 8)
    patches = functional.unfold(x, kernel, dilation, padding, stride)
    check(lambda x: functional.unfold(x, kernel, dilation, padding, stride), x, grad=True)
    check(lambda x: functional.fold(x, (6, 8), kernel, dilation, padding, stride), patches, grad=True)
    check(lambda x: functional.fold(x[0], (6, 8), kernel, dilation, padding, stride), patches)
