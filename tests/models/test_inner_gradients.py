"""Modules whose forward reads `requires_grad` or computes gradients, called with and without `jax.grad`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

import jtbridge
from jtbridge.errors import ModelError

X = jnp.arange(3.0)


class Flags(nn.Module):
    """A module whose result depends on the `requires_grad` of its tensors."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("buffer", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product = self.weight * x
        parts: list[Any] = [self.weight, self.frozen, self.buffer]
        flags = [part.requires_grad for part in (*parts, product)] + [isinstance(part, nn.Parameter) for part in parts]
        return product.sum() * 0 + torch.tensor([float(flag) for flag in flags])


class Adapts(nn.Module):
    """One step of gradient descent inside the forward, as in MAML."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = ((self.weight * x) ** 2).sum()
        (gradient,) = torch.autograd.grad(loss, self.weight, create_graph=True)
        return (((self.weight - 0.1 * gradient) * x) ** 2).sum()


CALLS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "eager": lambda net, params, state: net(params, state, X)[0],
    "jit": lambda net, params, state: jax.jit(net)(params, state, X)[0],
    "grad": lambda net, params, state: jax.vjp(lambda p: net(p, state, X)[0], params)[0],
    "jit of grad": lambda net, params, state: jax.jit(lambda p: jax.vjp(lambda p: net(p, state, X)[0], p)[0])(params),
    "grad by x": lambda net, params, state: jax.vjp(lambda x: net(params, state, x)[0], X)[0],
    "vmap": lambda net, params, state: jax.vmap(lambda x: net(params, state, x)[0])(X[None])[0],
}
calls = pytest.mark.parametrize("call", CALLS)


@calls
def test_parameters_require_gradients_as_in_torch(call: str):
    model = Flags()
    net = jtbridge.module(model)
    assert CALLS[call](net, *net.init()).tolist() == model(torch.ones(3)).tolist()
    assert model.weight.grad is None


@calls
def test_entries_moved_into_the_state_require_no_gradient(call: str):
    net = jtbridge.module(Flags())
    params, state = net.init()
    params, state = {"buffer": state.pop("buffer")}, {**state, **params}
    weight, frozen, buffer, _, *are_parameters = CALLS[call](net, params, state).tolist()
    assert (weight, frozen, buffer) == (0, 0, 1)
    assert are_parameters == [1, 1, 0]


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_no_grad_matches_torch(jit: bool):
    model = Flags()
    net = jtbridge.module(model)
    with torch.no_grad():
        found = CALLS["jit" if jit else "eager"](net, *net.init())
        assert found.tolist() == model(torch.ones(3)).tolist()


@calls
@pytest.mark.filterwarnings("ignore:torch.vmap cannot batch:jtbridge.errors.SequentialVmapWarning")
def test_a_gradient_inside_the_forward(call: str):
    model = Adapts()
    net = jtbridge.module(model)
    expected = model(torch.arange(3.0))
    assert jnp.allclose(CALLS[call](net, *net.init()), expected.item())


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_the_gradient_of_a_gradient_inside_the_forward(jit: bool):
    model = Adapts()
    net = jtbridge.module(model)
    params, state = net.init()
    gradient = jax.grad(lambda p: net(p, state, X)[0])
    found = (jax.jit(gradient) if jit else gradient)(params)
    model(torch.arange(3.0)).backward()
    assert jnp.allclose(found["weight"], jtbridge.to_jax(model.weight.grad))


@pytest.mark.parametrize("kind", [list, dict])
def test_a_hook_stores_the_result_of_each_eager_call(kind: type):
    stored: Any = kind()

    def store(module: nn.Module, args: Any, out: torch.Tensor) -> None:
        stored.append(out) if kind is list else stored.update(out=out)

    model = nn.Linear(3, 3)
    model.register_forward_hook(store)
    model(torch.ones(3))
    net = jtbridge.module(model)
    params, state = net.init()
    for factor in (2.0, 3.0):
        out, _ = net(jax.tree.map(lambda p, factor=factor: factor * p, params), state, X)
        last = stored[-1] if kind is list else stored["out"]
        assert jnp.allclose(out, jtbridge.to_jax(last.detach()))


class Freezes(nn.Module):
    """A module whose call excludes a layer from the gradient: permanently, temporarily, or by a copy of the layer."""

    first: nn.Linear
    second: nn.Linear

    def __init__(self, way: str):
        super().__init__()
        self.way = way
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.way == "copy":
            return self.second(copy.deepcopy(self.first)(x)).sum()
        self.first.requires_grad_(False)
        out = self.first(x)
        if self.way == "for a while":
            for parameter in self.first.parameters():
                parameter.requires_grad = True
        return self.second(out).sum()


@calls
def test_a_module_that_calls_a_copy_of_its_layer(call: str):
    net = jtbridge.module(model := Freezes("copy"))
    params, state = net.init()
    found = CALLS[call](net, params, state)
    np.testing.assert_allclose(found, model(torch.arange(3.0)).detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_a_copied_layer_has_no_gradient(jit: bool):
    net = jtbridge.module(model := Freezes("copy"))
    params, state = net.init()
    gradient = jax.grad(lambda params: net(params, state, X)[0])
    found = (jax.jit(gradient) if jit else gradient)(params)
    expected = torch.autograd.grad(model(torch.arange(3.0)), model.second.weight)[0]
    assert not found["first.weight"].any()
    assert not found["first.bias"].any()
    np.testing.assert_allclose(found["second.weight"], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("way", "call"), [("for good", call) for call in CALLS] + [("for a while", "grad")])
def test_a_call_that_freezes_a_parameter_is_refused(way: str, call: str):
    net = jtbridge.module(Freezes(way))
    with pytest.raises(ModelError, match=r"sets `requires_grad` of `first\.\w+` to False.*state\['first\.\w+'\] = "):
        CALLS[call](net, *net.init())


def test_call_may_freeze_frozen_parameters():
    net = jtbridge.module(Freezes("for good"))
    params, state = net.init()
    state |= {name: params.pop(name) for name in list(params) if name.startswith("first")}
    assert jax.grad(lambda params: net(params, state, X)[0])(params)["second.bias"] == 1
