"""Backwards that branch on data: both ways are in the program, and the condition takes one."""

from __future__ import annotations

import jax
import numpy as np
import pytest
import torch

import jtbridge
from jtbridge import errors


class SkipsOnes(torch.autograd.Function):
    """As kernels' authors write it: a gradient of ones needs no product. The ways differ by more than that here."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        if torch.equal(grad, torch.ones_like(grad)):
            return 2 * x + 100
        if (grad > 5).any():
            return 3 * x * grad
        return 2 * x * grad


class Shapes(SkipsOnes):
    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return x.sum() if (grad > 0).all() else x


class Loops(SkipsOnes):
    @staticmethod
    def backward(ctx, grad):
        while bool((grad < 100).all()):
            grad = grad * 2
        return grad


X = np.float32([1.0, -2.0, 3.0])


@pytest.mark.parametrize("factor", [1.0, 2.0, 7.0, -1.0])
def test_every_way_is_torchs(factor):
    tensor = torch.from_numpy(X).clone().requires_grad_()
    (want,) = torch.autograd.grad(SkipsOnes.apply(tensor), tensor, torch.full((3,), factor))
    f = jtbridge.wrap(SkipsOnes.apply, backend="xla")
    ct = np.full(3, factor, np.float32)
    np.testing.assert_allclose(jax.jit(lambda x, ct: jax.vjp(f, x)[1](ct)[0])(X, ct), want)
    # Of a batch every row goes its own way.
    cts = np.stack([np.full(3, c, np.float32) for c in (1.0, factor)])
    got = jax.vmap(lambda ct: jax.vjp(f, X)[1](ct)[0])(cts)
    np.testing.assert_allclose(got[0], 2 * X + 100)
    np.testing.assert_allclose(got[1], want)


@pytest.mark.parametrize("function", [Shapes, Loops])
def test_ways_that_cannot_be_one_program_are_refused(function):
    f = jtbridge.wrap(function.apply, backend="xla")
    with pytest.raises(errors.TranslationError):
        jax.grad(lambda x: f(x).sum())(X)
