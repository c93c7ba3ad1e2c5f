"""A torch function that reads state of every kind, and the ways to change that state.

`World.function` is one function of one tensor. `CHANGES` maps a name to a function of the world and a number, which
changes one thing that `World.function` reads, as a user would. Nothing here knows of jtbridge.
"""

from __future__ import annotations

import contextlib
import dataclasses
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

_HELPERS = """
import torch

FACTOR = 1.0
TABLE = {"scale": 1.0}

def shifted(x):
    return x + 0.25

def helper(x, power=1.0):
    return shifted(x) * FACTOR * TABLE["scale"] + 0.1 * power
"""


@dataclasses.dataclass
class Config:
    """A plain dataclass that a function reads."""

    rate: float = 1.0
    inner: dict[str, float] = dataclasses.field(default_factory=lambda: {"rate": 1.0})


class Times(nn.Module):
    """A parametrization."""

    def __init__(self, factor: float):
        super().__init__()
        self.factor = factor

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * self.factor


class World:
    """All of the state, new for each test."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.helpers = types.ModuleType("helpers")  # with separate globals, which a change may set
        exec(_HELPERS, self.helpers.__dict__)
        self.net = _net()
        self.numpy = np.array([0.5, -0.5, 0.25], np.float32)
        self.behind_numpy = torch.from_numpy(self.numpy)
        self.list = [torch.tensor([1.0, 2.0, 3.0]), 1.0]
        self.dict = {"w": torch.tensor([0.5, 1.5, -1.0]), "nested": {"n": 1.0}}
        self.attributes = types.SimpleNamespace(w=torch.tensor([1.0, -1.0, 0.5]), n=1.0)
        self.config = Config()
        self.functions: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"f": torch.sin}
        self.plain = torch.tensor([0.3, 0.6, 0.9])
        self.base = torch.ones(4, 3)
        self.view = self.base[1]
        self.parameter = nn.Parameter(torch.tensor([1.0, 0.5, -0.5]))
        self.optimizer = torch.optim.SGD([self.parameter], lr=0.1)
        self.hooks: list[Any] = []
        self.autocast = False
        self.double = False
        self.closed, self.close_over = _closure()

    def function(self, x: torch.Tensor) -> torch.Tensor:
        """The wrapped function, which reads all state of the world."""
        y = self.net(x) + self.helpers.helper(x)
        y = y + x * self.behind_numpy + torch.as_tensor(self.numpy.copy()) * x
        y = y + x * self.list[0] * self.list[1] + sum(self.list[2:]) * x
        y = y + x * self.dict["w"] * self.dict["nested"]["n"] + len(self.dict) * x
        y = y + x * self.attributes.w * self.attributes.n
        y = y + x * self.config.rate * self.config.inner["rate"]
        y = y + self.functions["f"](x) + self.plain * x + self.view * x + self.parameter * x
        y = y + self.closed(x)
        y = y * torch.ones(1).element_size()  # the default dtype
        y = y * (1.5 if torch.is_autocast_enabled("cpu") else 1.0)
        return y * 0.1

    @contextlib.contextmanager
    def surroundings(self) -> Iterator[None]:
        """Apply torch's settings around a call."""
        before = torch.get_default_dtype()
        with contextlib.ExitStack() as stack:
            if self.autocast:
                stack.enter_context(torch.autocast("cpu", dtype=torch.bfloat16))
            torch.set_default_dtype(torch.float64 if self.double else torch.float32)
            try:
                yield
            finally:
                torch.set_default_dtype(before)


def _net() -> Any:
    class Layer(nn.Module):  # a new class for each world, because changes set its attributes
        gain = 1.0

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 3))

        def scaled(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.gain

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.scaled((self.weight * x).sum(-1))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.third = Layer(), Layer(), Layer()
            self.layers = nn.Sequential(Layer(), nn.Tanh())
            self.norm = nn.LayerNorm(3)
            self.blocks = nn.ModuleList([Layer()])
            self.parameters_of_it = nn.ParameterList([nn.Parameter(torch.ones(3))])
            self.drop = nn.Dropout(0.25)
            self.register_buffer("shift", torch.zeros(3))
            self.on = True
            self.rates = [1.0]
            self.act = nn.Sigmoid()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.first(x) + self.second(x) + self.third(x) + self.layers(x) + self.norm(x)
            for block in self.blocks:
                y = y + block(x)
            y = y + self.parameters_of_it[0] * x + self.act(x)
            y = y * (1 - self.drop.p) if self.on else y + x
            if self.first.weight.requires_grad:
                y = y + 0.5 * x
            return y * sum(self.rates) + self.shift * (1.25 if self.training else 1.0) + self.training * x

    return Net()


def _closure() -> tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[float], None]]:
    value = 1.0

    def closed(x: torch.Tensor) -> torch.Tensor:
        return x * value

    def set_value(new: float) -> None:
        nonlocal value
        value = new

    return closed, set_value


