"""A call that reaches the torch module's own tensors is refused: its result would not depend on `params`."""

from __future__ import annotations

import collections
import threading
import types
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

import jtbridge
from jtbridge.errors import ModelError

X = jnp.ones((2, 3))
modes = pytest.mark.parametrize("mode", ["eager", "jit", "grad"])
GLOBALS: dict[str, Any] = {}


class Layer(nn.Module):
    registry: ClassVar[dict[str, Any]] = {}

    def __init__(self, function: Callable[[Any, torch.Tensor], Any]):
        super().__init__()
        self.lin = nn.Linear(3, 3)
        self.register_buffer("scale", torch.ones(3))
        self.function = function
        self.view = types.MappingProxyType({"lin": self.lin})
        self.chain = collections.UserList([collections.UserDict(lin=self.lin)])
        self.bound = self.lin.weight.matmul
        GLOBALS.update(module=self, weight=self.lin.weight, detached=self.lin.weight.detach(), row=self.lin.weight[0])
        Layer.registry["lin"] = self.lin
        Layer.latest = self

    latest: ClassVar[Any] = None

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self, x)


WAYS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "a global module": lambda self, x: GLOBALS["module"].lin(x),
    "a global parameter": lambda self, x: F.linear(x, GLOBALS["weight"]),
    "in a list": lambda self, x: torch.cat([x, GLOBALS["weight"]]),
    "as a keyword": lambda self, x: F.linear(input=x, weight=GLOBALS["weight"]),
    "a view": lambda self, x: x + GLOBALS["row"],
    "without a gradient": lambda self, x: x @ GLOBALS["detached"],
    "its data": lambda self, x: x @ GLOBALS["weight"].data,
    "a NumPy array": lambda self, x: x + float(GLOBALS["detached"].numpy()[0, 0]),
    "a buffer": lambda self, x: x * GLOBALS["module"].scale,
    "a write to a buffer": lambda self, x: x + GLOBALS["module"].scale.add_(1),
    "an attribute of the class": lambda self, x: type(self).latest.lin(x),
    "a dict of the class": lambda self, x: self.registry["lin"](x),
    "a view of a dict": lambda self, x: self.view["lin"](x),
    "a method of a tensor": lambda self, x: self.bound(x.T),
}


@modes
@pytest.mark.parametrize("way", WAYS)
def test_access_to_the_module_outside_the_call_is_refused(way: str, mode: str):
    model = Layer(WAYS[way])
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    net = jtbridge.module(model)
    params, state = net.init()
    call: Any = lambda p: net(p, state, X)[0].sum()  # noqa: E731
    call = jax.jit(call) if mode == "jit" else jax.grad(call) if mode == "grad" else call
    with pytest.raises(ModelError, match=r"uses the torch module's own `(lin.weight|scale)` in `.*Reach `.*self"):
        call(params)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@modes
def test_shape_of_a_module_tensor_may_be_read(mode: str):
    def function(self: Any, x: torch.Tensor) -> torch.Tensor:
        own = GLOBALS["weight"]
        return self.lin(x.to(own.dtype)) * own.shape[0] / own.size(1) + own.numel()

    net = jtbridge.module(Layer(function))
    params, state = net.init()
    call: Any = lambda p: net(p, state, X)[0].sum()  # noqa: E731
    assert jax.tree.all(jax.tree.map(jnp.isfinite, (jax.jit(call) if mode == "jit" else call)(params)))


def test_the_modules_tensors_may_be_passed_as_parameters():
    model = nn.Linear(3, 2)
    out, _ = jtbridge.module(model)(dict(model.named_parameters()), {}, X)
    expected = model(torch.ones(2, 3))
    assert jnp.allclose(jtbridge.to_jax(jtbridge.to_torch(out)), jtbridge.to_jax(expected.detach()), atol=1e-6)


class Slots:
    __slots__ = ("module",)

    def __init__(self, module: nn.Module):
        self.module = module


class InContainers(nn.Module):
    __slots__ = ("factor",)

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(3, 3)
        self.factor = 2.0
        self.slots = Slots(self.lin)
        self.scales = {self.lin: 3.0}
        self.local = threading.local()
        self.local.module = self.lin

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.slots.module(x) * self.factor * self.scales[self.lin]


@modes
def test_modules_in_slots_and_in_keys_are_copied(mode: str):
    net = jtbridge.module(InContainers())
    params, state = net.init()
    call: Any = lambda p: net(p, state, X)[0].sum()  # noqa: E731
    gradient = (jax.jit(jax.grad(call)) if mode == "jit" else jax.grad(call))(params)
    assert jnp.allclose(gradient["lin.bias"], 12.0)


