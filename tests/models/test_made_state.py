"""State that calls make: tensors in attributes, containers and buffers that the module did not have, as in torch."""

from __future__ import annotations

import collections
import copy
import pickle
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

import jtbridge
from jtbridge.errors import ModelError, MutationError

X = jnp.arange(1.0, 4.0)


class Pair(NamedTuple):
    first: torch.Tensor | None
    second: torch.Tensor | None


class Model(nn.Module):
    """A module with every kind of empty state, and a step that fills it."""

    def __init__(self, step: Callable):
        super().__init__()
        self.step = step
        self.table: dict = {}
        self.items: list = []
        self.pair = (None, None)
        self.value = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.step(self, x)


def dict_in_order(self: Model, x: torch.Tensor) -> torch.Tensor:
    if not self.table:
        self.table["second"] = x.sum()
        self.table["first"] = x.sum() * 2
    return torch.stack(list(self.table.values()))


def keys_of_other_classes(self: Model, x: torch.Tensor) -> torch.Tensor:
    before = self.table.get(0, torch.zeros(3)) + self.table.get((1, 2), torch.zeros(3))
    self.table[0] = x * 2
    self.table[1, 2] = x * 3
    self.table["a.b"] = x * 4
    return before + self.table["a.b"]


def buffers(self: Model, x: torch.Tensor) -> torch.Tensor:
    if not hasattr(self, "count"):
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("last", torch.zeros(3), persistent=False)
    self.count += 1
    self.last = x + self.last
    return torch.stack([self.count, *[buffer.sum() for buffer in self.buffers()]])


def narrowed_dtypes(self: Model, x: torch.Tensor) -> torch.Tensor:
    if self.value is None:
        self.value = torch.tensor(2**31 - 1, dtype=torch.int32)
        self.table["wide"] = torch.full((3,), 1e-9, dtype=torch.float64)
    self.value = self.value + 1
    self.table["wide"] = 1.0 + self.table["wide"] - 1.0
    return x * (self.value < 0) + self.table["wide"].to(x.dtype) * 1e9


def growing_list(self: Model, x: torch.Tensor) -> torch.Tensor:
    self.items.append(x * len(self.items))
    return torch.stack(self.items).sum(0)


def list_of_twelve(self: Model, x: torch.Tensor) -> torch.Tensor:
    if not self.items:
        self.items.extend(x * i for i in range(12))
    return sum(i * item for i, item in enumerate(self.items))


def dicts_in_a_list(self: Model, x: torch.Tensor) -> torch.Tensor:
    self.items.append({"k": x * len(self.items), "v.w": (x + 1, x + 2)})
    return sum(one["k"] + one["v.w"][0] * one["v.w"][1] for one in self.items)


def nested_dict(self: Model, x: torch.Tensor) -> torch.Tensor:
    layer = self.table.setdefault("layer", {})
    before = layer.get("k", torch.zeros(3))
    layer["k"] = before + x
    return before * 1


def tuple_for_none(self: Model, x: torch.Tensor) -> torch.Tensor:
    h, c = self.value if self.value is not None else (torch.zeros(3), torch.zeros(3))
    self.value = (h + x, c + h)
    return h + c


def tuple_that_grows(self: Model, x: torch.Tensor) -> torch.Tensor:
    self.value = (*(self.value or ()), x * (1 + len(self.value or ())))
    return sum(self.value)


def nones_in_a_tuple(self: Model, x: torch.Tensor) -> torch.Tensor:
    before = self.pair[1] if self.pair[1] is not None else torch.zeros(3)
    self.pair = (None, before + x)
    self.value = [None, x * 2, None]
    return before * len(self.value)


def named_tuple(self: Model, x: torch.Tensor) -> torch.Tensor:
    before = self.value.second if self.value is not None else torch.zeros(3)
    self.value = Pair(x * 1, before + x)
    self.pair = Pair(None, x * 3) if isinstance(self.pair, Pair) else self.pair
    return before + self.value.first


def ordered_dict(self: Model, x: torch.Tensor) -> torch.Tensor:
    if self.value is None:
        self.value = collections.OrderedDict(b=x * 1, a=x * 2)
    return torch.stack([*self.value.values()]) * (3 if isinstance(self.value, collections.OrderedDict) else 5)


STEPS = [
    dict_in_order,
    keys_of_other_classes,
    buffers,
    narrowed_dtypes,
    growing_list,
    list_of_twelve,
    dicts_in_a_list,
    nested_dict,
    tuple_for_none,
    tuple_that_grows,
    nones_in_a_tuple,
    named_tuple,
    ordered_dict,
]


