"""Comparisons, tests and logic where torch's semantics differ from JAX's."""

import operator

import pytest
import torch

from .harness import check

NAN, INF = float("nan"), float("inf")
FLOATS = torch.tensor([NAN, INF, -INF, 0.0, -0.0, 0.5, -2.5, 6.0])
INTEGERS = torch.tensor([0, 1, -1, 2, -3, 7, 100, -128], dtype=torch.int8)
BYTES = torch.tensor([0, 1, 2, 127, 128, 255], dtype=torch.uint8)
COMPLEX = torch.tensor([0j, 1 + 2j, complex(NAN, 0), complex(0, INF)])


@pytest.mark.parametrize("compare", [operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge])
def test_comparisons(compare):
    check(lambda x, y: (compare(x, y), compare(x, 0), compare(x, 0.5)), FLOATS[:, None], FLOATS[None])
    check(lambda x, y: (compare(x, y), compare(y, x), compare(x, -1), compare(x, 1.5)), INTEGERS[:, None], BYTES[None])


def test_a_number_is_rounded_to_the_tensors_dtype():
    check(lambda x: (x == 0.1, x >= 0.1, x > 0.1), torch.tensor([0.1]).bfloat16())
    check(lambda x, y: (x > y, x == y), torch.tensor([0.1]).bfloat16(), torch.tensor(0.1))


def test_large_integers_compare_with_floats_as_floats():
    check(lambda x, y: (x == y, x > y, x == 16777216.0), torch.tensor([16777217, 16777216]), torch.tensor([16777216.0]))


def test_eq_and_ne_of_complex_numbers():
    check(lambda x, y: (x == y, x != y), COMPLEX[:, None], COMPLEX[None])


@pytest.mark.parametrize(
    "x", [FLOATS, FLOATS.bfloat16(), INTEGERS, BYTES, INTEGERS > 1, COMPLEX], ids=lambda x: str(x.dtype)
)
def test_unary_predicates(x):
    check(lambda x: (torch.isnan(x), torch.isinf(x), torch.isfinite(x)), x)
    if not x.is_complex():
        check(lambda x: (torch.isposinf(x), torch.isneginf(x), torch.signbit(x)), x)


@pytest.mark.parametrize("x", [FLOATS, INTEGERS, COMPLEX], ids=lambda x: str(x.dtype))
def test_logical_operators_treat_nonzero_as_true(x):
    functions = (torch.logical_and, torch.logical_or, torch.logical_xor)
    check(lambda x, y: (*(f(x, y) for f in functions), torch.logical_not(x)), x[:, None], torch.tensor([0, 2]))


@pytest.mark.parametrize(
    "pair", [(INTEGERS, BYTES), (BYTES, BYTES), (BYTES > 1, BYTES > 2)], ids=["mixed", "uint8", "bool"]
)
def test_bitwise_operators(pair):
    check(lambda x, y: (x & y, x | y, x ^ y, ~x, x & 1), pair[0][:, None], pair[1][None])


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.uint8], ids=str)
def test_shifts_by_more_bits_than_there_are(dtype):
    x = torch.tensor([0, 1, 5, 100, 127]).to(dtype)
    x = x if dtype == torch.uint8 else torch.cat([x, -x])
    by = torch.tensor([0, 1, 6, 7, 8, 63, 64, 100]).to(dtype)
    by = by if dtype == torch.uint8 else torch.cat([by, -by])
    check(lambda x, y: (x << y, x >> y, x >> 2, 1 << y), x[:, None], by[None])
