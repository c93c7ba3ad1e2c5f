"""Pooling: numbers of windows as in torch, ties, NaN and gradients."""

import pytest
import torch
import torch.nn.functional as F

from .harness import check

X = torch.randn(2, 3, 7, 9, generator=torch.Generator().manual_seed(0))
NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    "options",
    [
        {"kernel_size": 3},
        {"kernel_size": (3, 2), "stride": (2, 3), "padding": 1},
        {"kernel_size": 3, "stride": 2, "padding": 1, "ceil_mode": True},
        {"kernel_size": 3, "stride": 2, "padding": 1, "ceil_mode": True, "count_include_pad": False},
        {"kernel_size": 2, "stride": 3, "ceil_mode": True},
        {"kernel_size": 2, "stride": 2, "divisor_override": 3},
    ],
)
def test_average(options):
    check(lambda x: F.avg_pool2d(x, **options), X, grad=True)


def test_average_1d_and_3d():
    check(lambda x: F.avg_pool1d(x, 3, 2, 1, ceil_mode=True), X[0], grad=True)
    check(lambda x: F.avg_pool3d(x, (1, 3, 2), 2, (0, 1, 1), count_include_pad=False), X, grad=True)


def test_average_of_integers_is_rounded_towards_zero():
    check(lambda x: F.avg_pool2d(x, 2), torch.tensor([[[-3, 0, 3, 0], [0, 0, 0, 0]]]))


def test_infinity_and_nan_affect_only_their_windows_in_averages():
    x = torch.tensor([[1.0, INF, 2.0, 3.0, NAN, 5.0, 6.0]])
    check(lambda x: F.avg_pool1d(x, 2), x)
    check(lambda x: F.adaptive_avg_pool1d(x, 3), x)


@pytest.mark.parametrize(
    "options",
    [
        {"kernel_size": 3, "stride": 2, "padding": 1},
        {"kernel_size": 2, "stride": 1, "dilation": (2, 3)},
        {"kernel_size": (2, 3), "stride": 3, "ceil_mode": True, "padding": (0, 1)},
        {"kernel_size": (7, 9)},
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bfloat16])
def test_maximum_and_its_index(options, dtype):
    x = (X * 3).to(dtype)  # with ties, but of float32
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {}  # torch adds gradients in bfloat16
    check(lambda x: F.max_pool2d(x, **options, return_indices=True), x, grad=dtype.is_floating_point, **tolerance)


def test_maximum_index_is_first_of_equals_or_last_nan():
    x = torch.tensor([[[1.0, 2.0, 2.0, 0.0, NAN, 1.0, NAN, 3.0, -INF, -INF, -INF, -INF]]])
    for kernel, stride in ((3, 3), (4, 2), (12, 1), (2, 1)):
        check(lambda x, k=kernel, s=stride: F.max_pool1d(x, k, s, return_indices=True), x)
    for count in (3, 5, 1):
        check(lambda x, n=count: F.adaptive_max_pool1d(x, n, return_indices=True), x)


def test_padding_is_never_a_maximum():
    low = torch.full((1, 1, 4, 4), -INF)
    check(lambda x: F.max_pool2d(x, 3, 2, 1, return_indices=True), low)
    lowest = torch.full((1, 1, 4, 4), torch.iinfo(torch.int32).min, dtype=torch.int32)
    check(lambda x: F.max_pool2d(x, 3, 2, 1, return_indices=True), lowest)


def test_maximum_in_three_dimensions():
    check(lambda x: F.max_pool3d(x, (2, 3, 2), 2, (0, 1, 1), return_indices=True), X, grad=True)


@pytest.mark.parametrize("size", [(3, 4), (7, 3), (1, 1), (10, 2)])
def test_adaptive(size):
    check(lambda x: F.adaptive_avg_pool2d(x, size), X, grad=True)
    check(lambda x: F.adaptive_max_pool2d(x, size, return_indices=True), X, grad=True)


def test_adaptive_in_three_dimensions():
    check(lambda x: F.adaptive_avg_pool3d(x, (2, 3, 3)), X, grad=True)
    check(lambda x: F.adaptive_max_pool3d(x, (2, 3, 3), return_indices=True), X, grad=True)


def test_empty_batch():
    check(lambda x: (F.max_pool2d(x, 2), F.avg_pool2d(x, 2), F.adaptive_avg_pool2d(x, 2)), X[:0], grad=True)


def test_fractional():
    samples = torch.rand(2, 3, 2, generator=torch.Generator().manual_seed(1))
    check(lambda x, s: torch.ops.aten.fractional_max_pool2d(x, [2, 3], [4, 5], s), X, samples)
    check(lambda x, s: torch.ops.aten.fractional_max_pool2d(x, [2, 3], [1, 5], s), X, samples)
    samples = torch.rand(1, 2, 3, generator=torch.Generator().manual_seed(1))
    check(lambda x, s: torch.ops.aten.fractional_max_pool3d(x[None], [2, 2, 3], [1, 3, 4], s), X, samples)
    samples = torch.rand(2, 3, 2)
    check(lambda x: F.fractional_max_pool2d(x, 2, (3, 4), _random_samples=samples), X, grad=True)


def test_unpooling():
    value, index = F.max_pool2d(X, 2, return_indices=True)
    check(lambda x, i: F.max_unpool2d(x, i, [2, 2], output_size=(7, 9)), value, index, grad=True)
    value, index = F.max_pool3d(X, (1, 2, 2), return_indices=True)
    check(lambda x, i: F.max_unpool3d(x, i, (1, 2, 2), output_size=X.shape[1:]), value, index, grad=True)


def test_second_derivative():
    def slope(x):
        return torch.func.grad(lambda a: (F.max_pool2d(a, 2) ** 2).sum() + (F.avg_pool2d(a, 2) ** 2).sum())(x)

    check(slope, X, grad=True)
