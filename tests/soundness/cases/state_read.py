"""State that is read: changed between two uses."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from ._case import CASES, ROWS, Case, V, case


def _changes(section: str, name: str, make: Callable[[], tuple[Any, Callable[[], None]]]) -> None:
    """Add a case for a kind of state: a function is called, differentiated and batched before and after the change."""

    def script(run: Any) -> Iterator[Any]:
        function, change = make()
        f = run.wrap(function)
        yield run(f, V)
        change()
        yield run(f, V)
        yield run.grad(f, V)
        yield run.vmap(f, ROWS)
        yield run(run.wrap(function), V)

    CASES.append(Case(name, section, script))


def changed(make: Callable[[], tuple[Any, Callable[[], None]]]) -> None:
    """Add a case for state, for which `make` returns a reader and a function that changes it."""
    _changes("state read", make.__name__.replace("_", " ").strip(), make)


def _linear(seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(4, 4)


@changed
def weight_data_replaced():
    m = _linear()
    return m, lambda: setattr(m.weight, "data", torch.eye(4) * 3)


@changed
def weight_multiplied_behind_autograd():
    w = torch.ones(4, requires_grad=True)
    return lambda v: v * w, lambda: w.data.mul_(3)


@changed
def large_weight_written():
    w = torch.ones(100, 4)
    return lambda v: (w * v).sum(0), lambda: w.mul_(3)


@changed
def vector_to_parameters():
    m = _linear()
    return m, lambda: nn.utils.vector_to_parameters(torch.ones(20), m.parameters())


@changed
def array_behind_from_numpy():
    array = np.ones(4, np.float32)
    w = torch.from_numpy(array)
    return lambda v: v * w, lambda: np.multiply(array, 3, out=array)


@changed
def numpy_array_read_inside():
    array = np.ones(4, np.float32)
    return lambda v: v * torch.as_tensor(array), lambda: np.multiply(array, 3, out=array)


@changed
def parameter_replaced():
    m = _linear()
    return m, lambda: setattr(m, "weight", nn.Parameter(torch.eye(4)))


@changed
def number_of_a_module():
    m = nn.LayerNorm(4)
    return m, lambda: setattr(m, "eps", 10.0)


@changed
def negative_slope_of_a_module():
    m = nn.LeakyReLU(0.1)
    return lambda v: m(-v), lambda: setattr(m, "negative_slope", 0.7)


@changed
def probability_of_dropout():
    m = nn.Dropout(0.5).eval()
    return lambda v: v * m.p + m(v), lambda: setattr(m, "p", 0.25)


@changed
def flag_of_a_module():
    class Net(nn.Module):
        on = True

        def forward(self, v):
            return v * 2 if self.on else v - 2

    m = Net()
    return m, lambda: setattr(m, "on", False)


@changed
def layer_appended():
    m = nn.Sequential(_linear())
    return m, lambda: m.append(nn.Sigmoid())


@changed
def layer_replaced():
    m = nn.Sequential(_linear(), nn.Tanh())
    return m, lambda: m.__setitem__(0, _linear(1))


@changed
def forward_hook_registered():
    m = _linear()
    return m, lambda: m.register_forward_hook(lambda m, a, y: y * 10)


@changed
def forward_hook_removed():
    m = _linear()
    handle = m.register_forward_hook(lambda m, a, y: y * 10)
    return m, handle.remove


@changed
def full_backward_hook_registered():
    m = _linear()
    return m, lambda: m.register_full_backward_hook(lambda m, gi, go: (gi[0] * 10,))


@changed
def forward_of_an_instance():
    m = _linear()
    return m, lambda: setattr(m, "forward", lambda v: v - 7)


@changed
def adapter_disabled():
    class Adapter(nn.Module):
        def __init__(self):
            super().__init__()
            self.base, self.extra, self.disabled = _linear(), _linear(1), [False]

        def forward(self, v):
            return self.base(v) if self.disabled[0] else self.base(v) + self.extra(v)

    m = Adapter()
    return m, lambda: m.disabled.__setitem__(0, True)


@changed
def attribute_of_an_object_with_a_method():
    class Model:
        def __init__(self):
            self.w = torch.ones(4)

        def run(self, v):
            return v * self.w

    model = Model()
    return model.run, lambda: setattr(model, "w", torch.full((4,), 3.0))


@changed
def item_of_a_list():
    items = [torch.ones(4)]
    return lambda v: v * items[0], lambda: items.__setitem__(0, torch.full((4,), 3.0))


@changed
def item_of_a_dict():
    items = {"w": torch.ones(4)}
    return lambda v: v * items["w"], lambda: items.update(w=torch.full((4,), 3.0))


@changed
def length_of_a_list():
    items = [1, 2]
    return lambda v: v * len(items), lambda: items.append(3)


@changed
def global_number_of_a_helper():
    module = types.ModuleType("helpers")
    exec("SCALE = 2.0\ndef helper(v):\n    return v * SCALE", module.__dict__)
    return lambda v: module.helper(v) + 1, lambda: setattr(module, "SCALE", 5.0)


@changed
def global_tensor_of_a_helper():
    module = types.ModuleType("helpers")
    exec("import torch\nW = torch.ones(4)\ndef helper(v):\n    return v * W", module.__dict__)
    return lambda v: module.helper(v) + 1, lambda: setattr(module, "W", torch.full((4,), 5.0))


@changed
def closure_value_of_a_helper():
    scale = 2.0

    def helper(v):
        return v * scale

    def change():
        nonlocal scale
        scale = 5.0

    return lambda v: helper(v) + 1, change


@changed
def defaults_of_a_function():
    def f(v, scale=2.0):
        return v * scale

    return f, lambda: setattr(f, "__defaults__", (5.0,))


@changed
def code_of_a_function():
    def f(v):
        return v * 2

    return f, lambda: setattr(f, "__code__", (lambda v: v * 7).__code__)


@changed
def method_of_a_class():
    class Model:
        def scaled(self, v):
            return v * 2

        def __call__(self, v):
            return self.scaled(v)

    return Model(), lambda: setattr(Model, "scaled", lambda self, v: v * 7)


@changed
def train_and_eval():
    m = nn.Sequential(_linear())

    def f(v):
        return m(v) * (2 if m.training else 3)

    return f, m.eval


@changed
def weight_of_a_batch_norm():
    m = nn.BatchNorm1d(4, track_running_stats=False)
    m.weight.data.fill_(2.0)
    return lambda v: (m(torch.stack([v, v * v, v.sin()])) * v).sin().sum(0), lambda: m.weight.data.fill_(5.0)


@changed
def requires_grad_of_a_parameter():
    m = _linear()
    return lambda v: m(v) * (2 if m.weight.requires_grad else 3), lambda: m.requires_grad_(False)


@changed
def state_dict_loaded():
    m = _linear()
    return m, lambda: m.load_state_dict(_linear(1).state_dict())


@changed
def parametrization_registered():
    m = _linear()

    class Twice(nn.Module):
        def forward(self, w):
            return w * 2

    return m, lambda: nn.utils.parametrize.register_parametrization(m, "weight", Twice())


@changed
def weight_norm_scaled():
    m = nn.utils.parametrizations.weight_norm(_linear())
    return m, lambda: m.parametrizations.weight.original0.data.mul_(3)


@changed
def spectral_norm_of_eval():
    m = nn.utils.parametrizations.spectral_norm(_linear()).eval()
    return m, lambda: m.parametrizations.weight.original.data.add_(torch.eye(4))


@changed
def buffer_written():
    m = nn.Module()
    m.register_buffer("w", torch.ones(4))
    m.forward = lambda v: v * m.w
    return m, lambda: m.w.mul_(3)


@changed
def default_dtype():
    return lambda v: v * torch.ones(1).element_size(), lambda: torch.set_default_dtype(torch.float64)


@changed
def grad_mode():
    w = torch.ones(4, requires_grad=True)
    return lambda v: v * (2 if torch.is_grad_enabled() else 3) * w, lambda: None


@changed
def environment_variable():
    variables = {"SCALE": "2"}
    return lambda v: v * float(variables["SCALE"]), lambda: variables.update(SCALE="5")


@changed
def optimizer_step():
    w = nn.Parameter(torch.ones(4))
    w.grad = torch.ones(4)
    return lambda v: v * w, lambda: torch.optim.SGD([w], lr=0.5).step()


@changed
def base_of_a_view():
    base = torch.ones(3, 4)
    view = base[1]
    return lambda v: v * view, lambda: base.mul_(3)


@changed
def tensor_with_another_storage():
    w = torch.ones(4)
    return lambda v: v * w, lambda: w.set_(torch.full((4,), 3.0))


@changed
def function_in_a_table():
    table = {"f": torch.sin}
    return lambda v: table["f"](v), lambda: table.update(f=torch.cos)


@changed
def partial_of_a_changed_list():
    items = [2.0]
    return lambda v: v * sum(items), lambda: items.append(3.0)


@changed
def property_of_an_object():
    class Model:
        value = 2.0

        @property
        def scale(self):
            return self.value * 2

        def __call__(self, v):
            return v * self.scale

    model = Model()
    return model, lambda: setattr(model, "value", 5.0)


@changed
def cached_result_is_cleared():
    cache: dict[str, torch.Tensor] = {"mask": torch.ones(4)}
    return lambda v: v * cache["mask"], lambda: cache.update(mask=torch.tensor([1.0, 0.0, 1.0, 0.0]))


@case("state read")
def autocast_is_entered(run):
    m = _linear()
    f = run.wrap(lambda v: m(v).float() if not torch.is_autocast_enabled("cpu") else v * 5)
    yield run(f, V)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        yield run(f, V)
    yield run(f, V)


@case("state read")
def recording_is_switched_off(run):
    f = run.wrap(lambda v: v * (2 if torch.is_grad_enabled() else 3))
    yield run(f, V)
    with torch.no_grad():
        yield run(f, V)


@case("state read")
def value_and_gradient_agree_after_a_change(run):
    scale = [2.0]
    f = run.wrap(lambda v: (v * scale[0]) ** 2)
    yield run.grad(f, V)
    scale[0] = 3.0
    yield run(f, V)
    yield run.grad(f, V)
    yield run.jacfwd(f, V)


@case("state read")
def shape_seen_before_the_change(run):
    scale = [2.0]
    f = run.wrap(lambda v: v * scale[0])
    yield run(f, V)
    yield run(f, V[:2])
    scale[0] = 3.0
    yield run(f, V)
    yield run(f, V[:2])


@case("state read")
def global_counter_that_only_the_caller_writes(run):
    q = {"n": 1}
    f = run.wrap(lambda v: v * q["n"])
    for _ in range(3):
        yield run(f, V)
        q["n"] += 1
