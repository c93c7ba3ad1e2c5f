"""Rounding and the parts of floats where torch's semantics differ from JAX's."""

import pytest
import torch

from .harness import check

NAN, INF = float("nan"), float("inf")
FLOATS = torch.tensor([NAN, INF, -INF, 0.0, -0.0, 0.5, 1.5, 2.5, -2.5, -0.3, 7.9, 1e9])
INTEGERS = torch.tensor([0, 1, -1, 7, -128], dtype=torch.int8)


@pytest.mark.parametrize("x", [FLOATS, FLOATS.bfloat16(), FLOATS.double(), INTEGERS], ids=lambda x: str(x.dtype))
def test_rounding(x):
    check(lambda x: (x.round(), x.floor(), x.ceil(), x.trunc()), x, rtol=0, atol=0)


def test_fractions_keep_the_sign():
    check(torch.frac, FLOATS)


@pytest.mark.parametrize("decimals", [0, 2, -2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_rounding_to_decimals(decimals, dtype):
    check(lambda x: torch.round(x, decimals=decimals), torch.tensor([123.4567, -0.015, 155, 250, 2.5]).to(dtype))


def test_gradients_of_rounding_are_zero():
    check(lambda x: (x.round(), x.floor(), x.frac(), x.trunc() * x), torch.tensor([0.5, -1.0, 2.7]), grad=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_copied_signs(dtype):
    x = FLOATS.to(dtype) if dtype.is_floating_point else INTEGERS
    signs = torch.tensor([1.0, -1.0, 0.0, -0.0])
    check(lambda x, s: (torch.copysign(x, s), 1 / torch.copysign(x, s), torch.copysign(x, -2)), x[:, None], signs)


def test_gradient_of_copied_signs_at_zero():
    check(torch.copysign, torch.tensor([0.0, -0.0, 1.0, -2.0]), torch.tensor([1.0, -1.0, -0.0, -3.0]), grad=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_the_next_float(dtype):
    x, y = torch.tensor([1.0, 1.0, -1.0, NAN, INF, 2.0]), torch.tensor([2.0, 0.0, -INF, 1.0, 0.0, 2.0])
    check(torch.nextafter, x.to(dtype), y.to(dtype), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_mantissa_and_exponent(dtype):
    check(torch.frexp, torch.tensor([NAN, INF, -INF, 0.0, 1.0, -3.0, 0.1, 1e20, 1e-20]).to(dtype), rtol=0, atol=0)


def test_ldexp_overflows_in_the_power_of_two():
    check(torch.ldexp, torch.tensor([1e-30, 0.0, -3.0]), torch.tensor([140, 1000, 5]))
    check(torch.ldexp, torch.tensor([1e-30, 0.0]), torch.tensor([140, 255], dtype=torch.uint8))
    check(torch.ldexp, torch.tensor([0, 1, 3]), torch.tensor([5, 200, 3], dtype=torch.uint8))
    check(torch.ldexp, torch.tensor([False, True]), torch.tensor([20.0, 3.0]).half())
    check(torch.ldexp, torch.randn(3), torch.tensor([1.5, -2.0, 0.0]), grad=True)


QUOTIENTS = {
    "floor": lambda x, s: torch.floor(x / s),
    "int": lambda x, s: (x / s).int(),
    "equal": lambda x, s: x / s == torch.round(x / s),
    "moved": lambda x, s: torch.floor(((x / s) + 1).clamp(-100, 100)),
    "expanded": lambda x, s: torch.ceil(x / s.expand_as(x)),
    "normalized": lambda x, s: torch.floor(torch.nn.functional.normalize(x[:, :1] + s, p=1)),
}


@pytest.mark.parametrize("name", QUOTIENTS)
def test_quotients_by_a_broadcast_divisor_that_are_rounded(name):
    """XLA would multiply by the reciprocal: 41 / 41 would be less than 1."""
    divisors = torch.tensor([0.1, 0.3, 0.7, 1.1, 41.0, 49.0, 61.0])[:, None]
    check(QUOTIENTS[name], torch.arange(-50.0, 50.0) * divisors, divisors, rtol=0, atol=0)
