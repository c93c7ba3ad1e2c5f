"""The CTC loss over lengths that differ, labels that repeat, and labellings that do not fit."""

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import _get_current_dispatch_mode

import jtbridge
from jtbridge.capture.modes.overrides import OverrideMode

from .harness import check

TIGHT = {"rtol": 1e-4, "atol": 1e-5}
SCORES = torch.randn(6, 3, 5, generator=torch.Generator().manual_seed(0)) * 2
TARGETS = torch.tensor([[1, 1, 2], [3, 0, 0], [4, 2, 4]])
BLANK_LAST = torch.tensor([[1, 1, 2], [3, 2, 0], [0, 2, 0]])


def _run(scores, targets, *lengths: Any, **options: Any):
    traced = _get_current_dispatch_mode() is not None  # the expected values are torch's own
    with OverrideMode() if traced else contextlib.nullcontext():
        return F.ctc_loss(scores.log_softmax(-1), targets, *lengths, **options)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_reductions(reduction):
    check(lambda x, y: _run(x, y, (6, 4, 5), (3, 1, 2), reduction=reduction), SCORES, TARGETS, grad=True, **TIGHT)


def test_targets_in_one_row():
    targets = torch.tensor([1, 1, 2, 3, 4, 2])
    check(lambda x, y: _run(x, y, (6, 4, 5), (3, 1, 2)), SCORES, targets, grad=True, **TIGHT)


def test_lengths_as_tensors():
    lengths = torch.tensor([6, 4, 5]), torch.tensor([3, 1, 0])
    check(_run, SCORES, TARGETS, *lengths, grad=True, **TIGHT)
    check(_run, SCORES, torch.tensor([1, 1, 2, 3]), *lengths, grad=True, **TIGHT)


def test_another_blank():
    check(lambda x, y: _run(x, y, (6, 6, 6), (3, 3, 3), blank=4), SCORES, BLANK_LAST, grad=True, **TIGHT)


@pytest.mark.parametrize("zero", [False, True])
def test_targets_longer_than_the_input(zero):
    run = lambda x, y: _run(x, y, (3, 1, 6), (3, 1, 2), reduction="none", zero_infinity=zero)  # noqa: E731
    check(run, SCORES, TARGETS, grad=True, **TIGHT)


def test_unlikely_labellings_in_float64():
    x = SCORES.double() * 200
    check(lambda x, y: _run(x, y, (6, 4, 5), (3, 1, 2)), x, TARGETS, grad=True)


def test_without_a_batch_axis():
    check(lambda x, y: _run(x, y, (6,), (3,)), SCORES[:, 0], TARGETS[0], grad=True, **TIGHT)


def test_the_replacement_agrees_with_torch_when_torch_runs_it():
    x = SCORES.log_softmax(-1).requires_grad_()
    how: Any = (TARGETS, (6, 4, 5), (2, 1, 2))
    expected = F.ctc_loss(x, *how)
    with OverrideMode():
        found = F.ctc_loss(x, *how)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found, x), torch.autograd.grad(expected, x))


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize(
    ("targets", "inputs", "lengths"),
    [
        ([1, 2, 3, 4], [6, 6], [3, 3]),
        ([1, 2, 3, 4], [6, 6], [1, 2]),
        ([1, 2, 3, 4], [6, 6], [5, -1]),
        ([[1, 2], [3, 3]], [6, 6], [3, 1]),
        ([[1, 2], [3, 3]], [6, 6], [2, -2]),
        ([[1, 2], [3, 3]], [-1, 6], [2, 2]),
        ([[1, 2], [3, 3]], [7, 6], [2, 2]),
    ],
)
def test_lengths_that_torch_refuses_give_nan(targets, inputs, lengths, zero):
    others = [jnp.array(x) for x in (targets, inputs, lengths)]
    scores = jnp.asarray(SCORES[:, :2])
    f = jtbridge.wrap(lambda x, *others: F.ctc_loss(x.log_softmax(-1), *others, zero_infinity=zero))
    with pytest.raises(RuntimeError, match="Expected"):
        f(scores, *others)
    for given in (jax.jit(jax.value_and_grad(f)), jax.jit(lambda x, *_: jax.value_and_grad(f)(x, *others))):
        value, gradient = given(scores, *others)
        assert jnp.isnan(value)
        assert jnp.isnan(gradient).any()
