"""Exponentials, logarithms, powers and roots where torch's semantics differ from JAX's."""

import pytest
import torch

from .harness import check

NAN, INF = float("nan"), float("inf")
FLOATS = torch.tensor([NAN, INF, -INF, 0.0, -0.0, 0.5, -0.5, 1.0, -1.0, 2.0, -3.0, 100.0, -100.0, 1e-3])
INTEGERS = torch.tensor([0, 1, -1, 2, -3, 7], dtype=torch.int8)
COMPLEX = torch.tensor([0j, 1 + 2j, -2 + 0j, complex(-2, -0.0), 0.5j, 3 - 4j])

FUNCTIONS = ["exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sqrt", "rsqrt", "reciprocal", "square"]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_one_value(name):
    function = getattr(torch, name)
    check(
        lambda *xs: [function(x) for x in xs],
        FLOATS,
        FLOATS.bfloat16(),
        FLOATS.double(),
        INTEGERS,
        INTEGERS > 0,
        COMPLEX,
    )


def test_exponentials_and_logarithms_are_exact_where_their_results_are_integers():
    check(lambda x: torch.log2(x).floor(), 2.0 ** torch.arange(-120, 127), rtol=0, atol=0)
    check(lambda x: torch.log10(x).floor(), 10.0 ** torch.arange(0, 20), rtol=0, atol=0)
    check(torch.exp2, torch.arange(-120.0, 127.0), rtol=0, atol=0)


EXPONENTS = [0, 1, 2, 3, -1, -2, 0.5, -0.5, 2.5, -3, 7]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_powers_by_numbers(dtype):
    check(lambda x: [x**e for e in EXPONENTS], FLOATS.to(dtype))


def test_complex_powers():
    check(lambda x: [x**e for e in (*EXPONENTS, 1j, 2 - 1j)], COMPLEX[1:])
    check(lambda x: [x**e for e in (0, 0.5, 1, 2, 3, 2.5, 1j)], COMPLEX)
    check(torch.pow, COMPLEX[:, None], torch.tensor([0j, 1 + 0j, 1j, -1 + 0j, -1j, 2 + 1j]), atol=1e-4, rtol=1e-5)


def test_powers_of_tensors():
    check(torch.pow, FLOATS[:, None], FLOATS[None])
    check(torch.pow, INTEGERS[:, None], torch.tensor([0.5, -2.0, 0.0]))


def test_integer_powers_wrap_and_have_no_fractions():
    check(torch.pow, INTEGERS[:, None], torch.tensor([0, 1, 5, 100, -1, -2, -3]))
    check(
        torch.pow, torch.tensor([0, 2, 3, 255], dtype=torch.uint8)[:, None], torch.tensor([0, 1, 9], dtype=torch.uint8)
    )
    check(lambda x: [x**e for e in (0, 1, 2, 3, 7, 0.5)], INTEGERS)


def test_powers_of_numbers():
    check(lambda x, y: (2**x, 1**x, 0.5**x, (-2.0) ** x, 2**y, 0.5**y), FLOATS, INTEGERS)


def test_gradients_of_powers_at_zero():
    x = torch.tensor([0.0, 0.0, 2.0, 3.0])
    check(lambda x: (x**0, x**1, x**2, x**3, x**2.5), x, grad=True)
    check(torch.pow, x, torch.tensor([0.0, 2.0, 0.0, -1.5]), grad=True)


def test_the_hypotenuse_of_an_infinite_side_is_infinite():
    x = torch.tensor([INF, NAN, 3e38, 0.0, 3.0, NAN])
    check(torch.hypot, x, torch.tensor([NAN, -INF, 1e38, 0.0, -4.0, 1.0]))
    check(torch.hypot, x.bfloat16(), x.bfloat16().flip(0))


@pytest.mark.parametrize("function", [torch.logaddexp, torch.logaddexp2])
def test_logarithms_of_sums(function):
    check(function, FLOATS[:, None], FLOATS[None])


def test_logarithms_of_complex_sums():
    check(torch.logaddexp, COMPLEX[:, None], COMPLEX[None])
    infinite = torch.tensor([complex(-INF, 1), complex(INF, 0), complex(1, 2)])
    check(torch.logaddexp, infinite, infinite)


def test_gradient_of_the_logarithm_of_a_sum_of_equals():
    check(torch.logaddexp, torch.tensor([1.0, 2.0, -INF]), torch.tensor([1.0, -50.0, 0.0]), grad=True)


def test_zero_times_the_logarithm_is_zero_unless_it_is_nan():
    check(torch.xlogy, FLOATS[:, None], FLOATS[None])
    check(lambda x: (torch.xlogy(x, 0.0), torch.xlogy(0, x), torch.xlogy(2, x)), FLOATS)
    check(torch.xlogy, torch.tensor([0, 2]), torch.tensor([0, 3]))
    check(torch.xlogy, torch.tensor([0.0, 2.0, 0.0]), torch.tensor([1.0, 3.0, 0.0]), grad=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("exponent", [0.5, -0.5])
def test_roots_of_negative_infinity_and_zero(dtype, exponent):
    check(lambda x: x**exponent, torch.tensor([-INF, -0.0, 4.0, -1.0, INF], dtype=dtype))
