"""Sorting and searching: NaN, ties and the places of elements."""

import jax
import numpy as np
import pytest
import torch

import jtbridge

from .harness import check

nan, inf = torch.nan, torch.inf
ROW = torch.tensor([2.0, nan, -inf, 2.0, 0.0, -0.0, inf, nan, 2.0])


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize(
    "x",
    [
        ROW,
        ROW.to(torch.bfloat16),
        ROW > 0,
        torch.tensor([3, 1, 3, 1]),
        torch.tensor(1.0),
        torch.empty(0),
        torch.empty(2, 0),
    ],
)
def test_sort_is_stable_with_nan_as_the_largest(x, descending):
    check(lambda x: torch.sort(x, stable=True, descending=descending), x)


def test_sort_along_a_dimension():
    check(lambda x: torch.sort(x, 0), torch.randn(5, 3), grad=True)
    check(lambda x: torch.argsort(x, 1, descending=True), torch.randn(5, 3))


@pytest.mark.parametrize("largest", [False, True])
@pytest.mark.parametrize(
    "x",
    [
        torch.tensor([1.0, nan, 3.0, -inf, inf]),
        -torch.tensor([1.0, nan, 3.0, -inf, inf]),  # with a NaN whose sign bit is set
        torch.tensor([5, -2, 7, 127, -128], dtype=torch.int8),
        torch.tensor([5, 2, 255], dtype=torch.uint8),
    ],
)
def test_topk(x, largest):
    check(lambda x: torch.topk(x, 3, largest=largest), x)


def test_topk_of_equal_elements():
    check(lambda x: torch.topk(x, 2)[0], torch.tensor([1.0, 3.0, 3.0, 3.0]))
    check(lambda x: torch.topk(x, 2, dim=0), torch.randn(5, 3), grad=True)
    check(lambda x: torch.topk(x, 1), torch.tensor(3.0))
    check(lambda x: torch.topk(x, 0), torch.randn(3))


@pytest.mark.parametrize("right", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_searchsorted(right, dtype):
    rows = torch.tensor([[1, 2, 2, 5], [0, 0, 0, 9]], dtype=dtype)
    values = torch.tensor([[2, 0, 7], [0, 10, -1]], dtype=dtype)
    check(lambda s, x: torch.searchsorted(s, x, right=right), rows, values)
    check(lambda s, x: torch.searchsorted(s[0], x, right=right, out_int32=True), rows, values)
    check(lambda s: torch.searchsorted(s[0], 2, right=right), rows)
    check(lambda s, x: torch.bucketize(x, s[1], right=right), rows, values)


def test_searchsorted_with_nan_and_a_sorter():
    line = torch.tensor([1.0, 2.0, nan])
    check(torch.searchsorted, line, torch.tensor([nan, 1.5, 3.0]))
    order = torch.tensor([2, 0, 1])
    check(lambda s, x: torch.searchsorted(s, x, sorter=order), torch.tensor([2.0, 3.0, 1.0]), torch.tensor([2.5, 0.0]))
    check(torch.searchsorted, torch.empty(0), torch.ones(2))


@pytest.mark.parametrize("invert", [False, True])
@pytest.mark.parametrize("count", [3, 400])
def test_isin(count, invert):
    check(lambda x, t: torch.isin(x, t, invert=invert), torch.tensor([1.0, nan, 2.0]), torch.arange(count) * 2.0)
    check(lambda x: torch.isin(x, 2, invert=invert), torch.tensor([1.0, nan, 2.0]))


@pytest.mark.parametrize(
    "function",
    [
        torch.median,
        torch.nanmedian,
        lambda x: torch.median(x, 0),
        lambda x: torch.nanmedian(x, -1, keepdim=True),
        lambda x: torch.kthvalue(x, 1),
        lambda x: torch.kthvalue(x, x.shape[-1], -1, keepdim=True),
    ],
)
@pytest.mark.parametrize(
    "x",
    [torch.tensor([4.0, nan, 1.0, nan, 3.0]), torch.tensor([nan] * 3), torch.tensor([9, 2, 7, 4]), torch.randn(4, 5)],
    ids=["nan", "only nan", "integers", "matrix"],
)
def test_order_statistics(function, x):
    if x.isnan().sum() > 1 and function(x) is not None and isinstance(function(x), tuple):
        check(lambda x: function(x)[0], x)  # torch does not specify which of several NaN it returns
    else:
        check(function, x)


def test_median_index_is_the_first_nan():
    check(lambda x: torch.median(x, 0), torch.tensor([4.0, nan, 1.0, nan]))


def test_median_of_an_empty_tensor():
    check(torch.median, torch.empty(0))
    check(torch.nanmedian, torch.empty(0, dtype=torch.int64))


def test_mode_is_the_smallest_most_frequent_value_and_last_index():
    check(torch.mode, torch.tensor([[3, 1, 3, 1, 2], [5, 5, 4, 0, 0]]))
    check(lambda x: torch.mode(x, 0), torch.tensor([2.0, 2.0, 1.0]), grad=True)


@pytest.mark.parametrize("density", [False, True])
def test_histogram(density):
    x = torch.tensor([0.0, 0.5, 1.0, 1.0, nan, 7.0, -1.0])
    edges = torch.tensor([0.0, 0.25, 1.0, 3.0])
    weight = torch.arange(7.0)
    check(lambda x: torch.histogram(x, 4, range=(0.0, 1.0), density=density), x)
    check(lambda x: torch.histogram(x, 3, density=density), torch.ones(4))
    check(lambda x, e, w: torch.histogram(x, e, weight=w, density=density), x, edges, weight)
    check(lambda x: torch.histogram(x, 2), torch.empty(0))
    check(lambda x: torch.histogramdd(x, [3, 2], density=density)[0], torch.rand(9, 2))


@pytest.mark.parametrize(("low", "high"), [(0, 0), (-1, 1), (2, 5)])
def test_histc(low, high):
    check(lambda x: torch.histc(x, 5, low, high), torch.tensor([0.0, 0.5, 1.0, 1.0, 7.0, -1.0, 0.999]))
    check(lambda x: torch.histc(x, 5, low, high), torch.ones(3))


@pytest.mark.parametrize("end", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "counts", [lambda x: torch.histc(x, 3), lambda x: torch.histogram(x, 4)[0], lambda x: torch.histogram(x, 4)[1]]
)
def test_histogram_whose_range_is_not_finite(end, counts):
    """Torch raises, which a program cannot."""
    x = torch.tensor([0.0, 1.0, end])
    with pytest.raises(RuntimeError, match="is not finite"):
        counts(x)
    assert np.isnan(jax.jit(jtbridge.wrap(counts))(x.numpy())).all()
    check(lambda x: torch.histc(x, 3, 0, 2), x)