Change = Callable[[World, float], None]
CHANGES: dict[str, Change] = {}


def change(function: Change) -> Change:
    """Add a way to change state."""
    CHANGES[function.__name__] = function
    return function


def _matrix(n: float) -> torch.Tensor:
    return torch.arange(9.0, dtype=torch.float32).reshape(3, 3) / 9 * n


def _vector(n: float) -> torch.Tensor:
    return torch.tensor([1.0, -0.5, 0.25], dtype=torch.float32) * n


@change
def weight_data_is_replaced(w: World, n: float) -> None:
    w.net.first.weight.data = _matrix(n)


@change
def weight_data_is_multiplied(w: World, n: float) -> None:
    w.net.first.weight.data.mul_(1 + n)


@change
def weight_is_written_without_recording(w: World, n: float) -> None:
    with torch.no_grad():
        w.net.first.weight.add_(n)


@change
def an_element_of_a_weight_is_set(w: World, n: float) -> None:
    w.net.first.weight.data[0, 0] = 5 * n


@change
def vector_to_parameters(w: World, n: float) -> None:
    parameters = list(w.net.layers.parameters()) or list(w.net.parameters())
    vector = nn.utils.parameters_to_vector(parameters).detach()
    nn.utils.vector_to_parameters(vector + n, parameters)


@change
def numpy_behind_a_tensor_is_written(w: World, n: float) -> None:
    w.numpy += np.float32(n)


@change
def a_parameter_is_replaced(w: World, n: float) -> None:
    w.net.first.weight = nn.Parameter(_matrix(n))


@change
def weights_are_swapped(w: World, n: float) -> None:
    torch.utils.swap_tensors(w.parameter, nn.Parameter(w.parameter.detach() + n))
    w.optimizer = torch.optim.SGD([w.parameter], lr=0.1)


@change
def eps_is_set(w: World, n: float) -> None:
    w.net.norm.eps = 10.0 * n


@change
def dropout_p_is_set(w: World, n: float) -> None:
    w.net.drop.p = min(0.9, abs(n) / 4)


@change
def a_flag_is_switched(w: World, n: float) -> None:
    w.net.on = not w.net.on


@change
def a_layer_is_appended(w: World, n: float) -> None:
    w.net.layers.append(nn.Softplus(beta=0.5 + abs(n)))


@change
def a_layer_is_replaced(w: World, n: float) -> None:
    w.net.layers[0] = nn.ELU(abs(n))


@change
def a_block_is_appended(w: World, n: float) -> None:
    w.net.blocks.append(nn.CELU(abs(n)))


@change
def a_module_attribute_is_replaced(w: World, n: float) -> None:
    w.net.act = nn.ReLU() if isinstance(w.net.act, nn.Sigmoid) else nn.Sigmoid()


@change
def a_parameter_of_a_list_is_replaced(w: World, n: float) -> None:
    w.net.parameters_of_it[0] = nn.Parameter(_vector(n))


@change
def a_forward_hook_is_registered(w: World, n: float) -> None:
    w.hooks.append(w.net.first.register_forward_hook(lambda module, args, y: y * (1 + n)))


@change
def a_forward_pre_hook_is_registered(w: World, n: float) -> None:
    w.hooks.append(w.net.second.register_forward_pre_hook(lambda module, args: (args[0] + n,)))


@change
def hooks_are_removed(w: World, n: float) -> None:
    while w.hooks:
        w.hooks.pop().remove()


@change
def forward_of_an_instance_is_set(w: World, n: float) -> None:
    w.net.norm.forward = lambda x: x * n


@change
def forward_of_an_instance_is_deleted(w: World, n: float) -> None:
    w.net.norm.__dict__.pop("forward", None)


@change
def a_class_attribute_is_set(w: World, n: float) -> None:
    type(w.net.first).gain = 1.0 + n


@change
def a_method_of_a_class_is_set(w: World, n: float) -> None:
    type(w.net.first).scaled = lambda self, x: x * self.gain * n


@change
def a_buffer_is_written(w: World, n: float) -> None:
    w.net.shift.add_(n)


@change
def a_buffer_is_replaced(w: World, n: float) -> None:
    w.net.shift = _vector(n)


@change
def state_is_loaded(w: World, n: float) -> None:
    w.net.norm.load_state_dict({"weight": _vector(n), "bias": _vector(-n)})


