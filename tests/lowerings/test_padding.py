"""Padding at the edges."""

import pytest
import torch
from torch.nn import functional

from .harness import check

_PADS = {
    1: [(2, 1), (0, 3), (-1, 2), (1, -2)],
    2: [(1, 2, 3, 0), (-1, 1, 2, -1)],
    3: [(1, 2, 0, 1, 1, 1), (1, -1, -1, 1, 0, 0)],
}
_CASES = [(n, pad) for n, pads in _PADS.items() for pad in pads]


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
@pytest.mark.parametrize(("dimensions", "pad"), _CASES)
def test_padding_with_existing_elements(mode, dimensions, pad):
    x = torch.randn((2, 4, 5, 4)[: 1 + dimensions])
    check(lambda x: functional.pad(x, pad, mode), x, grad=True)
    check(lambda x: functional.pad(x[None], pad, mode), x.bfloat16())


@pytest.mark.parametrize("pad", [(1, 2), (0, -2, 3, -1), (-1, -1, 0, 0, 2, 0)])
def test_padding_with_a_constant(pad):
    check(lambda x: functional.pad(x, pad, value=-7), torch.randn(2, 3, 4), grad=True)
    check(lambda x: functional.pad(x, pad, value=float("inf")), torch.randn(2, 3, 4))
    check(lambda x: functional.pad(x, pad, value=1), torch.zeros(2, 3, 4).bool())


def test_padding_an_integer_array():
    check(lambda x: functional.pad(x, (2, 2), "replicate"), torch.arange(6).reshape(1, 6))
