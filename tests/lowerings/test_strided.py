"""Strides into memory, bits as other dtypes, and resizing."""

import pytest
import torch

from jtbridge.errors import TranslationError

from .harness import check

_STRIDES = [
    ((2, 3), (3, 1), 0),
    ((3, 2), (1, 3), 2),
    ((4, 3), (2, 1), 1),
    ((2, 2), (0, 5), 3),
    ((0, 2), (1, 1), 0),
    ((), (), 7),
]


@pytest.mark.parametrize(("size", "stride", "offset"), _STRIDES)
@pytest.mark.parametrize("view", [lambda x: x, lambda x: x.t(), lambda x: x.expand(2, 3, 4)])
def test_as_strided_reads_storage(view, size, stride, offset):
    check(lambda x: torch.as_strided(view(x), size, stride, offset), torch.randn(3, 4), grad=True)


def test_as_strided_of_a_view():
    x = torch.randn(3, 4)
    check(lambda x: torch.as_strided(x[:, 1:3], (3,), (4,), 2), x)
    check(lambda x: torch.as_strided(x[1:], (2, 2), (1, 4), 5), x)
    check(lambda x: torch.as_strided(x[1:], (2, 2), (1, 4)), x)
    for offset in (0, 3):
        with pytest.raises(TranslationError):
            check(lambda x, offset=offset: torch.as_strided(x[:, 1:3], (3,), (4,), offset), x)


@pytest.mark.parametrize("view", [lambda x: x.clone(), lambda x: x.t().clone(), lambda x: x.clone()[:, 1:3]])
def test_as_strided_scatter(view):
    check(lambda x, y: torch.as_strided_scatter(view(x), y, (2, 2), (4, 1), 1), torch.randn(3, 4), torch.randn(2, 2))


def test_writing_through_strides():
    def function(x):
        x = x.clone()
        x.as_strided((3,), (5,)).mul_(2)
        return x

    check(function, torch.randn(3, 4), grad=True)


@pytest.mark.parametrize(
    "to", [torch.int8, torch.uint8, torch.int16, torch.bfloat16, torch.float32, torch.complex64, torch.complex128]
)
@pytest.mark.parametrize("of", [torch.float64, torch.int16, torch.complex64, torch.complex128, torch.uint8])
def test_bits_as_another_dtype(of, to):
    x = torch.arange(1, 2 * 16 + 1).reshape(2, 16).to(of)
    check(lambda x: x.view(to), x)


def test_bits_of_booleans():
    check(lambda x: x.view(torch.uint8), torch.tensor([True, False]))
    check(lambda x: x.view(torch.bool), torch.tensor([1, 0], dtype=torch.uint8))


def test_bits_without_dimensions():
    check(lambda x: x.view(torch.int32), torch.tensor(-0.0))
    check(lambda x: x.view(torch.complex64), torch.tensor(1.5, dtype=torch.float64))


@pytest.mark.parametrize("size", [(2, 3), (12,), (2, 2)])
@pytest.mark.parametrize("view", [lambda x: x, lambda x: x.t(), lambda x: x[:, 1:]])
def test_resize_keeps_the_first_elements_of_storage(view, size):
    if torch.Size(size).numel() <= 9:
        check(lambda x: torch.ops.aten.resize.default(view(x), size), torch.randn(3, 4))
