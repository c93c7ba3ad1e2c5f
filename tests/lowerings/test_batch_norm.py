"""Normalization over a batch."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from .harness import check

TOLERANCE: dict[str, Any] = {"rtol": 1e-8, "atol": 1e-8}
MEAN, VARIANCE = torch.tensor([0.3, -1.0, 2.0]), torch.tensor([0.5, 1.0, 0.1])


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("shape", [(4, 3), (4, 3, 5), (2, 3, 2, 4)])
@pytest.mark.parametrize("parameters", [0, 2])
def test_normalization_by_batch_statistics(shape, parameters):
    weights = [torch.randn(3).double() for _ in range(parameters)]
    x = torch.randn(shape).double()
    check(lambda x, *w: F.batch_norm(x, None, None, *w, training=True), x, *weights, grad=True, **TOLERANCE)


@pytest.mark.parametrize("shape", [(4, 3), (2, 3, 2, 4), (0, 3)])
def test_normalization_by_running_statistics(shape):
    mean, variance = MEAN.double(), VARIANCE.double()
    x, w, b = torch.randn(shape).double(), torch.randn(3).double(), torch.randn(3).double()
    check(F.batch_norm, x, mean, variance, w, b, **TOLERANCE)
    check(lambda x, w, b: F.batch_norm(x, mean, variance, w, b), x, w, b, grad=True, **TOLERANCE)


@pytest.mark.parametrize("training", [True, False])
def test_running_moments_after_a_batch(training):
    def run(x, mean, variance):
        return torch.ops.aten._native_batch_norm_legit_functional(x, None, None, mean, variance, training, 0.3, 1e-5)

    check(run, torch.randn(5, 3), MEAN, VARIANCE)


def test_running_moments_after_an_update():
    def run(x, weight, mean, variance):
        return torch.ops.aten._batch_norm_with_update_functional(x, weight, weight, mean, variance, 0.3, 1e-5)

    check(run, torch.randn(5, 3, 2), torch.randn(3), MEAN, VARIANCE)


def test_bfloat16_with_float32_moments():
    check(lambda x, m, v: F.batch_norm(x, m, v), torch.randn(5, 3).bfloat16(), MEAN, VARIANCE)


def test_saved_moments_are_empty_without_training():
    def run(x, mean, variance):
        return torch.ops.aten._native_batch_norm_legit_no_training(x, None, None, mean, variance, 0.3, 1e-5)

    check(run, torch.randn(5, 3), MEAN, VARIANCE)
