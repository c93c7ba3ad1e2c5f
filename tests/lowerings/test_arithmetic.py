"""Sums, products, quotients and remainders where torch's semantics differ from JAX's."""

import jax
import pytest
import torch

import jtbridge
from jtbridge.lowerings.indexing._out_of_range import invalid_value

from .harness import check

NAN, INF = float("nan"), float("inf")
FLOATS = torch.tensor([NAN, INF, -INF, 0.0, -0.0, 0.5, -0.5, 2.5, -2.5, 6.0, -7.0, 1000.0])
INTEGERS = torch.tensor([0, 1, -1, 2, -3, 7, 100, -128], dtype=torch.int8)
BYTES = torch.tensor([0, 1, 2, 127, 128, 255], dtype=torch.uint8)
TRUTHS = torch.tensor([True, False])
COMPLEX = torch.tensor([0j, 1 + 2j, -2 + 0j, 0.5j, 3 - 4j])


@pytest.mark.parametrize(
    "function",
    [torch.add, torch.mul, torch.div, torch.floor_divide, torch.fmod, torch.remainder, torch.sub, torch.rsub],
)
@pytest.mark.parametrize(
    ("left", "right"),
    [
        (FLOATS, FLOATS),
        (FLOATS.bfloat16(), FLOATS.bfloat16()),
        (INTEGERS, INTEGERS[1:]),
        (BYTES, INTEGERS[1:]),
        (INTEGERS, FLOATS.half()),
    ],
    ids=["float", "bfloat16", "int", "mixed ints", "int and half"],
)
def test_a_table_of_pairs(function, left, right):
    check(function, left[:, None], right[None])


def test_bools_add_to_or_and_multiply_to_and():
    check(lambda x, y: (x + y, x * y, torch.add(x, y, alpha=False)), TRUTHS[:, None], TRUTHS[None])


def test_number_out_of_range_of_the_dtype_wraps():
    check(lambda x: (x + (-1), x * 300, x - 256), BYTES)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_rounds_numbers_in_sums_but_not_in_products(dtype):
    x = torch.randn(512).to(dtype)
    check(lambda x, y: (x + 0.3, 0.3 - x, torch.add(x, y, alpha=0.3)), x, x.flip(0), rtol=0, atol=0)
    check(lambda x: (x * 0.3, x * torch.tensor(0.3), torch.fmod(x, 0.3)), x, rtol=0, atol=0)


def test_half_precision_floor_division_rounds_before_truncation():
    x, y = torch.randn(2048).bfloat16() * 50, torch.randn(2048).bfloat16()
    check(lambda x, y: torch.div(x, y, rounding_mode="trunc"), x, y, rtol=0, atol=0)
    check(lambda x: torch.div(x, 0.3, rounding_mode="trunc"), x, rtol=0, atol=0)


@pytest.mark.parametrize(("dtype", "by"), [(torch.float32, 61), (torch.float32, 41.0), (torch.float64, 49)], ids=str)
def test_quotients_that_are_integers_are_exact(dtype, by):
    x = torch.arange(200, dtype=dtype) * by
    check(lambda x: ((x / by).floor(), torch.div(x, by, rounding_mode="trunc"), x // by), x, rtol=0, atol=0)
    check(lambda x, y: (x / y).floor(), x, torch.tensor(by, dtype=dtype), rtol=0, atol=0)


def test_scale_of_a_sum():
    check(
        lambda x, y: (torch.add(x, y, alpha=0.3), torch.sub(x, y, alpha=2), torch.rsub(x, y, alpha=3)),
        FLOATS,
        FLOATS + 1,
    )


def test_quotients_of_complex_numbers():
    check(lambda x, y: (x / y, x.reciprocal(), y / 2j, torch.sgn(x), x.abs()), COMPLEX[:, None], COMPLEX[None, 1:])


def test_the_sign_of_nan_is_zero():
    check(lambda x: (torch.sign(x), torch.sgn(x)), FLOATS)


def test_the_sign_of_a_negative_zero_is_zero():
    check(
        lambda x: (1 / torch.sign(x), 1 / torch.sgn(x), 1 / torch.sign(x.bfloat16())), torch.tensor([-0.0, 0.0, -2.0])
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64], ids=str)
def test_nan_and_infinity_times_false_are_nan(dtype):
    """XLA would compute 0."""
    x = torch.tensor([float("nan"), float("inf"), -1.0, 5.0]).to(dtype)
    mask = torch.tensor([False, False, False, True])
    check(lambda x, m: (x * m, x * m.to(x.dtype), (x * m.to(x.dtype)).sum(), x * m.to(x.dtype).unsqueeze(0)), x, mask)
    if not dtype.is_complex:
        check(lambda x, m: (m.to(x.dtype) @ x, x * (x > 2), 1 / (x * m)), x, mask)


def test_a_power_of_bools_is_bool():
    check(lambda x: (x**True, x**False, x**2), TRUTHS)


def test_signs_of_integers_and_bools():
    check(lambda x, y, z: (torch.sign(x), torch.sign(y), torch.sign(z)), INTEGERS, BYTES, TRUTHS)


def test_absolute_value_of_the_least_integer_wraps():
    check(lambda x, y: (x.abs(), -x, -y), INTEGERS, BYTES)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8], ids=str)
