"""Losses against class numbers: ignored targets, weights, reductions and margins."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.nn.modules.linear_cross_entropy_options import LinearCrossEntropyOptions

import jtbridge

from .harness import check

X = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
Y = torch.tensor([0, 4, 2, -100])
W = torch.tensor([0.5, 2.0, 0.0, 1.0, 3.0])
REDUCTIONS = pytest.mark.parametrize("reduction", ["none", "mean", "sum"])


@REDUCTIONS
def test_negative_log_likelihood(reduction):
    check(lambda x, y: F.nll_loss(x, y, W, reduction=reduction), X, Y, grad=True)
    check(lambda x, y: F.nll_loss(x, y, reduction=reduction, ignore_index=2), X[:3], Y[:3], grad=True)
    check(lambda x, y: F.nll_loss(x, y, reduction=reduction), X[0], Y[1], grad=True)


@REDUCTIONS
def test_spatial_dimensions(reduction):
    x = torch.randn(2, 3, 4, 2, generator=torch.Generator().manual_seed(0))
    y = torch.arange(16).reshape(2, 4, 2) % 4 - 1
    w = W[:3] + 0.1
    check(lambda x, y: F.cross_entropy(x, y, w, reduction=reduction, ignore_index=-1), x, y, grad=True)


def test_all_ignored():
    ignored = torch.full((4,), -100)
    check(lambda x, y: (F.nll_loss(x, y), F.nll_loss(x, y, reduction="sum")), X, ignored, grad=True)


def test_empty_input():
    check(lambda x, y: (F.nll_loss(x, y), F.nll_loss(x, y, reduction="none")), X[:0], Y[:0], grad=True)


def test_total_weight_matches_torch():
    for reduction in (0, 1, 2):
        check(lambda x, y, w, r=reduction: torch.ops.aten.nll_loss_forward(x, y, w, r, -100), X, Y, W)


def test_infinite_scores_of_others_do_not_matter():
    x = X.clone()
    x[0, 1:] = -torch.inf
    x[3, :] = torch.nan
    check(F.nll_loss, x, Y, grad=True)


def test_smoothed_and_probable_labels():
    check(lambda x, y: F.cross_entropy(x, y, W, label_smoothing=0.1), X, Y, grad=True)
    probable = X.softmax(1)
    check(lambda x: F.cross_entropy(x, probable, W), X, grad=True)


@REDUCTIONS
@pytest.mark.parametrize("p", [1, 2])
def test_margin(reduction, p):
    y = torch.tensor([0, 4, 2, 1])
    check(lambda x, y: F.multi_margin_loss(x, y, p, 0.7, W, reduction=reduction), X, y, grad=True)
    check(lambda x, y: F.multi_margin_loss(x, y, p, reduction=reduction), X[0], y[1:2], grad=True)


@REDUCTIONS
def test_margin_of_several_labels(reduction):
    y = torch.tensor([[3, 0, -1, 1, 2], [-1, 0, 1, 2, 3], [0, 1, 2, 3, 4], [2, 2, 0, -1, -1]])
    check(lambda x, y: F.multilabel_margin_loss(x, y, reduction=reduction), X, y, grad=True)
    if reduction != "none":  # for "none", torch's shape inference gives a wrong shape
        check(lambda x, y: F.multilabel_margin_loss(x, y, reduction=reduction), X[0], y[0], grad=True)
    check(lambda x, y: torch.ops.aten.multilabel_margin_loss_forward(x, y, 0), X, y)


@REDUCTIONS
def test_chunked_linear_cross_entropy(reduction):
    options = LinearCrossEntropyOptions(batch_chunk_size=3)
    linear, y = torch.randn(6, 5), torch.tensor([0, 4, 5, -100])
    weight = torch.rand(6)
    run = lambda x, w, c: F.linear_cross_entropy(x, w, y, weight=c, reduction=reduction, options=options)  # noqa: E731
    check(run, X, linear, weight, rtol=1e-4, atol=1e-5)


@REDUCTIONS
@pytest.mark.filterwarnings("ignore::jtbridge.errors.CalledWarning")  # torch has no second derivative of it
@pytest.mark.parametrize("program", ["value", "grad", "jvp", "vmap"])
def test_margins_of_one_sample_match_eager_calls(reduction, program):
    losses = (
        lambda x: F.multilabel_margin_loss(x, torch.tensor([3, 0, -1, 1, 2]), reduction=reduction),
        lambda x: F.multi_margin_loss(x, torch.tensor(2), weight=W + 0.1, reduction=reduction),
        lambda x: F.multi_margin_loss(x, torch.tensor([2]), p=2, reduction=reduction),
    )
    x = jnp.asarray(X)
    for f in map(jtbridge.wrap, losses):
        run = {
            "value": lambda x, f=f: f(x[0]),
            "grad": jax.grad(lambda x, f=f: f(x[0]).sum()),
            "jvp": lambda x, f=f: jax.jvp(f, (x[0],), (x[1],)),
            "vmap": jax.vmap(f),
        }[program]
        got, expected = jax.jit(run)(x), run(x)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-5, 1e-6, strict=True), got, expected)
