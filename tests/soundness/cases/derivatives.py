"""Derivatives: autograd functions, hooks, forward mode, kinks."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import torch
import torch.nn.functional as F
from torch import nn

from ._case import V, case


@case("derivatives")
def grad_mode_with_a_parameter(run):
    p = nn.Parameter(torch.full((4,), 2.0))
    f = run.wrap(lambda v: p * v * (2 if torch.is_grad_enabled() else 3))
    yield run(f, V)


@case("derivatives")
def requires_grad_of_a_result(run):
    p = nn.Parameter(torch.full((4,), 2.0))
    f = run.wrap(lambda v: v * 2 if (p * v).requires_grad else v * 3)
    yield run(f, V)


@case("derivatives", "xla")
def forward_mode_of_products_that_are_scattered(run):
    i = torch.tensor([0, 0, 1, 1])
    f = run.wrap(lambda v: v.scatter_reduce(0, i, v * 2, "prod"))
    yield run.grad(f, V)
    yield run.jacfwd(f, V)


@case("derivatives")
def hook_on_a_tensor(run):
    def f(v):
        y = v * 1
        if y.requires_grad:
            y.register_hook(lambda g: g * 10)
        return y**2

    f = run.wrap(f)
    yield run(f, V)
    yield run.grad(f, V)


@case("derivatives", "eager", "jit")
def hook_on_a_tensor_forward(run):
    def f(v):
        y = v * 1
        if y.requires_grad:
            y.register_hook(lambda g: g * 10)
        return y**2

    yield run.jacfwd(run.wrap(f), V)


@case("derivatives", "xla")
def forward_mode_where_a_gradient_has_no_derivative(run):
    def f(v):
        with torch.no_grad():
            w = v * 2
        return F.hardsigmoid(v) * w

    yield run.jacfwd(run.wrap(f), V)


@case("derivatives")
def forward_mode_and_a_write_where_a_gradient_has_no_derivative(run):
    def f(v):
        v[0] = 0.5
        return F.hardsigmoid(v) * v

    f = run.wrap(f)
    yield run.either(
        lambda: torch.tensor([[0.0] * 4, *torch.diag(torch.tensor([0.0, 7 / 6, 1.0, 1.0]))[1:].tolist()]),
        lambda: jax.jacfwd(f)(jnp.asarray(V.numpy())) + 0.0,
    )


class _Unused(torch.autograd.Function):
    @staticmethod
    def forward(ctx, v):
        ctx.set_materialize_grads(False)
        return v * 2, v * 3

    @staticmethod
    def backward(ctx, a, b):
        return a * 2 if b is None else a * 2 + b * 3 + 100


@case("derivatives")
def gradients_not_materialized(run):
    f = run.wrap(lambda v: _Unused.apply(v)[0])
    yield run(f, V)
    yield run.grad(f, V)


class _Wrong(torch.autograd.Function):
    @staticmethod
    def forward(ctx, v):
        return v**2

    @staticmethod
    def backward(ctx, g):
        return g * 100


@case("derivatives")
def gradient_of_an_autograd_function(run):
    yield run.grad(run.wrap(_Wrong.apply), V)


@case("derivatives")
def straight_through(run):
    yield run.grad(run.wrap(lambda v: v + ((v * 3).round() - v).detach() * v), V)


@case("derivatives")
def gradient_at_kinks(run):
    x = torch.tensor([0.0, -0.0, 1.0, -1.0])
    for f in (torch.relu, torch.abs, lambda v: v.clamp(0, 1), F.hardtanh, lambda v: torch.maximum(v, v * 2)):
        yield run.grad(run.wrap(f), x)


@case("derivatives")
def gradient_at_ties(run):
    x = torch.tensor([1.0, 1.0, 0.0])
    for f in (lambda v: v.max(), lambda v: v.amax(), lambda v: v.sort().values[0], lambda v: v.max(0).values):
        yield run.grad(run.wrap(f), x)


@case("derivatives", "xla")
def saved_tensor_written_behind_autograd(run):
    def f(v):
        y = v * 0.5
        z = F.logsigmoid(y) + y.sin() * y.tanh()
        y.data.mul_(0.9)
        return z

    yield run.grad(run.wrap(f), V)


@case("derivatives")
def residual_that_is_a_loss(run):
    for loss in (F.mse_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy, F.l1_loss):
        yield run.grad(run.wrap(lambda v, loss=loss: loss(v.sigmoid(), v.cos() ** 2) * v), V)


@case("derivatives")
def gradient_of_where_with_a_pole(run):
    yield run.grad(run.wrap(lambda v: torch.where(v > 1.5, v.sqrt(), v)), V)
    yield run.grad(run.wrap(torch.linalg.vector_norm), torch.zeros(3))


@case("derivatives")
def complex_gradient(run):
    yield run.grad(run.wrap(lambda v: (torch.complex(v, v * 2) ** 3).abs()), V)


@case("derivatives")
def forward_derivative_of_a_part_of_logcumsumexp(run):
    f = run.wrap(lambda v: v.logcumsumexp(0) * torch.tensor([0.0, 1.0, 0.0, 2.0]))
    yield run.jacfwd(f, V)
    yield run.grad(f, V)