def test_common_divisors_and_multiples(dtype):
    x = torch.tensor([0, 4, 6, 9, 100]).to(dtype)
    check(lambda x, y: (torch.gcd(x, y), torch.lcm(x, y)), x[:, None], (-x if dtype == torch.int64 else x)[None])


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64], ids=str)
def test_common_divisors_and_multiples_of_extreme_integers(dtype):
    limits = torch.iinfo(dtype)
    x = torch.tensor([limits.min, limits.min + 2, limits.max, limits.max // 2, 0, 1, 6, 100], dtype=dtype)
    check(torch.gcd, x[:, None], x[None])
    y = torch.tensor([-6, 0, 3, 10, 100]).to(dtype)
    check(torch.lcm, x[:, None], y[None])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_interpolation_is_exact_at_both_ends(dtype):
    start, end = torch.tensor([1e8, 1.0, 0.1]).to(dtype), torch.tensor([1.0, 1e8, 0.3]).to(dtype)
    check(lambda s, e: [torch.lerp(s, e, w) for w in (0.0, 0.3, 0.5, 0.7, 1.0)], start, end, rtol=0, atol=0)
    check(torch.lerp, start, end, torch.tensor([0.2, 0.9, 1.0]).to(dtype))


def test_products_and_quotients_that_are_added():
    x, y, z = torch.randn(3), torch.randn(2, 1), torch.randn(2, 3)
    check(lambda *t: (torch.addcmul(*t, value=0.5), torch.addcdiv(*t, value=-2)), x, y, z, grad=True)
    check(lambda t: torch.addcmul(t, t, t, value=3), INTEGERS)
    check(lambda *t: torch.addcmul(*t, value=0.3), x.bfloat16(), y.bfloat16(), z.bfloat16())


def test_degrees_of_integers():
    check(lambda x: (torch.rad2deg(x), torch.deg2rad(x)), INTEGERS)


def test_gradients_at_zeros():
    x = torch.tensor([0.0, -0.0, 1.0, -2.0])
    check(lambda x: (x.abs(), x * x, x / 3, torch.sign(x), x.remainder(0.7), x.fmod(0.7)), x, grad=True)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8])
@pytest.mark.parametrize(
    "function",
    [
        torch.floor_divide,
        torch.remainder,
        torch.fmod,
        lambda a, b: torch.div(a, b, rounding_mode="trunc"),
        lambda a, b: torch.div(a, b, rounding_mode="floor"),
        lambda a, b: 7 // b,
        lambda a, b: 7 % b,
    ],
    ids=["floor_divide", "remainder", "fmod", "trunc", "floor", "7 //", "7 %"],
)
def test_integer_division_by_zero_gives_nan(function, dtype: torch.dtype):
    a, b = torch.tensor([7, 100, 5], dtype=dtype), torch.tensor([0, 2, 0], dtype=dtype)
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        function(a, b)
    with jax.enable_x64(True):
        found = jax.jit(jtbridge.wrap(function))(*map(jtbridge.to_jax, (a, b)))
    invalid = invalid_value(found.dtype)
    assert found.tolist() == [invalid, function(a[1], b[1]).item(), invalid]
