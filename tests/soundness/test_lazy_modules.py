"""Torch's lazy modules, which get shapes and another class in the first call, behave as in torch or are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

import jtbridge
from jtbridge.errors import MutationError

pytestmark = pytest.mark.filterwarnings("ignore:Lazy modules are a new feature:UserWarning")

X = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3)).astype(np.float32))


def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(4), nn.Tanh(), nn.LazyLinear(2))


def loss(f: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    return lambda x: f(x).sum()


def untouched(model: Any) -> bool:
    layers = model[0], model[2]
    return all(
        type(layer) is nn.LazyLinear
        and layer.in_features == 0
        and type(layer.weight) is type(layer.bias) is nn.UninitializedParameter
        and len(layer._forward_pre_hooks) == len(layer._load_state_dict_pre_hooks) == 1
        for layer in layers
    )


@pytest.mark.filterwarnings("ignore::jtbridge.errors.SequentialVmapWarning")
@pytest.mark.parametrize(
    "call",
    [
        lambda f: f(X),
        lambda f: jax.grad(loss(f))(X),
        lambda f: jax.jvp(f, (X,), (X,)),
        lambda f: jax.vmap(f)(X),
        lambda f: jax.vmap(jax.grad(loss(f)))(X),
    ],
    ids=["value", "grad", "jvp", "vmap", "vmap of grad"],
)
def test_an_eager_call_gives_shapes(call):
    model = lazy()
    f = jtbridge.wrap(model)
    found = call(f)
    assert type(model[0]) is type(model[2]) is nn.Linear
    assert model[0].weight.shape == (4, 3)
    for result, again in zip(jax.tree.leaves(found), jax.tree.leaves(call(f)), strict=True):
        np.testing.assert_allclose(result, again, rtol=1e-6)
    want = model(torch.tensor(np.asarray(X))).detach()
    np.testing.assert_allclose(jax.jit(f)(X), want, rtol=1e-5)


@pytest.mark.parametrize("backend", ["auto", "xla", "dlpack", "callback"])
@pytest.mark.parametrize("effects", [None, "ordered"])
def test_trace_refuses_lazy_modules(backend, effects):
    model = lazy()
    f = jtbridge.wrap(model, backend=backend, effects=effects)
    for trace in (jax.jit(f), jax.jit(jax.grad(loss(f))), lambda x: jax.eval_shape(f, x), jax.make_jaxpr(f)):
        with pytest.raises(MutationError, match=r"self\[0\].weight`, which has no shape yet.*once before"):
            trace(X)
        assert untouched(model)
    want = model(torch.tensor(np.asarray(X))).detach()
    np.testing.assert_allclose(jax.jit(f)(X), want, rtol=1e-5)


def test_reports_do_not_initialize_lazy_modules():
    model = lazy()
    report = jtbridge.purity(model, X)
    assert untouched(model)
    assert not report.is_pure
    assert "`self[0].weight.__class__`" in str(report)
    for tell in (jtbridge.explain, jtbridge.check):
        with pytest.raises(MutationError, match="has no shape yet"):
            tell(model, X)
        assert untouched(model)
    assert model(torch.ones(2, 3)).shape == (2, 2)
