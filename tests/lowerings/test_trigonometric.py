"""Trigonometric and hyperbolic functions at the edges of their domains."""

import pytest
import torch

from .harness import check

NAN, INF = float("nan"), float("inf")
FLOATS = torch.tensor([NAN, INF, -INF, 0.0, -0.0, 0.5, -0.5, 1.0, -1.0, 2.0, -3.0, 20.0, -20.0, 100.0])
COMPLEX = torch.tensor([0j, 1 + 2j, -2 + 0j, complex(-2, -0.0), complex(2, -0.0), 0.5j, 3 - 4j, -0.5 - 0.3j])

FUNCTIONS = ["sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh"]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_one_value(name):
    function = getattr(torch, name)
    integers = torch.tensor([0, 1, -1, 2], dtype=torch.int8)
    check(
        lambda *xs: [function(x) for x in xs],
        FLOATS,
        FLOATS.bfloat16(),
        FLOATS.double(),
        integers,
        integers > 0,
        COMPLEX,
    )


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients(name):
    x = torch.tensor([1.5, 2.0]) if name == "acosh" else torch.tensor([0.0, 0.3, -0.6])
    check(getattr(torch, name), x, grad=True)


def test_atan2_uses_the_signs_of_both_arguments():
    axis = torch.tensor([0.0, -0.0, 1.0, -1.0, INF, -INF, NAN])
    check(torch.atan2, axis[:, None], axis[None])
    check(torch.atan2, torch.tensor([1, -1, 0]), torch.tensor([0, 0, -1]))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@pytest.mark.parametrize("name", ["asin", "acos", "atan", "asinh", "acosh", "atanh"])
def test_sides_of_a_branch_cut(name, dtype):
    parts = torch.tensor([0.0, -0.0, 0.5, -0.5, 2.0, -3.0, 1e30, -1e30], dtype=torch.float64)
    real, imag = (part.flatten() for part in torch.meshgrid(parts, parts, indexing="ij"))
    check(getattr(torch, name), torch.complex(real, imag).to(dtype))
