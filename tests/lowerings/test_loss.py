"""Losses: kinks, reductions, empty inputs and numbers at the ends of their ranges."""

import pytest
import torch
import torch.nn.functional as F

from .harness import check

NAN, INF = float("nan"), float("inf")
X = torch.tensor([[-2.0, -1.0, -0.5, 0.0, 0.5], [1.0, 2.0, 3.0, -0.0, 0.25]])
ZERO = torch.zeros(2, 5)
REDUCTIONS = pytest.mark.parametrize("reduction", ["none", "mean", "sum"])


@REDUCTIONS
def test_losses_at_points_without_a_derivative(reduction):
    def run(x, y):
        return (
            F.mse_loss(x, y, reduction=reduction),
            F.huber_loss(x, y, reduction=reduction, delta=0.5),
            F.smooth_l1_loss(x, y, reduction=reduction, beta=0.5),
            F.smooth_l1_loss(x, y, reduction=reduction, beta=0.0),
        )

    check(run, X, ZERO, grad=True)


def test_smooth_l1_without_a_smooth_part():
    check(lambda g, x, y: torch.ops.aten.smooth_l1_loss_backward(g, x, y, 1, 0.0), torch.tensor(2.0), X, ZERO)


def test_empty_input():
    empty = torch.zeros(0, 3)
    check(lambda x, y: (F.mse_loss(x, y), F.huber_loss(x, y, reduction="sum")), empty, empty, grad=True)
    check(lambda x, y: (F.huber_loss(x, y), F.smooth_l1_loss(x, y)), empty, empty, grad=True)


def test_nan_and_infinity():
    x = torch.tensor([NAN, INF, -INF, 1.0])
    check(lambda x, y: (F.huber_loss(x, y, reduction="none"), F.smooth_l1_loss(x, y, reduction="none")), x, x.flip(0))


@REDUCTIONS
def test_binary_cross_entropy(reduction):
    x, y = torch.tensor([0.0, 1.0, 0.25, 1.0, 1e-30]), torch.tensor([0.0, 1.0, 0.5, 0.0, 1.0])
    w = torch.tensor([1.0, 2.0, 0.5, 3.0, 1.0])
    check(lambda x, y: F.binary_cross_entropy(x, y, reduction=reduction), x, y)
    check(lambda x: F.binary_cross_entropy(x.sigmoid(), y, w, reduction=reduction), X[0], grad=True)


@REDUCTIONS
def test_binary_cross_entropy_of_scores(reduction):
    x, y = torch.tensor([-200.0, 200.0, 0.0, 3.0, -INF]), torch.tensor([0.0, 1.0, 0.5, 0.0, 0.0])
    w = torch.tensor([1.0, 2.0, 0.5, 3.0, 1.0])
    run = lambda x: F.binary_cross_entropy_with_logits(x, y, w, reduction=reduction, pos_weight=w + 1)  # noqa: E731
    check(run, x)
    check(run, X[0], grad=True)


def test_soft_margin():
    y = torch.where(X > 0, 1.0, -1.0)
    check(lambda x: F.soft_margin_loss(x, y), X, grad=True)
    check(lambda x, y: F.soft_margin_loss(x, y, reduction="none"), torch.tensor([-100.0, 100.0]), torch.ones(2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(dtype):
    x = torch.full((5000,), 0.1, dtype=dtype)
    check(lambda x, y: F.mse_loss(x, y, reduction="mean"), x, torch.zeros_like(x), rtol=1e-2, atol=1e-3)
