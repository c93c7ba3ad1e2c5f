"""Tensors of a module that share memory: a call preserves the sharing, or refuses the module."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from torch import nn

import jtbridge
from jtbridge.errors import ModelError

X = jnp.arange(1.0, 4.0)
modes = pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])


class Stores(nn.Module):
    """A module whose call changes the attributes that hold its tensors."""

    def __init__(self, store: Callable[[Any, torch.Tensor], Any]):
        super().__init__()
        self.store = store
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("buffer", torch.zeros(3))
        self.first: Any = None
        self.second: Any = None
        self.tied = self.also_tied = torch.zeros(3)
        self.table: dict[str, torch.Tensor] = {}
        self.child = nn.Module()
        self.child.table = self.table  # type: ignore[assignment]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.store(self, x)
        return self.weight * x


def set_all(self: Any, value: torch.Tensor, *names: str) -> None:
    for name in names:
        setattr(self, name, value)


def set_rows(self: Any, value: torch.Tensor) -> None:
    self.first, self.second = torch.stack([value, 2 * value]).unbind()


REFUSED: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "`second` the same tensor as `first`": lambda self, x: set_all(self, x + 1, "first", "second"),
    "`first` the same tensor as `buffer`": lambda self, x: set_all(self, x + 1, "buffer", "first"),
    "`first` the same tensor as `weight`": lambda self, x: set_all(self, self.weight, "first"),
    "`first` a view of `buffer`": lambda self, x: set_all(self, self.buffer[1:], "first"),
    "`first` a view of `weight`": lambda self, x: set_all(self, self.weight.detach(), "first"),
    "`tied` the same tensor as `first`": lambda self, x: set_all(self, x + 1, "tied", "also_tied", "first"),
    "`table.b` the same tensor as `table.a`": lambda self, x: self.table.update(dict.fromkeys("ab", x + 1)),
}
ALLOWED: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "first second": set_rows,
    "tied": lambda self, x: set_all(self, x + 1, "tied", "also_tied"),
    "also_tied": lambda self, x: set_all(self, x + 1, "also_tied"),
    "table.a": lambda self, x: self.table.update(a=x + 1),
}


@modes
@pytest.mark.parametrize("what", REFUSED)
def test_a_call_that_makes_tensors_share_memory_is_refused(what: str, jit: bool):
    net = jtbridge.module(Stores(REFUSED[what]))
    first, relation, second = what.partition(" the same tensor as ")
    either = f"{what}|{second}{relation}{first}"
    with pytest.raises(ModelError, match=rf"A call of `Stores` made ({either}).*`\.clone\(\)`"):
        (jax.jit(net) if jit else net)(*net.init(), X)


@modes
@pytest.mark.parametrize("names", ALLOWED)
def test_tensors_may_share_memory_as_before_the_call(names: str, jit: bool):
    model = Stores(ALLOWED[names])
    net = jtbridge.module(model)
    params, state = net.init()
    call = jax.jit(net) if jit else net
    for factor in (1, 2):
        _, changed = call(params, state, factor * X)
        assert sorted(changed) == names.split()
        state |= changed
    out, _ = net.method(lambda model, x: {**vars(model), **model.child.table})(params, state, X)
    model(torch.from_numpy(2 * jnp.asarray(X).__array__()))
    for name, value in {**vars(model), **model.table}.items():
        if isinstance(value, torch.Tensor):
            assert jnp.array_equal(out[name], jtbridge.to_jax(value.detach()))


class SharedBuffers(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("whole", torch.zeros(4))
        self.register_buffer("part", self.whole[:2])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.whole += 1
        return x + self.part.sum()


def of_init(model: nn.Module) -> Any:
    net = jtbridge.module(model)
    return net, *net.init()


def of_second_net(model: nn.Module) -> Any:
    return jtbridge.module(model), *jtbridge.module(model).init()


def of_state_dict(model: nn.Module) -> Any:
    net = jtbridge.module(model)
    return net, *net.from_state_dict(model.state_dict())


def of_copy(model: nn.Module) -> Any:
    net = jtbridge.module(model)
    params, state = net.init()
    return copy.deepcopy(net), params, state


def of_release(model: nn.Module) -> Any:
    params, state = jtbridge.module(model).init(release=True)
    return jtbridge.module(model), params, state


@modes
@pytest.mark.parametrize("make", [of_init, of_second_net, of_state_dict, of_copy, of_release])
def test_writes_to_buffers_over_the_same_memory_are_refused_by_every_net(make: Callable[..., Any], jit: bool):
    net, params, state = make(SharedBuffers())
    with pytest.raises(ModelError, match="writes to `whole`, which shares memory with another tensor"):
        (jax.jit(net) if jit else net)(params, state, X)
    assert net.load(params, state) is net.module
    with pytest.raises(ModelError, match="`whole` of `SharedBuffers` shares memory with another tensor"):
        net.load(params, {**state, "whole": state["whole"] + 1})


def test_parameters_over_the_same_memory_are_refused_in_a_state_dict():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight.data = model[0].weight.data
    with pytest.raises(ModelError, match=r"`0.weight` and `1.weight` are different tensors over the same memory"):
        jtbridge.module(model).from_state_dict(model.state_dict())
