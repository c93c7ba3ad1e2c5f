"""Conversions of dtype as torch's CPU kernels do them."""

import pytest
import torch

from .harness import check

NAN, INF = float("nan"), float("inf")
FLOATS = torch.tensor(
    [NAN, INF, -INF, 0.0, 0.9, -0.9, 1.5, -1.5, 200.0, 300.0, -300.0, 7e4, -7e4, 3e9, -3e9, 1e20, -1e20]
)
INTEGERS = torch.tensor([0, 1, -1, 127, 128, 255, 256, 65535, -32769, 2**31, 16777217, 2**53 + 1, -(2**63)])


@pytest.mark.parametrize(
    "target", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool], ids=str
)
@pytest.mark.parametrize("source", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_floats_to_integers(source, target):
    check(lambda x: x.to(target), FLOATS.to(source))


def test_integers_wrap():
    targets = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.bool)
    check(lambda x: [x.to(target) for target in targets], INTEGERS)


def test_integers_to_floats():
    targets = (torch.float32, torch.float64, torch.bfloat16, torch.complex64)
    check(lambda x: [x.to(target) for target in targets], INTEGERS, rtol=0, atol=0)


def test_float64_rounds_to_half_precision_through_float32():
    x = torch.tensor([1 + 2.0**-8 + 2.0**-40, 1 + 2.0**-11 + 2.0**-40], dtype=torch.float64)
    check(lambda x: (x.bfloat16(), x.half()), x, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:Casting complex values")
def test_complex_to_real_drops_the_imaginary_part():
    x = torch.tensor([1.7 + 2j, 1j, 0j, -3.5 + 0j])
    check(lambda x: (x.to(torch.float32), x.to(torch.int32), x.to(torch.bool), x.to(torch.complex128)), x)


def test_gradients_are_converted_back():
    check(lambda x: (x.double() * 2, x.bfloat16().float() * 3), torch.randn(4), grad=True)


@pytest.mark.parametrize("target", [torch.uint8, torch.int16, torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(
    "function",
    [
        lambda x, zeros: torch.sum(x, 1, dtype=zeros.dtype),
        lambda x, zeros: torch.prod(x, 1, dtype=zeros.dtype),
        lambda x, zeros: torch.nansum(x, 1, dtype=zeros.dtype),
        lambda x, zeros: torch.cumsum(x, 1, dtype=zeros.dtype),
        lambda x, zeros: torch.cumprod(x, 1, dtype=zeros.dtype),
        lambda x, zeros: zeros.clone().copy_(x),
        lambda x, zeros: torch.slice_scatter(zeros, x),
        lambda x, zeros: torch.diagonal_scatter(zeros.expand(-1, 17), x[:, 0]),
    ],
    ids=["sum", "prod", "nansum", "cumsum", "cumprod", "copy_", "slice_scatter", "diagonal_scatter"],
)
def test_operators_convert_floats_to_integers_as_a_conversion_does(function, target):
    check(function, FLOATS[:, None], torch.zeros(len(FLOATS), 1, dtype=target))