@change
def state_is_loaded_by_assignment(w: World, n: float) -> None:
    w.net.norm.load_state_dict({"weight": _vector(-n), "bias": _vector(n)}, assign=True)


@change
def training_is_switched(w: World, n: float) -> None:
    w.net.train(not w.net.training)


@change
def requires_grad_is_switched(w: World, n: float) -> None:
    w.net.first.weight.requires_grad_(not w.net.first.weight.requires_grad)


@change
def a_parametrization_is_registered(w: World, n: float) -> None:
    if not parametrize.is_parametrized(w.net.third):
        parametrize.register_parametrization(w.net.third, "weight", Times(1 + n))


@change
def a_parametrization_is_changed(w: World, n: float) -> None:
    if parametrize.is_parametrized(w.net.third):
        w.net.third.parametrizations.weight[0].factor = 2 + n


@change
def a_parametrization_is_removed(w: World, n: float) -> None:
    if parametrize.is_parametrized(w.net.third):
        parametrize.remove_parametrizations(w.net.third, "weight", leave_parametrized=False)


@change
def weight_norm_is_scaled(w: World, n: float) -> None:
    if not parametrize.is_parametrized(w.net.second):
        parametrizations.weight_norm(w.net.second)
    w.net.second.parametrizations.weight.original0.data.mul_(1 + n)


@change
def a_python_list_of_a_module_grows(w: World, n: float) -> None:
    w.net.rates.append(n)


@change
def an_item_of_a_list_is_set(w: World, n: float) -> None:
    w.list[0] = _vector(n)


@change
def a_number_of_a_list_is_set(w: World, n: float) -> None:
    w.list[1] = n


@change
def a_list_grows(w: World, n: float) -> None:
    w.list.append(n)


@change
def a_tensor_of_a_list_is_written(w: World, n: float) -> None:
    w.list[0].add_(n)


@change
def an_item_of_a_dict_is_set(w: World, n: float) -> None:
    w.dict["w"] = _vector(n)


@change
def a_nested_number_of_a_dict_is_set(w: World, n: float) -> None:
    w.dict["nested"]["n"] = n


@change
def a_key_of_a_dict_is_added(w: World, n: float) -> None:
    w.dict[f"key {len(w.dict)}"] = n


@change
def an_attribute_is_set(w: World, n: float) -> None:
    w.attributes.w = _vector(n)


@change
def a_number_of_an_attribute_is_set(w: World, n: float) -> None:
    w.attributes.n = n


@change
def a_field_of_a_dataclass_is_set(w: World, n: float) -> None:
    w.config.rate = n


@change
def a_dict_of_a_dataclass_is_changed(w: World, n: float) -> None:
    w.config.inner["rate"] = n


@change
def a_global_number_is_set(w: World, n: float) -> None:
    w.helpers.FACTOR = n


@change
def a_global_dict_is_changed(w: World, n: float) -> None:
    w.helpers.TABLE["scale"] = n


@change
def a_global_function_is_replaced(w: World, n: float) -> None:
    w.helpers.shifted = lambda x: x * (n + 2)


@change
def defaults_of_a_function_are_set(w: World, n: float) -> None:
    w.helpers.helper.__defaults__ = (10 * n,)


@change
def code_of_a_function_is_replaced(w: World, n: float) -> None:
    if w.helpers.shifted.__code__.co_freevars:
        w.helpers.shifted = lambda x: x + 2
    other = (lambda x: x * 2 + 1) if w.helpers.shifted.__code__.co_consts != (None, 2, 1) else (lambda x: x - 3)
    w.helpers.shifted.__code__ = other.__code__


@change
def a_closure_value_is_set(w: World, n: float) -> None:
    w.close_over(n)


@change
def a_function_of_a_table_is_replaced(w: World, n: float) -> None:
    w.functions["f"] = lambda x: torch.cos(x) * n


@change
def a_closed_over_tensor_is_written(w: World, n: float) -> None:
    w.plain.mul_(1 + n)


@change
def a_closed_over_tensor_is_replaced(w: World, n: float) -> None:
    w.plain = _vector(n)


@change
def storage_of_a_tensor_is_replaced(w: World, n: float) -> None:
    w.plain.set_(_vector(n))


@change
def base_of_a_view_is_written(w: World, n: float) -> None:
    w.base.add_(n)


@change
def an_optimizer_steps(w: World, n: float) -> None:
    w.optimizer.zero_grad()
    (w.parameter * _vector(n)).sum().backward()
    w.optimizer.step()


@change
def default_dtype_is_switched(w: World, n: float) -> None:
    w.double = not w.double


@change
def autocast_is_switched(w: World, n: float) -> None:
    w.autocast = not w.autocast
