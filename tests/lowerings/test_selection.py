"""Elementwise choices where torch's semantics differ from JAX's."""

import pytest
import torch

from .harness import check

NAN, INF = float("nan"), float("inf")
FLOATS = torch.tensor([NAN, INF, -INF, 0.0, 0.5, -2.5, 6.0, 0.1])
INTEGERS = torch.tensor([0, 1, -1, 7, -128], dtype=torch.int8)


def test_where_promotes_its_branches():
    mask = FLOATS > 0
    check(lambda m, x: torch.where(m, x, 0.5), mask, torch.arange(8))
    check(torch.where, mask[:, None], torch.arange(4, dtype=torch.int32), torch.tensor(2.5))
    check(lambda m, x: torch.where(m, x, 0.1), mask, FLOATS.bfloat16())


def test_where_passes_no_gradient_to_the_other_branch():
    x = torch.tensor([-1.0, 0.0, 4.0])
    check(lambda x: torch.where(x > 0, x * 2, 0.0), x, grad=True)


def test_masked_fill_broadcasts_the_tensor_too():
    mask = torch.tensor([[True], [False]])
    check(lambda x, m: x.masked_fill(m, -INF), torch.randn(3), mask, grad=True)
    check(lambda x, m: x.masked_fill(m, 7), INTEGERS, mask)
    check(lambda x, m, v: x.masked_fill(m, v), torch.randn(3), mask, torch.tensor(2.0), grad=True)


@pytest.mark.parametrize("function", [torch.maximum, torch.minimum, torch.fmax, torch.fmin])
@pytest.mark.parametrize("x", [FLOATS, FLOATS.bfloat16(), INTEGERS, INTEGERS > 0], ids=lambda x: str(x.dtype))
def test_larger_and_smaller_values(function, x):
    check(function, x[:, None], x[None])


@pytest.mark.parametrize("function", [torch.maximum, torch.minimum, torch.fmax, torch.fmin])
def test_equal_values_share_the_gradient(function):
    check(function, torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2.0, 2.0, 2.0]), grad=True)


@pytest.mark.parametrize("bounds", [(0.1, 5), (None, 0.1), (-1, None), (3, 2), (NAN, None), (None, NAN)], ids=str)
def test_clamps(bounds):
    check(lambda x, y, z: [torch.clamp(t, *bounds) for t in (x, y, z)], FLOATS, INTEGERS, FLOATS.bfloat16())


def test_clamps_by_tensors():
    low, high = torch.tensor([NAN, 1.0, 5.0])[:, None], torch.tensor([2.0, 3.0, 4.0])[:, None]
    check(lambda x, low, high: (x.clamp(low, high), x.clamp_min(low), x.clamp_max(high)), FLOATS, low, high)
    check(lambda x, low: x.clamp(low, torch.tensor(9)), INTEGERS, torch.tensor(0.5))


def test_gradients_at_the_bounds():
    x = torch.tensor([-2.0, -1.0, 0.0, 1.0, 2.0])
    check(lambda x: (x.clamp(-1, 1), x.clamp_min(0), x.clamp_max(1.0)), x, grad=True)
    check(lambda x, low, high: x.clamp(low, high), x, torch.full((5,), -1.0), torch.full((5,), 1.0), grad=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.complex64], ids=str)
def test_replacing_nan_and_infinities(dtype):
    x = FLOATS.to(dtype) if dtype.is_floating_point else INTEGERS.to(dtype)
    x = torch.complex(FLOATS, FLOATS.flip(0)) if dtype.is_complex else x
    check(lambda x: (torch.nan_to_num(x), torch.nan_to_num(x, 1.0, 2.0, -3.0)), x)


def test_thresholds():
    threshold = torch.nn.functional.threshold
    check(lambda x: threshold(x, 0.5, 20.0), FLOATS, grad=True)
    check(lambda x: threshold(x, 0.1, 20.0), FLOATS.bfloat16())
    check(lambda x: threshold(x, 1, 20), INTEGERS)


def test_the_step_function_of_nan_is_zero():
    check(torch.heaviside, FLOATS[:, None], torch.tensor([0.5, NAN]))
    check(torch.heaviside, INTEGERS[:, None], INTEGERS[None])
