"""Gradients are torch's wherever JAX's own would differ: at kinks, and where the code defines the gradient."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jtbridge
from jtbridge.errors import DifferentiationError


class StraightThrough(torch.autograd.Function):
    """Rounds forward, passes the gradient backward."""

    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, grad):
        return grad * 10


class SavesInputs(torch.autograd.Function):
    """A function whose backward is not its derivative, and can itself be differentiated."""

    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx, grad):
        x, y = ctx.saved_tensors
        return grad * y * y, grad * x.exp()


def no_grad_region(x):
    with torch.no_grad():
        scale = x.exp()
    return x * scale


def enable_grad_inside(x):
    with torch.no_grad():
        a = x * x
        with torch.enable_grad():
            b = x.sin()
    return a + b


# Functions, and points that hold the kink.
KINKS = {
    "abs": (torch.abs, [-1.0, 0.0, 2.0]),
    "sign_of_zero": (torch.sgn, [-1.0, 0.0, 2.0]),
    "norm_at_zero": (torch.linalg.vector_norm, [0.0, 0.0]),
    "norm_1": (lambda x: torch.linalg.vector_norm(x, 1), [0.0, -2.0, 3.0]),
    "norm_inf_tie": (lambda x: torch.linalg.vector_norm(x, torch.inf), [2.0, -2.0, 1.0]),
    "norm_3_with_zero": (lambda x: torch.linalg.vector_norm(x, 3), [0.0, 0.0, 1.0]),
    "max_tie": (torch.max, [1.0, 3.0, 3.0]),
    "amax_tie": (torch.amax, [1.0, 3.0, 3.0]),
    "max_dim_tie": (lambda x: x.max(0).values, [3.0, 1.0, 3.0]),
    "maximum_tie": (lambda x: torch.maximum(x, x.detach() * 0 + 1), [1.0, 2.0, 0.0]),
    "min_tie": (torch.min, [1.0, 1.0, 3.0]),
    "median_tie": (torch.median, [1.0, 1.0, 1.0, 3.0]),
    "clamp_bounds": (lambda x: x.clamp(-1, 1), [-2.0, -1.0, 0.0, 1.0, 2.0]),
    "clamp_min": (lambda x: x.clamp_min(0), [-1.0, 0.0, 1.0]),
    "relu": (torch.relu, [-1.0, 0.0, 1.0]),
    "relu6": (torch.nn.functional.relu6, [-1.0, 0.0, 6.0, 7.0]),
    "hardtanh": (torch.nn.functional.hardtanh, [-1.0, 0.0, 1.0]),
    "leaky_relu": (torch.nn.functional.leaky_relu, [-1.0, 0.0, 1.0]),
    "elu": (torch.nn.functional.elu, [-1.0, 0.0, 1.0]),
    "sqrt_at_zero": (torch.sqrt, [0.0, 4.0]),
    "pow_at_zero": (lambda x: x**0.5, [0.0, 4.0]),
    "pow_zero_exponent": (lambda x: x**0, [0.0, 4.0]),
    "zero_to_the_x": (lambda x: torch.tensor(0.0) ** x, [0.0, 1.0, 2.0]),
    "where_guards_nan": (lambda x: torch.where(x > 0, x, torch.zeros(())).sqrt(), [0.0, 1.0]),
    "where_unsafe": (lambda x: torch.where(x > 0, x.log(), x), [-1.0, 0.0, 1.0]),
    "prod_one_zero": (torch.prod, [2.0, 0.0, 3.0]),
    "prod_two_zeros": (torch.prod, [2.0, 0.0, 0.0]),
    "cumprod_zero": (lambda x: x.cumprod(0), [2.0, 0.0, 3.0, 4.0]),
    "cummax_tie": (lambda x: x.cummax(0).values, [1.0, 2.0, 2.0, 0.0]),
    "sort_tie": (lambda x: x.sort(stable=True).values * torch.arange(1.0, 5.0), [2.0, 1.0, 2.0, 1.0]),
    "topk_tie": (lambda x: x.topk(2).values * torch.tensor([1.0, 2.0]), [2.0, 3.0, 1.0, 0.0]),
    "max_pool_tie": (lambda x: torch.nn.functional.max_pool1d(x[None], 2), [1.0, 1.0, 0.0, 0.0]),
    "round": (torch.round, [0.5, 1.2]),
    "floor": (torch.floor, [0.5, 1.0]),
    "remainder": (lambda x: torch.remainder(x, 1.0), [0.5, 1.0, -0.3]),
    "atan2_at_zero": (lambda x: torch.atan2(x, x), [0.0, 1.0]),
    "hypot": (lambda x: torch.hypot(x, x * 0), [0.0, 1.0]),
    "logsumexp_inf": (lambda x: torch.logsumexp(x, 0), [-torch.inf, 0.0, 1.0]),
    "xlogy": (lambda x: torch.xlogy(x, x), [0.0, 1.0]),
    "sinc": (torch.sinc, [0.0, 0.5]),
    "std_of_equals": (torch.std, [1.0, 1.0, 1.0]),
    "renorm": (lambda x: torch.renorm(x[None], 2, 0, 1.0), [3.0, 4.0]),
    "cdist_at_zero": (lambda x: torch.cdist(x[:, None], x[:, None]), [1.0, 1.0, 3.0]),
    "softshrink": (torch.nn.functional.softshrink, [-0.5, 0.0, 0.5, 1.0]),
    "huber": (
        lambda x: torch.nn.functional.huber_loss(x, torch.zeros_like(x), reduction="none"),
        [0.0, 1.0, -1.0, 2.0],
    ),
    "l1": (lambda x: torch.nn.functional.l1_loss(x, torch.zeros_like(x), reduction="none"), [0.0, 1.0]),
    # Code that defines its own gradient.
    "straight_through": (StraightThrough.apply, [0.4, 1.6]),
    "own_backward": (lambda x: SavesInputs.apply(x, x.sin()), [0.4, 1.6]),
    "own_backward_nested": (lambda x: SavesInputs.apply(StraightThrough.apply(x), x).exp(), [0.4, 1.6]),
    "no_grad": (no_grad_region, [0.4, 1.6]),
    "enable_grad": (enable_grad_inside, [0.4, 1.6]),
    "detach": (lambda x: x.detach() * x, [0.4, 1.6]),
    "data": (lambda x: x.data * x, [0.4, 1.6]),
    "inner_grad": (
        lambda x: torch.func.grad(lambda t: (t**3).sum())(x) * x,
        [0.4, 1.6],
    ),
    "checkpoint": (
        lambda x: torch.utils.checkpoint.checkpoint(lambda t: t.sin().exp(), x, use_reentrant=False),
        [0.4, 1.6],
    ),
    "in_place_view": (lambda x: _written_through_a_view(x), [0.4, 1.6, 2.0]),
}
SMOOTH_TWICE = ["own_backward", "no_grad", "detach", "inner_grad", "checkpoint", "in_place_view", "clamp_bounds", "abs"]


def _written_through_a_view(x):
    y = x.clone()
    y[1:].mul_(y[:-1].clone())
    return y**2


# Where torch.vmap cannot batch a function, the backends that call it run its rows one by one, and say so.
pytestmark = pytest.mark.filterwarnings("ignore::jtbridge.errors.SequentialVmapWarning")


@pytest.fixture(params=["xla", "dlpack"])
def every_backend(request):
    with jtbridge.config(backend=request.param):
        yield request.param


def of_torch(fn, point):
    x = torch.tensor(point, requires_grad=True)
    y = fn(x)
    (grad,) = torch.autograd.grad((y * _weights(y)).sum(), x, allow_unused=True, materialize_grads=True)
    return grad.numpy(force=True)


def _weights(y: torch.Tensor) -> torch.Tensor:
    return torch.arange(1.0, y.numel() + 1).reshape(y.shape)


def weighted(f):
    def loss(x):
        y = f(x)
        return (y * jnp.arange(1.0, y.size + 1).reshape(y.shape)).sum()

    return loss


@pytest.mark.parametrize("name", KINKS)
def test_gradient_matches_torch(name: str, every_backend: str):
    fn, point = KINKS[name]
    got = jax.jit(jax.grad(weighted(jtbridge.wrap(fn))))(jnp.asarray(point))
    np.testing.assert_allclose(got, of_torch(fn, point), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", KINKS)
def test_gradients_of_a_batch_match_torch(name: str, every_backend: str):
    fn, point = KINKS[name]
    points = [point, [1.5 * p + 0.25 for p in point], point]
    got = jax.vmap(jax.grad(weighted(jtbridge.wrap(fn))))(jnp.asarray(points))
    np.testing.assert_allclose(got, [of_torch(fn, p) for p in points], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", SMOOTH_TWICE)
def test_second_derivative_matches_torch(name: str, every_backend: str):
    fn, point = KINKS[name]

    def loss(x):
        y = fn(x)
        return (y * _weights(y)).sum()

    expected = torch.autograd.functional.hessian(loss, torch.tensor(point)).numpy(force=True)
    got = jax.jit(jax.hessian(weighted(jtbridge.wrap(fn))))(jnp.asarray(point))
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


def test_second_derivative_of_once_differentiable_is_refused(every_backend: str):
    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x**2

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, grad):
            return 2 * ctx.saved_tensors[0] * grad

    f = weighted(jtbridge.wrap(Once.apply))
    np.testing.assert_allclose(jax.grad(f)(jnp.ones(2)), [2.0, 4.0])
    with pytest.raises(DifferentiationError):
        jax.hessian(f)(jnp.ones(2))


def test_second_derivatives_that_torch_knows_to_be_zero():
    """They are autograd's lazy zeros, without memory."""
    f = jtbridge.wrap(torch.abs, backend="xla")
    x = jnp.array([-2.0, 0.0, 3.0])
    np.testing.assert_array_equal(jax.jacrev(jax.jacrev(f))(x), np.zeros((3, 3, 3)))