class Cached(nn.Module):
    """A module that stores the product of its parameter in its first call, as LeViT stores its attention biases."""

    def __init__(self, kept: Any):
        super().__init__()
        self.weight = nn.Parameter(torch.arange(3.0))
        self.kept = kept

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.kept:
            self.kept.update(bias=self.weight * 2) if isinstance(self.kept, dict) else self.kept.append(self.weight * 2)
        return (x * (self.kept["bias"] if isinstance(self.kept, dict) else self.kept[0])).sum()


@modes
@pytest.mark.parametrize("kind", [dict, collections.OrderedDict])
def test_cached_results_in_a_dict_are_recomputed(mode: str, kind: type):
    module = Cached(kind())
    module(torch.ones(3))
    net = jtbridge.module(module)
    params, state = net.init()
    loss = lambda params: net(params, state, jnp.ones(3))[0]  # noqa: E731
    loss = jax.jit(loss) if mode == "jit" else loss
    assert loss({"weight": params["weight"] + 1}) == 12
    assert jax.grad(loss)(params)["weight"].tolist() == [2, 2, 2]
    assert set(module.kept) == {"bias"}


@modes
def test_cached_results_in_a_list_are_refused(mode: str):
    module = Cached([])
    module(torch.ones(3))
    net = jtbridge.module(module)
    params, state = net.init()
    loss = lambda params: net(params, state, jnp.ones(3))[0]  # noqa: E731
    with pytest.raises(ModelError, match=r"`kept\.0` .* an earlier call computed"):
        {"eager": loss, "jit": jax.jit(loss), "grad": jax.grad(loss)}[mode](params)


class Holder:
    """An object of a user's class."""

    def __init__(self) -> None:
        self.kept: Any = None


def of_object(holder: Any, weight: torch.Tensor) -> torch.Tensor:
    if holder.kept is None:
        holder.kept = weight * 2
    return holder.kept


def of_key(holder: Any, weight: torch.Tensor) -> torch.Tensor:
    if holder.kept is None:
        holder.kept = {"weight": weight * 2}
    return holder.kept["weight"]


def of_attribute(holder: Any, weight: torch.Tensor) -> torch.Tensor:
    if not hasattr(holder, "made"):
        holder.made = weight * 2
    return holder.made


@modes
@pytest.mark.parametrize("kind", [Holder, nn.Module, lambda: types.SimpleNamespace(kept=None)])
@pytest.mark.parametrize("compute", [of_object, of_key, of_attribute])
def test_results_of_earlier_calls_are_never_used(mode: str, kind: Callable[[], Any], compute: Callable[..., Any]):
    holder = kind()
    holder.kept = None

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.arange(3.0))
            self.holder = holder

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * compute(self.holder, self.weight)).sum()

    model = Model()
    model(torch.ones(3))
    net = jtbridge.module(model)
    params, state = net.init()
    loss = lambda params: net(params, state, jnp.ones(3))[0]  # noqa: E731
    run = {"eager": loss, "jit": jax.jit(loss), "grad": jax.value_and_grad(loss)}[mode]
    doubled = {"weight": 2 * params["weight"]}
    try:
        found = run(doubled)
    except ModelError as error:
        assert "an earlier call computed" in str(error)  # noqa: PT017
    else:
        value, gradient = found if mode == "grad" else (found, {"weight": 2 * jnp.ones(3)})
        assert value == 12
        assert gradient["weight"].tolist() == [2, 2, 2]


class Doubled(nn.Module):
    """A parametrization."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


@modes
def test_parametrization_cache_has_weights_of_the_current_call(mode: str):
    model = nn.Linear(3, 3)
    parametrize.register_parametrization(model, "weight", Doubled())
    net = jtbridge.module(model)
    params, state = net.init()
    call: Any = lambda p: net(p, state, X)[0].sum()  # noqa: E731
    call = {"eager": call, "jit": jax.jit(call), "grad": jax.grad(lambda p: call_twice(net, p, state))}[mode]
    others = jax.tree.map(lambda p: 3 * p + 1, params)
    expected = [call(params), call(others)]
    with parametrize.cached():
        model(torch.ones(1, 3))
        found = [call(params), call(others)]
    assert jax.tree.all(jax.tree.map(jnp.allclose, found, expected))


def call_twice(net: Any, params: Any, state: Any) -> Any:
    return (net(params, state, X)[0] * net(jax.tree.map(lambda p: p + 1, params), state, X)[0]).sum()


@modes
def test_autocast_cache_is_disabled_during_a_call(mode: str):
    class Model(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.weight.sum() * (2 if torch.is_autocast_cache_enabled() else 1)

    net = jtbridge.module(Model(3, 3))
    params, state = net.init()
    call: Any = lambda p: net(p, state, X)[0]  # noqa: E731
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = {"eager": call, "jit": jax.jit(call), "grad": jax.grad(call)}[mode](params)
        assert torch.is_autocast_cache_enabled()
    if mode == "grad":
        assert (found["weight"] == 1).all()
    else:
        assert jnp.allclose(found, params["weight"].sum())
