"""Torch functions with custom derivatives, and functions whose gradient a replay of their operators would miss."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import torch

import jtbridge


class TripledGradient(torch.autograd.Function):
    """``x**2`` with a backward that is three times too large, in the old style: only this backward gives ``6 * x``."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return grad * 6 * x


class StraightThrough(torch.autograd.Function):
    """Rounding with the gradient of the identity, in the new style, with a vmap rule."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return torch.round(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


class OnceDifferentiable(torch.autograd.Function):
    """sin whose backward torch refuses to differentiate."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return torch.sin(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return grad * torch.cos(x)


class TwoResults(torch.autograd.Function):
    """Two results, a static argument, and an argument without a gradient."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor, scale: float, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * scale * mask, x + mask

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.scale = inputs[1]
        ctx.save_for_backward(inputs[2])

    @staticmethod
    def backward(ctx: Any, first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (mask,) = ctx.saved_tensors
        return 2 * first * ctx.scale * mask + second, None, None


@torch.library.custom_op("jtbridge_tests::numpy_sin", mutates_args=())
def numpy_sin(x: torch.Tensor) -> torch.Tensor:
    """Compute sin by NumPy, which cannot be traced: only the registered backward gives a gradient."""
    import numpy as np

    return torch.from_numpy(np.sin(x.detach().numpy()))


@numpy_sin.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def _sin_backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
    (x,) = ctx.saved_tensors
    return grad * torch.cos(x)


numpy_sin.register_autograd(_sin_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))
jtbridge.register_lowering(numpy_sin)(jnp.sin)
numpy_sin.register_vmap(lambda info, in_dims, x: (numpy_sin(x), in_dims[0]))


def inner_gradient(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the gradient of an energy, which is differentiable again, as in force fields."""
    x = x * 1  # not the argument itself, which may be a leaf or not
    if not x.requires_grad:
        x.requires_grad_()
    with torch.enable_grad():
        energy = (torch.sin(x) * y * x).sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
    return force * y


def inner_func_grad(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.func.grad(lambda x: (torch.sin(x) * y * x).sum())(x) * x


def inner_jacobian(x: torch.Tensor) -> torch.Tensor:
    return torch.func.jacrev(lambda x: torch.sin(x) * x.sum())(x)


def inner_vmap(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.func.vmap(lambda row: torch.tanh(row) @ y)(x)


def no_grad_region(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        scale = torch.sin(x).sum()
    return x * x * scale


@torch.no_grad()
def no_grad_inside(x: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        y = torch.sin(x)
    return y * 2


def detached(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x.detach() * torch.exp(x) + y * torch.sin(y).detach()


def in_place_inside(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out = x.clone()
    out.mul_(y)
    out[0] += torch.sin(out[1].clone())
    out[:, 1:].exp_()
    return out


def in_place_on_argument(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x.mul_(y)
    return torch.sin(x), x.sum()


def aliased_results(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the argument itself, views of it, one tensor twice, and expanded and transposed tensors."""
    y = torch.sin(x)
    return x, x.T, x[0], y, y, y[:, :1].expand(-1, 3), y.reshape(-1)[::2]
