"""Backwards that are not linear in their cotangents have no forward derivative; linear ones have."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.nn import functional

import jtbridge
from jtbridge.errors import DifferentiationError, TranslationError

X = jnp.array([0.2, -0.5, 1.5])
DX = jnp.array([0.1, 1.0, 2.0])
pytestmark = [
    pytest.mark.filterwarnings("ignore::jtbridge.errors.CalledWarning"),
    pytest.mark.filterwarnings("ignore::jtbridge.errors.SequentialVmapWarning"),
]
Backward = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

NONLINEAR: dict[str, Backward] = {
    "clipped": lambda g, x: g.clamp(-1, 1),
    "normalised": lambda g, x: g / (g.norm() + 1e-12),
    "sign": lambda g, x: g.sign(),
    "rounded": lambda g, x: (g / 3).round() * 3,
    "masked by itself": lambda g, x: g * (g.abs() < 1),
    "selected by itself": lambda g, x: torch.where(g.abs() < 1, g, 0.0),
    "squared": lambda g, x: g * g,
    "with weight decay": lambda g, x: g + 0.1 * x,
}
# With the factor of each element.
LINEAR: dict[str, tuple[Backward, list[float]]] = {
    "reversed": (lambda g, x: -0.5 * g, [-0.5] * 3),
    "masked": (lambda g, x: g * (x > 0), [1, 0, 1]),
    "selected": (lambda g, x: torch.where(x > 0, g, 0.1 * g), [1, 0.1, 1]),
    "filled": (lambda g, x: g.masked_fill(x < 0, 0.0), [1, 0, 1]),
    "without NaN": (lambda g, x: torch.nan_to_num(g), [1] * 3),
    "clipped far away": (lambda g, x: g.clamp(-50, 50), [1] * 3),
}


def _own_function(backward: Backward) -> Callable[[torch.Tensor], torch.Tensor]:
    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            return backward(g, *ctx.saved_tensors)

    return Own.apply


def _with_setup(backward: Backward) -> Callable[[torch.Tensor], torch.Tensor]:
    class Own(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x):
            return x.clone()

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(inputs[0])

        @staticmethod
        def backward(ctx, g):
            return backward(g, *ctx.saved_tensors)

    return Own.apply


def _hook(backward: Backward) -> Callable[[torch.Tensor], torch.Tensor]:
    def hooked(x):
        y = x.clone()
        if y.requires_grad:
            y.register_hook(lambda g: backward(g, x.detach()))
        return y

    return hooked


forms = pytest.mark.parametrize("form", [_own_function, _with_setup, _hook], ids=["function", "setup", "hook"])
transforms = pytest.mark.parametrize(
    "transform",
    [lambda f: jax.jvp(f, (X,), (DX,))[1], lambda f: jax.jacfwd(f)(X) @ DX, lambda f: jax.linearize(f, X)[1](DX)],
    ids=["jvp", "jacfwd", "linearize"],
)


@forms
@transforms
@pytest.mark.parametrize("name", NONLINEAR)
def test_a_nonlinear_backward_has_no_forward_derivative(name: str, transform: Callable, form: Callable):
    own = form(NONLINEAR[name])
    f = jtbridge.wrap(lambda x: 3 * own(x))
    with pytest.raises(DifferentiationError, match="not linear in its cotangent"):
        transform(f)
    for backend in ("auto", "dlpack"):
        called = jtbridge.wrap(lambda x: 3 * own(x), backend=backend)
        with pytest.raises(jax.errors.JaxRuntimeError, match="not linear in its cotangent"):
            jax.block_until_ready(jax.jit(lambda f=called: transform(f))())


@forms
@transforms
@pytest.mark.parametrize("name", LINEAR)
def test_a_linear_backward_has_a_forward_derivative(name: str, transform: Callable, form: Callable):
    backward, factors = LINEAR[name]
    own = form(backward)
    for backend in ("auto", "dlpack"):
        f = jtbridge.wrap(lambda x: 3 * own(x), backend=backend)
        want = 3 * np.array(factors) * np.array(DX)
        np.testing.assert_allclose(transform(f), want, rtol=1e-6)
        np.testing.assert_allclose(jax.jit(lambda f=f: transform(f))(), want, rtol=1e-6)


@forms
def test_clipped_gradient_has_a_hessian_by_reverse_mode_only(form: Callable):
    own = form(NONLINEAR["clipped"])
    f = jtbridge.wrap(lambda x: ((1.2 * own(x)) ** 2).sum())
    np.testing.assert_allclose(jax.jacrev(jax.grad(f))(X).diagonal(), [1, 0, 0], atol=1e-6)
    with pytest.raises(DifferentiationError, match=r"jax\.jacrev` of a gradient"):
        jax.hessian(f)(X)


def add_functions(x: torch.Tensor) -> torch.Tensor:
    rows = x.expand(1, 2, 3)
    activations = functional.celu(x, 0.5) + functional.leaky_relu(x) + functional.softplus(x) + functional.hardswish(x)
    windows = functional.max_pool1d(rows, 2).sum() + functional.interpolate(rows, scale_factor=2, mode="linear").sum()
    losses = functional.huber_loss(x, x.detach() + 1) + functional.binary_cross_entropy(x.sigmoid(), x.detach() * 0)
    return activations + windows + losses + functional.group_norm(rows, 2).sum() * x


@pytest.mark.parametrize("backend", ["auto", "dlpack"])
def test_derivative_operators_of_torch_are_linear(backend: str):
    """These operators occur together with a hook, which is linear here."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        y = 1.0 * x
        if y.requires_grad:
            y.register_hook(lambda g: 2 * g)
        return add_functions(x) + y

    x = jnp.array([0.3, -0.7, 1.1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # that the rows run one after another
        got = jax.jit(jax.jacfwd(jtbridge.wrap(fn, backend=backend)))(x)
    want = torch.func.jacrev(lambda x: add_functions(x) + 2 * x)(torch.tensor([0.3, -0.7, 1.1]))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", ["xla", "dlpack"])
def test_a_backward_may_write_zeros_and_no_other_number(backend: str):
    def overwritten(g: torch.Tensor, number: float, *, by_view: bool) -> torch.Tensor:
        constant, result = torch.zeros_like(g), g.clone()
        (constant.view(-1) if by_view else constant).add_(number)
        result[:1].copy_(torch.zeros_like(g[:1]) if number == 0 else constant[:1])
        return result

    for by_view in (False, True):
        own = _own_function(lambda g, x, by_view=by_view: overwritten(g, 0.0, by_view=by_view))
        f = jtbridge.wrap(lambda x, own=own: 3 * own(x), backend=backend)
        _, tangent = jax.jit(lambda x, dx, f=f: jax.jvp(f, (x,), (dx,)))(X, DX)
        np.testing.assert_allclose(tangent, 3 * np.where(np.arange(len(DX)) < 1, 0, DX), rtol=1e-6)
        own = _own_function(lambda g, x, by_view=by_view: overwritten(g, 1.0, by_view=by_view))
        f = jtbridge.wrap(lambda x, own=own: 3 * own(x), backend=backend)
        with pytest.raises((DifferentiationError, TranslationError, jax.errors.JaxRuntimeError), match="not linear"):
            jax.block_until_ready(jax.jit(lambda x, dx, f=f: jax.jvp(f, (x,), (dx,)))(X, DX))
