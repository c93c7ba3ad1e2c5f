"""Changes of Python values in attributes are refused, for values of every kind; an equal value is not a change."""

from __future__ import annotations

import decimal
import enum
import fractions
import types
import weakref
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

X = jnp.arange(3.0)
modes = pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])


class Mode(enum.Enum):
    FIRST = 1
    SECOND = 2


class Names(list):
    """A subclass of list."""


def double(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


def triple(x: torch.Tensor) -> torch.Tensor:
    return 3 * x


def times(factor: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: factor * x


class Changes(nn.Module):
    """A module whose call changes an attribute."""

    def __init__(self, change: Callable[[Any], Any]):
        super().__init__()
        self.change = change
        self.lin = nn.Linear(3, 3)
        self.act: Any = nn.ReLU()
        self.outside = [nn.ReLU()]
        self.outside[0].count = np.int64(1)  # type: ignore[assignment]
        self.float = np.float64(0)
        self.fraction = fractions.Fraction(1, 2)
        self.decimal = decimal.Decimal("0.5")
        self.dtype = torch.float32
        self.function: Any = double
        self.closure: Any = times(2)
        self.method: Any = self.lin.forward
        self.mode = Mode.FIRST
        self.kind: Any = int
        self.missing: Any = None
        self.array = np.zeros(3)
        self.bytes = bytearray(b"ab")
        self.names = Names("a")
        self.object = types.SimpleNamespace(module=self.lin, dtype=torch.float32)
        self.reference = weakref.ref(self.lin)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.change(self)
        return self.act(self.lin(x))


CHANGES: dict[str, Callable[[Any], Any]] = {
    "float": lambda self: setattr(self, "float", self.float + 1),
    "fraction": lambda self: setattr(self, "fraction", self.fraction + 1),
    "decimal": lambda self: setattr(self, "decimal", self.decimal + 1),
    "dtype": lambda self: setattr(self, "dtype", torch.float64),
    "function": lambda self: setattr(self, "function", triple),
    "closure": lambda self: setattr(self, "closure", times(3)),
    "method": lambda self: setattr(self, "method", self.act.forward),
    "mode": lambda self: setattr(self, "mode", Mode.SECOND),
    "kind": lambda self: setattr(self, "kind", float),
    "missing": lambda self: setattr(self, "missing", torch.float32),
    "array": lambda self: setattr(self, "array", np.ones(3)),
    "bytes": lambda self: self.bytes.extend(b"c"),
    "names": lambda self: self.names.append("b"),
    "object": lambda self: setattr(self.object, "dtype", torch.float64),
    "act": lambda self: setattr(self, "act", nn.Tanh()),
    "outside.0.count": lambda self: setattr(self.outside[0], "count", np.int64(2)),
    "array in place": lambda self: self.array.fill(1),
}


@modes
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_a_value_of_any_kind_is_refused(name: str, jit: bool):
    model = Changes(CHANGES[name])
    net = jtbridge.module(model)
    params, state = net.init()
    with pytest.raises(MutationError, match=rf"changed the attribute `{name.removesuffix(' in place')}"):
        (jax.jit(net) if jit else net)(params, state, X)
    assert model.array.tolist() == [0, 0, 0]
    assert (model.bytes, model.names) == (b"ab", ["a"])


def removes(self: Any) -> None:
    del self.act
    self.act = double


@modes
def test_a_submodule_that_a_call_removes(jit: bool):
    net = jtbridge.module(Changes(removes))
    with pytest.raises(MutationError, match="changed the attribute `act` from ReLU"):
        (jax.jit(net) if jit else net)(*net.init(), X)


def sets_equal_values(self: Any) -> None:
    self.float = self.float + 0
    self.fraction = fractions.Fraction(1, 2)
    self.decimal = decimal.Decimal("0.5")
    self.closure = times(2)
    self.method = self.lin.forward
    self.array = np.zeros(3)
    self.object = types.SimpleNamespace(module=self.lin, dtype=torch.float32)
    self.missing = types.SimpleNamespace(size=3)  # an object that each call makes again
    self.names = Names("a")
    self.reference = weakref.ref(self.lin)


@modes
def test_assigning_equal_values_is_not_a_change(jit: bool):
    net = jtbridge.module(Changes(sets_equal_values))
    assert (jax.jit(net) if jit else net)(*net.init(), X)[1] == {}


class Logs(nn.Module):
    def __init__(self):
        super().__init__()
        self.log = types.SimpleNamespace(calls=0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.log.calls += 1
        return x * 2


def test_object_of_another_class_is_shared_with_the_torch_module():
    model = Logs()
    net = jtbridge.module(model)
    for _ in range(2):
        net({}, {}, X)
    assert model.log.calls == 2
    with pytest.raises(MutationError, match=r"writes to `self\.module\.log\.calls`"):
        jax.jit(net)({}, {}, X)
    assert model.log.calls == 2


class WithMode(nn.Module):
    """A module whose `train` sets an attribute, which `forward` may change again."""

    def __init__(self, changes: bool):
        super().__init__()
        self.scale, self.changes = 1.0, changes

    def train(self, mode: bool = True) -> WithMode:
        super().train(mode)
        self.scale = 2.0 if mode else 3.0
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.changes:
            self.scale += 1
        return x * self.scale


@modes
def test_attributes_set_by_the_mode_are_not_a_change(jit: bool):
    net = jtbridge.module(WithMode(changes=False))
    params, state = net.init()
    call = jax.jit(net, static_argnames="train") if jit else net
    for train, scale in ((True, 2.0), (False, 3.0)):
        assert call(params, state, X, train=train)[0].tolist() == (X * scale).tolist()
    net = jtbridge.module(WithMode(changes=True))
    with pytest.raises(MutationError, match=r"`scale` from 2\.0 to 3\.0"):
        net(*net.init(), X, train=True)


def test_clear_cache_drops_eager_traces_of_the_xla_backend():
    class Scale(torch.nn.Module):
        factor = 2.0

        def forward(self, x):
            return x * self.factor

    model = Scale()
    net = jtbridge.module(model, backend="xla")
    assert net({}, {}, jnp.ones(1))[0] == 2
    model.factor = 3.0
    net.clear_cache()
    assert net({}, {}, jnp.ones(1))[0] == 3


def test_clear_cache_drops_jitted_calls():
    model = torch.nn.Hardtanh(-1.0, 1.0)
    net = jtbridge.module(model)
    compiled = jax.jit(net, static_argnames="train")
    assert compiled({}, {}, X, train=True)[0].max() == 1
    model.max_val = 0.5
    assert compiled({}, {}, X, train=True)[0].max() == 1
    net.clear_cache()
    assert compiled({}, {}, X, train=True)[0].max() == 0.5
