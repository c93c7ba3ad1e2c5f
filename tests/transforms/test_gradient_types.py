"""Gradients that torch computes as tensors of other layouts and classes become dense arrays, or are refused."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
import torch
from torch.masked import as_masked_tensor
from torch.utils._pytree import tree_map

import jtbridge
from jtbridge import errors


class Boxed(torch.Tensor):
    """A tensor without memory of its own, which computes by the tensor inside."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args, kwargs = tree_map(lambda x: x.inner if isinstance(x, Boxed) else x, (args, kwargs or {}))
        return tree_map(lambda x: Boxed(x) if isinstance(x, torch.Tensor) else x, func(*args, **kwargs))


class ConvertedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, convert):
        ctx.convert = convert
        return x * 1

    @staticmethod
    def backward(ctx, cotangent):
        return ctx.convert(2 * cotangent), None


X = torch.tensor([0.5, 1.5, 2.5])
WAYS: dict[str, Callable] = {
    "eager": jax.grad,
    "jit": lambda f: jax.jit(jax.grad(f)),
    "vmap": lambda f: lambda x: jax.vmap(jax.grad(f))(x[None])[0],
    "jit of vmap": lambda f: lambda x: jax.jit(jax.vmap(jax.grad(f)))(x[None])[0],
}
pytestmark = [
    pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors:UserWarning"),
    pytest.mark.filterwarnings("ignore:It is not recommended to create a MaskedTensor:UserWarning"),
    # No backend translates sparse tensors, and torch.vmap makes none.
    pytest.mark.filterwarnings(
        "ignore::jtbridge.errors.SequentialVmapWarning", "ignore::jtbridge.errors.CalledWarning"
    ),
]


@pytest.mark.parametrize("backend", ["auto", "dlpack", "callback"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("scaled", [False, True])
def test_gradient_of_masked_tensor_is_zero_where_it_has_no_value(scaled: bool, way: str, backend: str):
    def f(x):
        return as_masked_tensor(3 * x if scaled else x, x.detach() > 1).sum().to_tensor(0.0)

    expected = torch.where(X > 1, 3.0 if scaled else 1.0, 0.0)
    assert WAYS[way](jtbridge.wrap(f, backend=backend))(jnp.asarray(X.numpy())).tolist() == expected.tolist()


@pytest.mark.parametrize("backend", ["auto", "dlpack", "callback"])
@pytest.mark.parametrize("way", WAYS)
def test_sparse_gradient_becomes_dense(way: str, backend: str):
    f = jtbridge.wrap(lambda x: ConvertedGradient.apply(x, torch.Tensor.to_sparse).sum(), backend=backend)
    assert WAYS[way](f)(jnp.asarray(X.numpy())).tolist() == [2.0, 2.0, 2.0]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("scaled", [False, True])
def test_gradient_of_an_unknown_class_is_refused(scaled: bool, way: str):
    f = jtbridge.wrap(lambda x: ConvertedGradient.apply(3 * x if scaled else x, Boxed).sum())
    with pytest.raises(errors.DifferentiationError, match="gradient of `<lambda>` is a `Boxed`, a class of tensors"):
        WAYS[way](f)(jnp.asarray(X.numpy()))
