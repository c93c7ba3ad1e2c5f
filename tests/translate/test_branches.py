"""Functions and backwards that branch on data: the program contains both branches, and the condition selects one."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jtbridge
from jtbridge import errors


class SkipsOnes(torch.autograd.Function):
    """As in the code of kernels: a gradient of ones needs no product. Here the branches differ by more than that."""

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
def test_every_path_matches_torch(factor):
    tensor = torch.from_numpy(X).clone().requires_grad_()
    (want,) = torch.autograd.grad(SkipsOnes.apply(tensor), tensor, torch.full((3,), factor))
    f = jtbridge.wrap(SkipsOnes.apply, backend="xla")
    ct = np.full(3, factor, np.float32)
    np.testing.assert_allclose(jax.jit(lambda x, ct: jax.vjp(f, x)[1](ct)[0])(X, ct), want)
    # In a batch, every row takes its own branch.
    cts = np.stack([np.full(3, c, np.float32) for c in (1.0, factor)])
    got = jax.vmap(lambda ct: jax.vjp(f, X)[1](ct)[0])(cts)
    np.testing.assert_allclose(got[0], 2 * X + 100)
    np.testing.assert_allclose(got[1], want)


@pytest.mark.parametrize("function", [Shapes, Loops])
def test_paths_without_a_common_program_are_refused(function):
    f = jtbridge.wrap(function.apply, backend="xla")
    with pytest.raises(errors.TranslationError):
        jax.grad(lambda x: f(x).sum())(X)


def test_function_with_branches_is_translated():
    f = jtbridge.wrap(lambda x: x * 2 if torch.equal(x, x.abs()) else x.sin())
    text = jax.jit(f).lower(X).as_text()
    assert "custom_call" not in text
    assert "stablehlo.sine" in text
    assert jtbridge.explain(f, jnp.asarray(X)).backend == "xla"


def test_rows_of_a_batch_take_separate_branches():
    f = jtbridge.wrap(lambda x: x * 2 if 3 in x else x.sin(), backend="xla")
    rows = np.stack([X, X + 1, -X])
    np.testing.assert_allclose(jax.vmap(f)(rows), np.stack([X * 2, np.sin(X + 1), np.sin(-X)]), rtol=1e-6)


def test_branch_that_raises_gives_nan():
    def f(x):
        if torch.is_nonzero(x.isnan().any()):
            raise ValueError("no numbers")
        return x * 2 if x.sum() else x

    g = jax.jit(jtbridge.wrap(f, backend="xla"))
    np.testing.assert_array_equal(g(X), X * 2)
    assert np.isnan(g(X * np.nan)).all()


def _shapes(x):
    return x[:2].sum() if x[0] > 0 else x


def _trees(x):
    return (x, x) if x[0] > 0 else x


@pytest.mark.parametrize("function", [_shapes, _trees])
def test_results_of_different_types_are_refused(function):
    with pytest.raises(errors.JtbridgeError):
        jax.jit(jtbridge.wrap(function, backend="xla"))(X)


@pytest.mark.filterwarnings("ignore::jtbridge.errors.CalledWarning")
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_tracing_error_after_a_branch_is_not_a_value_check(sign: float):
    def fn(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        row = y[i]
        if x.sum() > 0:
            row.add_(1)
        return y

    x, i = jnp.arange(1.0, 4.0) * sign, jnp.asarray(1)
    want = fn(torch.from_numpy(np.array(x)), torch.tensor(1))
    np.testing.assert_allclose(jax.jit(jtbridge.wrap(fn))(x, i), want)
