"""Tensors of classes with special operators, such as `MaskedTensor`: JAX has none, so they are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

import jtbridge
from jtbridge.errors import ArgumentError, ModelError

pytestmark = [
    pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors:UserWarning"),
    pytest.mark.filterwarnings("ignore:It is not recommended to create a MaskedTensor:UserWarning"),
    pytest.mark.filterwarnings("ignore::jtbridge.errors.CalledWarning"),
    pytest.mark.filterwarnings("ignore::jtbridge.errors.SequentialVmapWarning"),
]
X = jnp.arange(1.0, 5.0).reshape(2, 2)


def two() -> torch.Tensor:
    return TwoTensor(torch.full((2, 2), 3.0), torch.full((2, 2), 5.0))


def masked() -> torch.Tensor:
    return torch.masked.masked_tensor(torch.ones(3), torch.tensor([True, False, True]))


RESULTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "masked": lambda x: torch.masked.as_masked_tensor(x * 2, x > 2),
    "mean": lambda x: torch.masked.masked_tensor(x * 5, x > 2).mean(0),
    "without argument": lambda x: masked(),
    "two": lambda x: x * two(),
    "in a dict": lambda x: {"plain": x, "masked": torch.masked.as_masked_tensor(x * 2, x > 2)},
}
USES: dict[str, Callable[[Any], Any]] = {
    "eager": lambda f: f(X),
    "jit": lambda f: jax.jit(f)(X),
    "grad": lambda f: jax.grad(lambda x: jax.tree.leaves(f(x))[-1].sum())(X),
    "jit of grad": lambda f: jax.jit(jax.grad(lambda x: jax.tree.leaves(f(x))[-1].sum()))(X),
    "jit of vmap": lambda f: jax.jit(jax.vmap(f))(X[None]),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("backend", ["auto", "xla", "dlpack"])
@pytest.mark.parametrize("name", RESULTS)
def test_subclass_as_a_result_is_refused(name: str, backend: str, use: str):
    with pytest.raises(ArgumentError, match="a class of tensors with operators of its own"):
        USES[use](jtbridge.wrap(RESULTS[name], backend=backend))


@pytest.mark.parametrize("use", ["eager", "jit"])
@pytest.mark.parametrize("backend", ["auto", "dlpack"])
def test_subclass_inside_a_function(backend: str, use: str):
    f = jtbridge.wrap(
        lambda x: (torch.masked.as_masked_tensor(x, x > 1) * x).to_tensor(0.0) + (x * two()).a, backend=backend
    )
    assert USES[use](f).tolist() == [[3, 10], [18, 28]]


def test_subclass_as_a_gradient_is_refused():
    f = jtbridge.wrap(lambda x: (torch.masked.as_masked_tensor(x, x > 1) * x).to_tensor(0.0))
    with pytest.raises(ArgumentError, match="MaskedTensor"):
        jax.grad(lambda x: f(x).sum())(X)


@pytest.mark.parametrize("copy", [True, False])
@pytest.mark.parametrize("made", [two, masked])
def test_conversion_of_a_subclass_is_refused(made: Callable[[], torch.Tensor], copy: bool):
    with pytest.raises(ArgumentError, match="a class of tensors with operators of its own"):
        jtbridge.to_jax(made(), copy=copy)
    with pytest.raises(ArgumentError, match="a class of tensors with operators of its own"):
        jtbridge.wrap(torch.sin)(made())
    with pytest.raises(ArgumentError, match="a class of tensors with operators of its own"):
        jtbridge.to_torch_function(jnp.sin)(made())


def test_subclass_as_a_parameter_is_refused():
    model = torch.nn.Linear(2, 2)
    model.weight = torch.nn.Parameter(two())
    with pytest.raises(ModelError, match="`weight` is a `TwoTensor`"):
        jtbridge.module(model).init()