@pytest.mark.parametrize("wrapper", [lambda net: net, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("step", STEPS)
def test_calls_find_the_state_of_earlier_calls(step: Callable, wrapper: Callable):
    model, net = Model(step), jtbridge.module(Model(step))
    call = wrapper(net)
    params, state = net.init()
    for i in range(12 if step is growing_list else 3):
        x = X + i
        out, changed = call(params, state, x)
        state |= jax.tree.map(lambda a: a, changed)  # sorts the keys
        np.testing.assert_allclose(out, model(torch.tensor(np.asarray(x))), rtol=1e-6)


@pytest.mark.parametrize("step", STEPS)
def test_state_goes_back_to_torch(step: Callable):
    model, net = Model(step), jtbridge.module(Model(step))
    params, state = net.init()
    for _ in range(2):
        _, changed = net(params, state, X)
        state |= changed
        model(torch.tensor(np.asarray(X)))
    assert list(net.state_dict(params, state)) == list(model.state_dict())
    loaded = net.load(params, state)
    x = torch.ones(3)
    np.testing.assert_allclose(loaded(x), model(x), rtol=1e-6)
    assert [*loaded.table] == [*model.table]


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))])
def test_a_copy_of_the_module_finds_it_too(copied: Callable):
    net = jtbridge.module(Model(keys_of_other_classes))
    params, state = net.init()
    _, changed = net(params, state, X)
    expected, _ = net(params, state | changed, X)
    np.testing.assert_array_equal(copied(net)(params, state | changed, X)[0], expected)


def test_state_of_another_process_needs_a_trace_first():
    net, other = (jtbridge.module(Model(keys_of_other_classes)) for _ in range(2))
    params, state = net.init()
    _, changed = net(params, state, X)
    with pytest.raises(ModelError, match=r"let this one find out where.*jax\.eval_shape\(net, \*net\.init\(\)"):
        other(params, state | changed, X)
    jax.eval_shape(other, *other.init(), X)
    expected, _ = net(params, state | changed, X)
    np.testing.assert_array_equal(other(params, state | changed, X)[0], expected)


def in_two_orders(self: Model, x: torch.Tensor) -> torch.Tensor:
    for key in ("a", "b") if x.shape[0] == 3 else ("b", "a"):
        self.table[key] = x * 1
    return x * 1


def in_two_containers(self: Model, x: torch.Tensor) -> torch.Tensor:
    self.value = (x * 1,) if x.shape[0] == 3 else [x * 1]
    return x * 1


def in_two_dtypes(self: Model, x: torch.Tensor) -> torch.Tensor:
    self.value = x.double() if x.shape[0] == 3 else x * 1
    return x * 1


@pytest.mark.parametrize("step", [in_two_orders, in_two_containers, in_two_dtypes])
def test_names_that_do_not_say_which_state_it_is(step: Callable):
    net = jtbridge.module(Model(step))
    params, state = net.init()
    net(params, state, X)
    with pytest.raises(ModelError, match="The state does not say which of them it has"):
        net(params, state, jnp.ones(4))


class Store:
    """A plain object that refers to a module and has tensors."""

    def __init__(self, owner: nn.Module):
        self.owner = owner
        self.total = torch.zeros(())
        self.cache: list = []
        self.table: dict = {}
        self.extra = None


class Filled(nn.Module):
    """A module whose containers have tensors."""

    def __init__(self, step: Callable):
        super().__init__()
        self.step = step
        self.linear = nn.Linear(3, 3)
        self.store = Store(self.linear)
        self.items = (torch.zeros(3),)
        self.table = collections.OrderedDict(a=torch.zeros(()), b=torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.step(self, x)
        return x * 1


def set_total(self: Filled, x: torch.Tensor) -> None:
    self.store.total = self.store.total + x.sum()


def write_total(self: Filled, x: torch.Tensor) -> None:
    self.store.total += x.sum()


def grow_cache(self: Filled, x: torch.Tensor) -> None:
    self.store.cache.append(x * 1)


def fill_table(self: Filled, x: torch.Tensor) -> None:
    self.store.table["k"] = x * 1


def replace_none(self: Filled, x: torch.Tensor) -> None:
    self.store.extra = x * 1


def least_recently_used(self: Filled, x: torch.Tensor) -> None:
    key = next(iter(self.table))
    self.table[key] = self.table[key] + 10
    self.table.move_to_end(key)


def list_for_tuple(self: Filled, x: torch.Tensor) -> None:
    self.items = [x * 1]


@pytest.mark.parametrize("wrapper", [lambda net: net, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize(
    "step",
    [set_total, write_total, grow_cache, fill_table, replace_none, least_recently_used, list_for_tuple],
)
def test_state_without_a_name_is_refused(step: Callable, wrapper: Callable):
    model = Filled(step)
    net = jtbridge.module(model)
    params, state = net.init()
    with pytest.raises(MutationError, match=r"(store|table|items)|writes to a tensor of shape \(\) in an object"):
        wrapper(net)(params, state, X)
    assert model.store.total == 0
    assert (model.store.cache, model.store.table, model.store.extra) == ([], {}, None)
    assert [*model.table] == ["a", "b"]
