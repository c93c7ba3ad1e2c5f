"""Normalizations of layers, groups and slices."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from .harness import check

TOLERANCE: dict[str, Any] = {"rtol": 1e-8, "atol": 1e-8}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("shape", [(6,), (4, 6), (0, 4, 6)])
@pytest.mark.parametrize("parameters", [0, 1, 2])
def test_layer_norm(shape, parameters):
    weights = [torch.randn(shape[-1:]).double() for _ in range(parameters)]
    check(
        lambda x, *w: F.layer_norm(x, x.shape[-1:], *w), torch.randn(shape).double(), *weights, grad=True, **TOLERANCE
    )


def test_layer_norm_gives_its_moments():
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        check(lambda x: torch.native_layer_norm(x, (4, 5), None, None, 1e-5), torch.randn(3, 4, 5).to(dtype))


def test_layer_norm_of_bfloat16_with_float32_parameters():
    x, w = torch.randn(3, 8).bfloat16(), torch.randn(8)
    check(lambda x, w, b: F.layer_norm(x, (8,), w, b), x, w, w)


def test_variance_far_from_zero_does_not_cancel():
    check(lambda x: F.layer_norm(x, (64,)), torch.randn(2, 64) + 1e4, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("parameters", [0, 2])
@pytest.mark.parametrize("shape", [(2, 6), (2, 6, 3), (2, 6, 2, 3)])
def test_group_norm(shape, parameters):
    weights = [torch.randn(6).double() for _ in range(parameters)]
    check(lambda x, *w: F.group_norm(x, 3, *w), torch.randn(shape).double(), *weights, grad=True, **TOLERANCE)


def test_group_norm_gives_its_moments():
    check(lambda x: torch.native_group_norm(x, None, None, 2, 6, 5, 3, 1e-5), torch.randn(2, 6, 5))


def test_rms_norm():
    check(
        lambda x, w: F.rms_norm(x, (5,), w), torch.randn(3, 5).double(), torch.randn(5).double(), grad=True, **TOLERANCE
    )


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_weight_norm(dim):
    v = torch.randn(3, 4, 5).double()
    g = torch.rand([size if axis == dim else 1 for axis, size in enumerate(v.shape)]).double()
    check(lambda v, g: torch._weight_norm(v, g, dim), v, g, grad=True, **TOLERANCE)


@pytest.mark.parametrize("p", [1, 2, 0.5, torch.inf])
def test_renorm(p):
    check(lambda x: torch.renorm(x, p, -1, 1.5), torch.randn(3, 4, 2).double(), grad=True, **TOLERANCE)
    check(lambda x: torch.renorm(x, p, 0, 5), torch.randn(3, 4, dtype=torch.complex64))
