"""Arrays that are compared with their own elements: XLA must not round them in two ways."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jtbridge

FIELD = np.random.default_rng(141).normal(size=(3, 16, 64)).astype(np.float32)
# Without optimization, XLA computes an array in several operations, and rounds it in another way in each.
UNOPTIMIZED = {"xla_backend_optimization_level": 0}


def nearest(a, b, c):
    scaled = torch.sqrt(1 + a * a) * b
    moved = (b * b)[:, :1] * scaled + (scaled - b.mean(1, keepdim=True) * 1.543)[:1]
    return (scaled - c.mean(1, keepdim=True) * 0.758) * moved + a[:1, :1]


def of_norm(a, b, c):
    return torch.linalg.vector_norm(a * b + c, float("inf"), -2)


HAS_GRADIENT_OF_AMINMAX = torch.__version__ >= (2, 13)  # type: ignore[operator]  (torch 2.11 has none)
CASES = [
    of_norm,
    lambda a, b, c: (a * b + c).amax(0),
    lambda a, b, c: (a * b + c).abs().max(),
    lambda a, b, c: (a * b + c).median(),
    *([lambda a, b, c: torch.cat(torch.aminmax(a * b + c, dim=0))] if HAS_GRADIENT_OF_AMINMAX else []),
    lambda a, b, c: torch.where(a * b + c >= (a * b + c).topk(3).values[:, -1:], a, 0.0).sum(1),
    lambda a, b, c: (lambda x: (x == x.amax(1, keepdim=True)) * a)(a * b + c),
    lambda a, b, c: torch.cdist(a * b + c, b * c + a, p=float("inf")),
    lambda a, b, c: nearest(a, b, c).amax(0),
    lambda a, b, c: torch.zeros(16, 64).scatter_reduce(0, (a > 0).long(), a * b + c, "amax"),
]


@pytest.mark.parametrize("fn", CASES)
@pytest.mark.parametrize("options", [{}, UNOPTIMIZED])
def test_gradient(fn, options):
    weights = torch.linspace(0.5, 1.5, fn(*map(torch.tensor, FIELD)).numel())

    def loss(*xs):
        return (fn(*xs).reshape(-1) * weights).sum()

    leaves = [torch.tensor(x, requires_grad=True) for x in FIELD]
    wanted = torch.autograd.grad(loss(*leaves), leaves, allow_unused=True, materialize_grads=True)
    wrapped = jtbridge.wrap(loss, backend="xla")
    for gradient in (jax.grad(wrapped, (0, 1, 2)), lambda *xs: jax.vjp(wrapped, *xs)[1](jnp.ones(()))):
        found = jax.jit(gradient, compiler_options=options)(*FIELD)
        for got, want in zip(found, wanted, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("options", [{}, UNOPTIMIZED])
@pytest.mark.parametrize("dim", [0, 1])
def test_position(dim, options):
    def fn(a, b, c):
        x = nearest(a, b, c)
        return x.argmax(dim), x.max(dim).indices, x.argmin(dim), x

    found = jax.jit(jtbridge.wrap(fn, backend="xla"), compiler_options=options)(*FIELD)
    for got, want in zip(found, fn(*map(torch.tensor, FIELD)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_batch():
    batch = np.random.default_rng(0).normal(size=(3, 5, 16, 64)).astype(np.float32)
    gradient = jax.grad(lambda *xs: jtbridge.wrap(of_norm, backend="xla")(*xs).sum())
    found = jax.jit(jax.vmap(gradient), compiler_options=UNOPTIMIZED)(*batch)
    for i, got in enumerate(found):
        leaves = [torch.tensor(x[i], requires_grad=True) for x in batch]
        np.testing.assert_allclose(got, torch.autograd.grad(of_norm(*leaves).sum(), leaves[0])[0], rtol=1e-4, atol=1e-4)
