"""Reductions: empty dims, NaN, ties, integer and half precision results as in torch."""

import pytest
import torch

from .harness import check

nan, inf = torch.nan, torch.inf
MATRIX = torch.tensor([[3.0, nan, -1.0], [2.0, 2.0, -inf], [0.0, -0.0, 5.0]])
TIES = torch.tensor([[1, 3, 3], [3, 0, 0], [2, 2, 2]])


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.any(x, dim=()),
        lambda x: torch.all(x, dim=(), keepdim=True),
        lambda x: torch.any(x, dim=(0, -1)),
        lambda x: torch.sum(x, dim=()),
        lambda x: torch.nansum(x, dim=-1, keepdim=True),
        lambda x: torch.sum(x.nan_to_num(0, 0, 0), dtype=torch.bool),
        lambda x: torch.sum(x > 0, dim=0),
        lambda x: torch.prod(x > 0),
        lambda x: torch.prod(x, dim=1, dtype=torch.float64),
        lambda x: torch.count_nonzero(x, dim=(0, 1)),
        lambda x: torch.count_nonzero(x, dim=1),
        lambda x: torch.amax(x, dim=(0, 1), keepdim=True),
        lambda x: torch.aminmax(x, dim=1),
        lambda x: torch.logsumexp(x, dim=(0, 1)),
        lambda x: torch.logsumexp(x.to(torch.complex64) * 1j, dim=1),
        lambda x: torch.trace(x),
        lambda x: torch.hash_tensor(x[2:], dim=1, keepdim=True),
        lambda x: torch.hash_tensor(x[2].to(torch.int8) - 3),
        lambda x: torch.mean(x[:0]),
        lambda x: torch.var_mean(x[:0], dim=0),
    ],
)
@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
def test_reduction(function):
    check(function, MATRIX)


@pytest.mark.parametrize(
    "x", [MATRIX, TIES, MATRIX > 0, torch.tensor(2.0), TIES.to(torch.uint8)], ids=lambda x: str(x.dtype)
)
@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.max(x, -1),
        lambda x: torch.min(x, 0, keepdim=True),
        lambda x: (torch.max(x), torch.min(x)),
        lambda x: torch.argmax(x.float()),
        lambda x: torch.argmin(x.float(), keepdim=True),
        lambda x: torch.argmax(x.float(), 0, keepdim=True),
        lambda x: torch.any(x),
        lambda x: torch.all(x, 0),
    ],
)
def test_extreme_index_is_first_of_equals_or_first_nan(function, x):
    check(function, x)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "function",
    [
        torch.sum,
        torch.mean,
        lambda x: torch.softmax(x, 0),
        lambda x: torch.std(x),
        lambda x: torch.linalg.vector_norm(x),
        lambda x: torch.cumsum(x, 0),
        lambda x: torch.log_softmax(x, 0, dtype=torch.float32),
    ],
)
def test_half_precision_is_rounded_once(function, dtype):
    # A sum of these in half precision would stop growing.
    check(function, torch.rand(5000).to(dtype))


@pytest.mark.parametrize("correction", [0, 1, 2.5, 4])
@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
def test_variance(correction):
    check(lambda x: torch.var_mean(x, 0, correction=correction), torch.randn(4, 3), grad=correction < 4)
    check(lambda x: torch.std(x, correction=correction), torch.randn(4, 3, dtype=torch.complex64))


def test_variance_and_gradient_of_equal_elements_are_exactly_zero():
    check(lambda x: torch.std(x, 1), torch.full((2, 7), 0.1), rtol=0, atol=0, grad=True)


@pytest.mark.parametrize("p", [0, 0.5, 1, 2, 3, -1, inf, -inf])
@pytest.mark.parametrize(
    "x",
    [torch.tensor([[-2.0, 0.0], [1.0, nan]]), torch.tensor([[-2.0 + 1j, 0.0], [1j, 4.0]]), torch.empty(0, 2)],
    ids=["real", "complex", "empty"],
)
def test_norm(x, p):
    check(lambda x: torch.linalg.vector_norm(x, p, dim=1, keepdim=True), x)
    if x.numel():
        check(lambda x: torch.dist(x, torch.ones(2), p), x)


@pytest.mark.parametrize("p", [1, 2, inf])
def test_norm_gradient_at_zero_and_at_ties(p):
    check(lambda x: torch.linalg.vector_norm(x, p, dim=1), torch.tensor([[0.0, 0.0], [2.0, -2.0]]), grad=True)


@pytest.mark.parametrize("function", [torch.softmax, torch.log_softmax, torch.ops.aten._safe_softmax])
@pytest.mark.parametrize("dim", [0, -1])
def test_softmax(function, dim):
    check(lambda x: function(x, dim), torch.tensor([[-inf, -inf], [1.0, -inf], [1e4, -1e4]]).t())
    check(lambda x: function(x, dim), torch.randn(3, 4), grad=True)


def test_softmax_of_a_scalar_and_of_an_empty_tensor():
    check(lambda x: torch.softmax(x, 0), torch.tensor(3.0), grad=True)
    check(lambda x: torch.log_softmax(x, 1), torch.empty(2, 0))


@pytest.mark.parametrize("mask_type", [0, 1, 2])
def test_masked_softmax(mask_type):
    every = torch.arange(96).reshape(2, 3, 4, 4) % 5 < 2
    every[1, 1, 2] = True  # a row without elements
    mask = {0: every[1, 1], 1: every[0, 0, :2], 2: every}[mask_type]
    check(lambda x: torch._masked_softmax(x, mask, 3, mask_type), torch.randn(2, 3, 4, 4))


@pytest.mark.parametrize(
    "x",
    [torch.tensor([2.0, 2.0, nan, 7.0, nan, 1.0]), torch.tensor([1, 1, 3, 0, 3]), torch.tensor(2.0)],
    ids=["nan", "ties", "scalar"],
)
@pytest.mark.parametrize("function", [torch.cummax, torch.cummin, torch.cumsum, torch.cumprod])
def test_cumulative(function, x):
    check(lambda x: function(x, -1), x)


@pytest.mark.parametrize("function", [torch.cummax, torch.cummin, torch.cumsum, torch.cumprod, torch.logcumsumexp])
def test_cumulative_gradient(function):
    check(lambda x: function(x, 1), torch.randn(3, 6), grad=True)


def test_logcumsumexp_of_infinities():
    check(lambda x: torch.logcumsumexp(x, 0), torch.tensor([-inf, -inf, 1.0, inf, inf, 2.0, nan]))
    x = torch.tensor([1.0 + 2j, -inf, 3 - 1j, 50.0 + 9j])
    check(lambda x: torch.logcumsumexp(x, 0), x)
