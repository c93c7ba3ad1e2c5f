"""Results that nothing uses: torch does not differentiate them, so they add nothing to a gradient, not even NaN."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
import torch

import jtbridge
from tests.compare import assert_close

X = torch.tensor([[1.0, 0.0], [0.0, 1.0]])


class TwoResults(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return 2 * x, x.sqrt()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, *cotangents):
        first, second = cotangents
        return 2 * first + torch.where(second == 0, second, second * ctx.saved_tensors[0].rsqrt())


class NoneForMissing(TwoResults):
    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, *cotangents):
        first, second = cotangents
        return 2 * first if second is None else torch.full_like(first, torch.nan)


def of_shared_trunk(x):
    trunk = (x @ x.mT).cos() * x
    return trunk.square(), trunk.sqrt(), (trunk * 0).rsqrt()


def of_rows(x):
    top, bottom = (x * x).unbind()
    return top, bottom, (x - x).sqrt()


def of_parts(x):
    left, right = (x * x).split(1, dim=1)
    return left, torch.cat([right.sqrt(), left.rsqrt()]), x.norm(dim=0)


def of_loop(x):
    for _ in range(3):
        x = torch.nn.functional.layer_norm(torch.tanh(x), [2])
    return x, (x * 0).sqrt(), x.softmax(0)


# The first result is used. The derivatives of the others are infinite, or not a number, in some element.
FUNCTIONS = {
    "square root": lambda x: (x * x, x.sqrt()),
    "norm": lambda x: (x.exp(), (x - x).norm(), torch.linalg.vector_norm(x - x, ord=3)),
    "eigenvectors": lambda x: tuple(torch.linalg.eigh(x.detach() * 0 + torch.eye(2) + (x - x))),
    "singular vectors": lambda x: torch.linalg.svd(torch.eye(2) + (x - x))[1::-1],
    "view": lambda x: (x.mT.reshape(4), x.pow(0.5)[0]),
    "shared trunk": of_shared_trunk,
    "rows": of_rows,
    "parts": of_parts,
    "layers": of_loop,
    "integers": lambda x: (x * x, x.argmax(), x.sqrt()),
    "another dtype": lambda x: (x * x, x.half().sqrt()),
    "complex": lambda x: (x * x, (torch.complex(x, x) - torch.complex(x, x)).abs().sqrt()),
    "convolution": lambda x: ((y := torch.nn.functional.conv1d(x[:, None], x[:, :1, None])) * 2, (y - y).sqrt()),
    "pooling": lambda x: torch.nn.functional.max_pool1d(x[None].sqrt(), 2, return_indices=True)[::-1] + (x * 3,),
    "function with two results": lambda x: TwoResults.apply(x),
    "function that looks at missing cotangents": lambda x: NoneForMissing.apply(x),
}
USED = {"pooling": 2}
WAYS: dict[str, Callable] = {
    "eager": jax.grad,
    "jit": lambda f: jax.jit(jax.grad(f)),
    "grad of jit": lambda f: jax.grad(jax.jit(f)),
    "checkpoint": lambda f: jax.jit(jax.grad(jax.checkpoint(f))),
    "vmap": lambda f: lambda x: jax.vmap(jax.grad(f))(jnp.stack([x, x]))[1],
    "jit of vmap": lambda f: lambda x: jax.jit(jax.vmap(jax.grad(f)))(jnp.stack([x, x]))[1],
    "grad of vmap": lambda f: lambda x: jax.grad(lambda xs: jax.vmap(f)(xs).sum())(jnp.stack([x, x]))[1],
    "vjp of linearize": lambda f: lambda x: jax.linear_transpose(jax.linearize(f, x)[1], x)(1.0)[0],
    "auxiliary": lambda f: f,
}


def weighted(y, library):
    return (library.cos(y) * y).sum()


@pytest.mark.parametrize("backend", ["auto", "dlpack"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradient_equals_torch(name: str, way: str, backend: str):
    used = USED.get(name, 0)
    x = X.clone().requires_grad_()
    (expected,) = torch.autograd.grad(weighted(FUNCTIONS[name](x)[used], torch), x)
    assert expected.isfinite().all()
    f = jtbridge.wrap(FUNCTIONS[name], backend=backend)

    def loss(x):
        return weighted(f(x)[used], jnp)

    def with_auxiliary(x):
        results = f(x)
        return weighted(results[used], jnp), results

    if way == "auxiliary":
        got, results = jax.jit(jax.grad(with_auxiliary, has_aux=True))(X.numpy())
        assert len(results) == len(FUNCTIONS[name](X))
    else:
        got = WAYS[way](loss)(jnp.asarray(X.numpy()))
    assert_close(got, expected.numpy())


@pytest.mark.parametrize("backend", ["auto", "xla", "dlpack", "callback"])
def test_the_forward_does_not_run_again(backend: str):
    """The backward of the used results takes the residuals of the forward, as the backward of all results does."""
    f = jtbridge.wrap(of_shared_trunk, backend=backend)
    program = str(jax.make_jaxpr(jax.grad(lambda x: f(x)[0].sum()))(jnp.asarray(X.numpy())))
    assert "torch_forward[" in program
    assert "torch_backward[" in program
