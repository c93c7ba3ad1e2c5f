"""One table of cases that a bridge between torch and JAX easily gets wrong, each a script of a few lines.

A script is run twice: with torch, which says what is right, and with jtbridge. `run.wrap(f)` is `f` itself for torch,
`run(f, x)` calls it, `run.grad`, `run.jacfwd` and `run.vmap` transform it. What a script yields is compared.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import itertools
import pickle
import random
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import jtbridge

V = torch.arange(1.0, 5.0)
ROWS = torch.stack([V, V.flip(0) * 0.5])


@dataclasses.dataclass(frozen=True)
class Case:
    """A script, and where it may be refused by an error of jtbridge instead of being right."""

    name: str
    section: str
    script: Callable[[Any], Iterator[Any]]
    refused: tuple[
        str, ...
    ] = ()  # of "eager", "jit", "xla" (under jit, where it cannot be translated, and the others call it)
    isolated: bool = False  # a mistake would end the process

    def may_refuse(self, mode: str, backend: str) -> bool:
        return mode in self.refused or (mode == "jit" and backend in self.refused)


CASES: list[Case] = []


def case(section: str, *refused: str, isolated: bool = False) -> Callable[[Any], Any]:
    """Add a case, named by its function."""

    def add(script: Any) -> Any:
        CASES.append(Case(script.__name__.replace("_", " ").strip(), section, script, refused, isolated))
        return script

    return add


# State that is read: changed between two uses.


def _changes(section: str, name: str, make: Callable[[], tuple[Any, Callable[[], None]]]) -> None:
    """One row for a kind of state: called, differentiated and batched before and after the change."""

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
    """Add a row for the state that `make` returns a reader of, and a change of."""
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


# State that is written: torch's answer, or a refusal under a trace.


@case("state written", "jit")
def counter_in_a_dict(run):
    q = {"n": 0}

    def f(v):
        q["n"] += 1
        return v * q["n"]

    f = run.wrap(f)
    for _ in range(3):
        yield run(f, V)
    yield torch.tensor(q["n"])


@case("state written", "jit")
def counter_of_rows(run):
    q = {"n": 0}

    def f(v):
        q["n"] += 1
        return v * (2 if v[0] > 1 else 3)

    yield run.vmap(run.wrap(f), ROWS)
    yield torch.tensor(q["n"])


@case("state written", "jit")
def counter_in_a_global(run):
    module = types.ModuleType("counting")
    exec("N = 0\ndef f(v):\n    global N\n    N += 1\n    return v * N", module.__dict__)
    f = run.wrap(module.f)
    for _ in range(3):
        yield run(f, V)


@case("state written", "jit")
def counter_in_a_closure(run):
    n = 0

    def f(v):
        nonlocal n
        n += 1
        return v * n

    f = run.wrap(f)
    for _ in range(3):
        yield run(f, V)


@case("state written", "jit")
def iterator(run):
    numbers = itertools.count(1)
    f = run.wrap(lambda v: v * next(numbers))
    for _ in range(3):
        yield run(f, V)


@case("state written", "jit")
def list_that_grows(run):
    seen: list[int] = []

    def f(v):
        seen.append(len(seen))
        return v * len(seen)

    f = run.wrap(f)
    for _ in range(3):
        yield run(f, V)


@case("state written", "jit")
def module_that_counts(run):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.n = 0

        def forward(self, v):
            self.n += 1
            return v * self.n

    m = Net()
    f = run.wrap(m)
    for _ in range(3):
        yield run(f, V)


@case("state written", "jit")
def buffer_that_counts(run):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("n", torch.zeros(()))

        def forward(self, v):
            self.n += 1
            return v * self.n

    f = run.wrap(Net())
    for _ in range(3):
        yield run(f, V)


@case("state written", "jit")
def batch_norm_in_train_mode(run):
    m = nn.BatchNorm1d(4)
    f = run.wrap(m)
    yield run(f, ROWS)
    yield run(f, ROWS * 2)
    m.eval()
    yield run(f, ROWS)


@case("state written", "jit")
def attribute_replaced_by_a_result(run):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("b", torch.zeros(4))

        def forward(self, v):
            self.b = self.b + v
            return self.b * 1

    f = run.wrap(Net())
    for _ in range(3):
        yield run(f, V)


@case("state written", "jit")
def random_of_python(run):
    f = run.wrap(lambda v: v * random.random())
    random.seed(3)
    first = run(f, V), run(f, V)
    yield first[0]
    yield first[1]


@case("state written", "jit")
def random_of_numpy(run):
    f = run.wrap(lambda v: v * float(np.random.rand()))
    np.random.seed(3)
    for _ in range(2):
        yield run(f, V)


@case("state written", "jit")
def random_of_a_numpy_generator(run):
    generator = np.random.default_rng(3)
    f = run.wrap(lambda v: v * float(generator.random()))
    for _ in range(2):
        yield run(f, V)


@case("state written", "jit")
def random_of_torch(run):
    f = run.wrap(lambda v: v * torch.rand(4))
    yield run.drawn(f, V)


@case("state written", "jit")
def dropout_without_a_key(run):
    f = run.wrap(lambda v: F.dropout(v, 0.5))
    yield run.drawn(f, V)


@case("state written", "jit")
def generator_outside(run):
    generator = torch.Generator().manual_seed(3)
    f = run.wrap(lambda v: v * torch.rand(4, generator=generator))
    for _ in range(2):
        yield run(f, V)


@case("state written", "xla")
def generator_made_inside(run):
    f = run.wrap(lambda v: v * torch.rand(4, generator=torch.Generator().manual_seed(3)))
    for _ in range(2):
        yield run(f, V)


@case("state written", "jit")
def backward_inside(run):
    w = nn.Parameter(torch.ones(4))

    def f(v):
        (v * w).sum().backward()
        return w.grad * 1

    f = run.wrap(f)
    yield run(f, V)
    yield run(f, V)


@case("state written", "jit")
def optimizer_step_inside(run):
    w = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.Adam([w], lr=0.1)

    def f(v):
        optimizer.zero_grad()
        loss = ((v * w) ** 2).sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    f = run.wrap(f)
    for _ in range(3):
        yield run(f, V)


@case("state written")
def state_is_untouched_after_a_refusal(run):
    w = nn.Parameter(torch.ones(4))
    q: dict[str, Any] = {"n": 0}

    def f(v):
        q["n"] += 1
        q["last"] = v
        (v * w).sum().backward()
        return v * q["n"]

    try:
        run(run.wrap(f), V)
    except jtbridge.errors.JtbridgeError:
        # As before, or as torch leaves it: never an object of the tracer.
        assert "last" not in q
        assert w.grad is None
        q["n"] += 1
        w.grad = V.clone()
    yield torch.tensor(q["n"])
    yield w.grad * 1


@case("state written")
def local_list_is_pure(run):
    def f(v):
        items = []
        for i in range(3):
            items.append(v * i)
        items[0] += 1
        return torch.stack(items).sum(0)

    yield run(run.wrap(f), V)


@case("state written", "jit")
def cache_filled_at_the_first_call(run):
    cache: dict[int, torch.Tensor] = {}

    def f(v):
        if 4 not in cache:
            cache[4] = torch.arange(4.0) * 2
        return v * cache[4]

    f = run.wrap(f)
    yield run(f, V)
    yield run(f, V * 2)


@case("state written", "jit")
def cache_that_depends_on_the_argument(run):
    cache: dict[str, torch.Tensor] = {}

    def f(v):
        if "v" not in cache:
            cache["v"] = v * 2
        return v + cache["v"]

    f = run.wrap(f)
    yield run(f, V)
    yield run(f, V * 3)


@case("state written")
def argument_written(run):
    def f(v):
        v.mul_(2)
        return v + 1

    f, x = run.wrap(f), V.clone()
    yield run(f, x)
    yield run(f, x)
    yield x


@case("state written")
def argument_written_through_a_view(run):
    def f(v):
        v[1:].zero_()
        return v.sum()

    f = run.wrap(f)
    yield run(f, V)
    yield run.grad(f, V)


@case("state written")
def argument_written_through_data_and_numpy(run):
    def f(v):
        v.data[0] = 100.0
        return v * 1

    f, x = run.wrap(f), V.clone()
    yield run(f, x)
    yield x


@case("state written", "jit")
def list_argument_appended_to(run):
    def f(items):
        items.append(items[0] * 2)
        return sum(items)

    yield run(run.wrap(f), [V, V])


@case("state written", "jit")
def printing(run):
    lines: list[int] = []

    def f(v):
        lines.append(1)
        return v * 2

    f = run.wrap(f)
    for _ in range(3):
        yield run(f, V)
    yield torch.tensor(len(lines))


# Tracing and lowering.


@case("tracing")
def sign_of_a_zero_constant(run):
    zeros = torch.tensor([0.0, -0.0, 0.0, -0.0])
    yield run(run.wrap(lambda v: v / zeros), V)


@case("tracing")
def two_constants_that_compare_equal(run):
    a, b = torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0])
    yield run(run.wrap(lambda v: torch.stack([v[:2] / a, v[:2] / b])), V)


@case("tracing")
def number_minus_zero(run):
    yield run(run.wrap(lambda v: torch.full_like(v, -0.0) * 1), V)
    yield run(run.wrap(lambda v: 1 / (v * -0.0)), V)


@case("tracing")
def nan_constant(run):
    a = torch.tensor([float("nan"), 1.0, float("inf"), -float("inf")])
    yield run(run.wrap(lambda v: v * a), V)


@case("tracing")
def grad_mode_with_a_parameter(run):
    p = nn.Parameter(torch.full((4,), 2.0))
    f = run.wrap(lambda v: p * v * (2 if torch.is_grad_enabled() else 3))
    yield run(f, V)


@case("tracing")
def requires_grad_of_a_result(run):
    p = nn.Parameter(torch.full((4,), 2.0))
    f = run.wrap(lambda v: v * 2 if (p * v).requires_grad else v * 3)
    yield run(f, V)


@case("tracing", "xla")
def swallowed_exception(run):
    def f(v):
        try:
            s = float(v.sum())
        except Exception:  # noqa: BLE001 - as users write it
            s = 0.0
        return v * s

    yield run(run.wrap(f), V)


@case("tracing", "xla")
def swallowed_exception_of_item(run):
    def f(v):
        try:
            n = v[0].item()
        except (RuntimeError, TypeError, ValueError):
            n = -1
        return v + n

    yield run(run.wrap(f), V)


@case("tracing", "xla")
def caught_error_of_linear_algebra(run):
    def f(m):
        try:
            return torch.linalg.inv(m)
        except torch.linalg.LinAlgError:
            return m * 0 - 1

    f = run.wrap(f)
    yield run(f, torch.eye(2) * 2)
    yield run(f, torch.ones(2, 2))


@case("tracing", "xla")
def caught_error_of_a_second_factorization(run):
    def f(m):
        y = torch.linalg.inv(m)
        for _ in range(3):
            try:
                return torch.linalg.cholesky(m) + y
            except RuntimeError:
                m = m + torch.eye(2)
        return y

    f = run.wrap(f)
    yield run(f, torch.eye(2) * 2)
    yield run(f, torch.eye(2) * -0.5)


@case("tracing", "xla")
def caught_index_error(run):
    table = torch.arange(6.0).reshape(3, 2)

    def f(i):
        try:
            return F.embedding(i, table)
        except IndexError:
            return torch.zeros(2, 2)

    f = run.wrap(f)
    yield run(f, torch.tensor([0, 2]))
    yield run(f, torch.tensor([0, 5]))


@case("tracing")
def error_that_nobody_catches(run):
    def f(m):
        try:
            return torch.linalg.inv(m).sum(0)
        finally:
            m = m * 2

    yield run(run.wrap(f), torch.eye(2) * 2)


@case("tracing")
def branch_on_data(run):
    f = run.wrap(lambda v: v * 2 if v.sum() > 5 else v - 2)
    yield run(f, V)
    yield run(f, -V)


_CONDITIONS = {
    "equal": lambda v: torch.equal(v, V),
    "allclose": lambda v: torch.allclose(v, V + 1e-3, rtol=1e-2),
    "allclose of no numbers": lambda v: torch.allclose(v * torch.nan, V * torch.nan, equal_nan=True),
    "any": lambda v: bool(torch.any(v > 3.5)),
    "is nonzero": lambda v: torch.is_nonzero(v[0] - 1),
    "truth of a number": lambda v: v[0] - 1,
    "number in a tensor": lambda v: 3 in v,
    "tensor in a tensor": lambda v: v[0] in torch.tensor([1.0, 7.0]),
    "item": lambda v: (v > 3).any().item(),
    "two conditions": lambda v: v.sum() > 5 and not v[0] < 0,
}


def _branches(name: str, condition: Callable[[torch.Tensor], Any]) -> None:
    """One row for a condition in an ``if``, with values for both ways."""

    def script(run: Any) -> Iterator[Any]:
        f = run.wrap(lambda v: v * 2 if condition(v) else v.sin())
        for v in (V, -V, torch.tensor([0.0, 3.0, 0.0, torch.nan])):
            yield run(f, v)
            yield run.grad(f, v)
        yield run.vmap(f, torch.stack([V, -V, V + 1]))
        yield run.jacfwd(f, V)

    CASES.append(Case(f"branch by {name}", "tracing", script))


for _name, _condition in _CONDITIONS.items():
    _branches(_name, _condition)


@case("tracing", "xla")
def forward_mode_of_products_that_are_scattered(run):
    i = torch.tensor([0, 0, 1, 1])
    f = run.wrap(lambda v: v.scatter_reduce(0, i, v * 2, "prod"))
    yield run.grad(f, V)
    yield run.jacfwd(f, V)


@case("tracing")
def truth_that_is_returned(run):
    f = run.wrap(lambda v: torch.tensor(torch.equal(v, V)) & torch.tensor(3 in v))
    yield run(f, V)
    yield run(f, -V)


@case("tracing")
def branch_that_writes(run):
    def f(v):
        if v[0] > 0:
            v.mul_(3)
        return v + 1

    f = run.wrap(f)
    yield run(f, V)
    yield run(f, -V)


@case("tracing", "xla")
def check_before_a_caught_error(run):
    def f(m):
        if m.isnan().any():
            raise ValueError("no numbers")
        try:
            return torch.linalg.inv(m)
        except torch.linalg.LinAlgError:
            return m * 0 - 1

    f = run.wrap(f)
    yield run(f, torch.eye(2) * 2)
    yield run(f, torch.ones(2, 2))


@case("tracing", "xla")
def error_caught_on_one_of_two_ways(run):
    def f(m):
        if m.sum() > 100:
            return m * 2
        try:
            return torch.linalg.inv(m)
        except torch.linalg.LinAlgError:
            return m * 0 - 1

    f = run.wrap(f)
    yield run(f, torch.eye(2) * 2)
    yield run(f, torch.ones(2, 2))
    yield run(f, torch.ones(2, 2) * 100)


@case("tracing", "xla")
def check_before_an_assignment_to_data(run):
    def f(v):
        if v.isnan().any():
            raise ValueError("no numbers")
        w = v.clone()
        w.data = v * 5
        return w

    yield run(run.wrap(f), V)


@case("tracing", "xla")
def branch_to_another_dtype(run):
    f = run.wrap(lambda v: (v.int() if v[0] > 0 else v.long()).float())
    yield run(f, V)
    g = run.wrap(lambda v: v.sum() if v[0] > 0 else v.sum().reshape(1)[0])
    yield run(g, -V)


@case("tracing", "xla")
def many_branches(run):
    def f(v):
        for limit in range(6):
            if v.sum() < limit:
                return v + limit
        return v

    f = run.wrap(f)
    yield run(f, V)
    yield run(f, V / 3)


@case("tracing", "xla")
def loop_on_data(run):
    def f(v):
        while v.sum() < 100:
            v = v * 2 + 1
        return v

    yield run(run.wrap(f), V)


@case("tracing", "xla")
def loop_on_data_that_never_ends_for_zeros(run):
    def f(v):
        while v.sum() < 100:
            v = v * 2
        return v

    yield run(run.wrap(f), V)


@case("tracing", "jit")
def loop_on_a_numpy_view_that_never_ends_for_examples(run):
    def f(v):
        while v.numpy()[0] != 10:
            v = v * 1
        return v

    yield run(run.wrap(f), V * 10)


@case("tracing", "jit")
def loop_on_an_array_that_never_ends_for_examples(run):
    def f(v):
        while np.asarray(v)[0] != 10 or v.tolist()[0] != 10:
            pass
        return v

    yield run(run.wrap(f), V * 10)


@case("tracing", "jit")
def loop_on_data_that_never_ends_for_examples(run):
    def f(v):
        while float(v[0]) != 10:
            v = v * 1
        return v

    yield run(run.wrap(f), V * 10)


@case("tracing", "xla")
def numpy_inside(run):
    yield run(run.wrap(lambda v: torch.from_numpy(np.sort(v.numpy())[::-1].copy())), V)


@case("tracing", "xla")
def tolist_inside(run):
    yield run(run.wrap(lambda v: torch.tensor([x * 2 for x in v.tolist()])), V)


@case("tracing")
def order_of_a_dict_argument(run):
    f = run.wrap(lambda d: torch.cat(list(d.values())))
    yield run(f, {"b": V, "a": V * 10, "c": V * 100})


@case("tracing")
def order_of_keywords(run):
    f = run.wrap(lambda **d: torch.cat(list(d.values())))
    yield run(f, z=V, a=V * 10)


@case("tracing")
def order_of_keys_after_another_order(run):
    f = run.wrap(lambda d: torch.cat([d[k] * i for i, k in enumerate(d)]))
    yield run(f, {"a": V, "b": V * 10})
    yield run(f, {"b": V * 10, "a": V})


@case("tracing")
def ordered_dict_moved_to_end(run):
    f = run.wrap(lambda d: torch.cat(list(d.values())))
    yield run(f, dict(collections.OrderedDict(z=V, b=V * 2)))


@case("tracing")
def equal_of_two_dtypes(run):
    f = run.wrap(lambda a, b: torch.tensor(torch.equal(a, b)))
    yield run(f, torch.tensor([1.0]), torch.tensor([1]))


@case("tracing")
def hook_on_a_tensor(run):
    def f(v):
        y = v * 1
        if y.requires_grad:
            y.register_hook(lambda g: g * 10)
        return y**2

    f = run.wrap(f)
    yield run(f, V)
    yield run.grad(f, V)


@case("tracing", "eager", "jit")
def hook_on_a_tensor_forward(run):
    def f(v):
        y = v * 1
        if y.requires_grad:
            y.register_hook(lambda g: g * 10)
        return y**2

    yield run.jacfwd(run.wrap(f), V)


@case("tracing", "xla")
def forward_mode_where_a_gradient_has_no_derivative(run):
    def f(v):
        with torch.no_grad():
            w = v * 2
        return F.hardsigmoid(v) * w

    yield run.jacfwd(run.wrap(f), V)


@case("tracing")
def forward_mode_and_a_write_where_a_gradient_has_no_derivative(run):
    def f(v):
        v[0] = 0.5
        return F.hardsigmoid(v) * v

    f = run.wrap(f)
    yield run.either(
        lambda: torch.tensor([[0.0] * 4, *torch.diag(torch.tensor([0.0, 7 / 6, 1.0, 1.0]))[1:].tolist()]),
        lambda: jax.jacfwd(f)(jnp.asarray(V.numpy())) + 0.0,
    )


@case("tracing")
def numbers_rolled_in_a_batch(run):
    yield run.vmap(run.wrap(lambda v: v.sum().roll(1) + v), ROWS)


@dataclasses.dataclass(frozen=True)
class Options:
    """A static argument whose values compare equal with different types."""

    scale: Any


@case("tracing")
def static_argument_by_type(run):
    f = run.wrap(lambda v, n: v * 2 if isinstance(n, bool) else v * 3 if isinstance(n, int) else v * 5)
    for n in (1, 1.0, True):
        yield run(lambda v, n=n: f(v, n), V)


@case("tracing")
def static_dataclass_by_type(run):
    f = run.wrap(lambda v, o: v * (2 if isinstance(o.scale, bool) else 3 if isinstance(o.scale, int) else 5))
    for n in (1, 1.0, True):
        yield run(lambda v, n=n: f(v, Options(n)), V)


@case("tracing")
def static_tuple_by_type(run):
    f = run.wrap(lambda v, o: v * (2 if isinstance(o[0], bool) else 3 if isinstance(o[0], int) else 5))
    for n in (1, 1.0, True):
        yield run(lambda v, n=n: f(v, (n, "x")), V)


@case("tracing")
def static_minus_zero(run):
    f = run.wrap(lambda v, n: v / torch.tensor(n))
    for n in (0.0, -0.0):
        yield run(lambda v, n=n: f(v, n), V)


class _Unused(torch.autograd.Function):
    @staticmethod
    def forward(ctx, v):
        ctx.set_materialize_grads(False)
        return v * 2, v * 3

    @staticmethod
    def backward(ctx, a, b):
        return a * 2 if b is None else a * 2 + b * 3 + 100


@case("tracing")
def gradients_not_materialized(run):
    f = run.wrap(lambda v: _Unused.apply(v)[0])
    yield run(f, V)
    yield run.grad(f, V)


class _Wrong(torch.autograd.Function):
    @staticmethod
    def forward(ctx, v):
        return v**2

    @staticmethod
    def backward(ctx, g):
        return g * 100


@case("tracing")
def gradient_of_an_autograd_function(run):
    yield run.grad(run.wrap(_Wrong.apply), V)


@case("tracing")
def straight_through(run):
    yield run.grad(run.wrap(lambda v: v + ((v * 3).round() - v).detach() * v), V)


@case("tracing")
def index_out_of_range(run):
    index = torch.tensor([0, 9])
    f = run.wrap(lambda v, i: v.gather(0, i))
    yield run.fails(f, V, index)


@case("tracing")
def gather_of_a_negative_index(run):
    f = run.wrap(lambda v, i: v.gather(0, i))
    yield run.fails(f, V, torch.tensor([0, -1]))


@case("tracing")
def scatter_of_a_negative_index(run):
    f = run.wrap(lambda v, i: v.scatter(0, i, torch.ones(2)))
    yield run.fails(f, V, torch.tensor([0, -1]))


@case("tracing")
def index_select_of_a_negative_index(run):
    f = run.wrap(lambda v, i: v.index_select(0, i))
    yield run.fails(f, V, torch.tensor([0, -1]))


@case("tracing")
def embedding_out_of_range(run):
    table = torch.randn(3, 2, generator=torch.Generator().manual_seed(0))
    yield run.fails(run.wrap(lambda i: F.embedding(i, table)), torch.tensor([0, 5]))


@case("tracing")
def negative_index_where_torch_has_it(run):
    yield run(run.wrap(lambda v, i: v[i]), V, torch.tensor([0, -1]))


@case("tracing")
def integer_division_and_remainder(run):
    n = torch.tensor([-7, 7, -7, 7])
    d = torch.tensor([2, -2, -2, 2])
    yield run(run.wrap(lambda a, b: [a // b, a % b, torch.fmod(a, b), torch.div(a, b, rounding_mode="trunc")]), n, d)


@case("tracing")
def integers_wrap_around(run):
    yield run(run.wrap(lambda a: a.to(torch.uint8) * 2), torch.tensor([200, 255, 3]))
    yield run(run.wrap(lambda a: (a.to(torch.int8) + 1).long()), torch.tensor([127, -128, 3]))


@case("tracing")
def rounding_to_even(run):
    yield run(run.wrap(torch.round), torch.tensor([0.5, 1.5, 2.5, -0.5]))


@case("tracing")
def promotion_of_numbers(run):
    i = torch.tensor([1, 2])
    yield run(run.wrap(lambda i: [i * 2.5, i / 2, i + True, i * torch.tensor(2.0), i**2]), i)


@case("tracing")
def nan_of_extrema(run):
    x = torch.tensor([1.0, float("nan"), 3.0])
    one = torch.ones(3)
    yield run(run.wrap(lambda x: [x.max(), x.argmax(), torch.fmax(x, one), x.sort().values, x.clamp(0, 2)]), x)


@case("tracing")
def nan_times_a_mask(run):
    x, mask = torch.tensor([float("nan"), float("inf"), -1.0, 5.0]), torch.tensor([False, False, False, True])
    yield run(run.wrap(lambda x, m: [x * m, (x * m.float()).sum(), 1 / (x[2:] * m[2:])]), x, mask)


@case("tracing")
def gradient_at_kinks(run):
    x = torch.tensor([0.0, -0.0, 1.0, -1.0])
    for f in (torch.relu, torch.abs, lambda v: v.clamp(0, 1), F.hardtanh, lambda v: torch.maximum(v, v * 2)):
        yield run.grad(run.wrap(f), x)


@case("tracing")
def gradient_at_ties(run):
    x = torch.tensor([1.0, 1.0, 0.0])
    for f in (lambda v: v.max(), lambda v: v.amax(), lambda v: v.sort().values[0], lambda v: v.max(0).values):
        yield run.grad(run.wrap(f), x)


@case("tracing")
def saved_tensor_written_behind_autograd(run):
    def f(v):
        y = v * 0.5
        z = F.logsigmoid(y) + y.sin() * y.tanh()
        y.data.mul_(0.9)
        return z

    yield run.grad(run.wrap(f), V)


@case("tracing")
def residual_that_is_a_loss(run):
    for loss in (F.mse_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy, F.l1_loss):
        yield run.grad(run.wrap(lambda v, loss=loss: loss(v.sigmoid(), v.cos() ** 2) * v), V)


@case("tracing")
def gradient_of_where_with_a_pole(run):
    yield run.grad(run.wrap(lambda v: torch.where(v > 1.5, v.sqrt(), v)), V)
    yield run.grad(run.wrap(torch.linalg.vector_norm), torch.zeros(3))


@case("tracing")
def writes_that_overlap(run):
    def f(v):
        y = v.clone()
        a, b = y[:3], y[1:]
        a.mul_(2)
        b.add_(10)
        y.view(2, 2)[0] = y[2:].clone()
        return y, a * 1, b * 1

    yield run(run.wrap(f), V)


@case("tracing", "xla")
def view_at_an_index_tensor_is_written(run):
    def f(v, i):
        y = v.clone()
        part = y[i]
        part += 100
        return y

    f = run.wrap(f)
    yield run(f, V, torch.tensor(2))
    yield run.vmap(f, torch.stack([V, V]), torch.tensor([1, 3]))


@case("tracing", "xla")
def base_of_a_view_at_an_index_tensor_is_written(run):
    def f(v, i):
        y = v * 2
        part = y[i]
        y.fill_(7)
        return part * 1

    f = run.wrap(f)
    yield run(f, V, torch.tensor(2))
    yield run.vmap(f, torch.stack([V, V]), torch.tensor([1, 3]))


@case("tracing")
def elements_at_index_tensors_are_replaced(run):
    def f(v, i):
        y = v.clone()
        for _ in range(2):
            y[i] = y[i] * 3 + y[i - 1]
        return y

    f = run.wrap(f)
    yield run(f, V, torch.tensor(2))
    yield run.vmap(f, torch.stack([V, V]), torch.tensor([1, 3]))


@case("tracing")
def one_array_as_two_arguments(run):
    def f(a, b):
        a.add_(1)
        return a * b

    def twice(v):
        return g(v, v * 1)

    g = run.wrap(f)
    yield run(twice, V)


@case("tracing")
def result_is_an_argument(run):
    f = run.wrap(lambda v: (v, v.view(2, 2), v))
    yield run(f, V)


@case("tracing")
def result_is_a_constant(run):
    w = torch.ones(4)
    f = run.wrap(lambda v: (w, v))
    first = run(f, V)
    yield first
    w.mul_(3)
    yield first if not run.is_torch else (torch.ones(4), V)  # JAX arrays never change


@case("tracing")
def result_that_torch_keeps_and_writes(run):
    kept: list[torch.Tensor] = []

    def f(v):
        y = v * 2
        if not kept:
            return y
        return y + 1

    g = run.wrap(f)
    yield run(g, V)


@case("tracing")
def complex_gradient(run):
    yield run.grad(run.wrap(lambda v: (torch.complex(v, v * 2) ** 3).abs()), V)


@case("tracing")
def expanded_and_strided_arguments(run):
    f = run.wrap(lambda m: torch.as_strided(m, (2, 2), (1, 2)))
    yield run(f, torch.arange(6.0).reshape(2, 3))


@case("tracing")
def contiguity_is_torch_s(run):
    yield run(run.wrap(lambda m: m * 2 if m.T.is_contiguous() else m * 3), torch.arange(6.0).reshape(2, 3))


@case("tracing")
def warp_of_a_batch_by_one_grid(run):
    m = torch.arange(6.0).reshape(2, 3)
    yield run.vmap(run.wrap(lambda row: (row * m).sum(0)), torch.ones(4, 3))


@case("tracing", isolated=True)
def grid_sample_of_a_batch_of_images(run):
    generator = torch.Generator().manual_seed(0)
    grid = torch.rand(2, 4, 4, 2, generator=generator) * 1.6 - 0.8
    images = torch.rand(3, 2, 3, 4, 4, generator=generator)

    def f(images):
        return F.grid_sample(images, grid, align_corners=True)

    yield run.vmap(run.wrap(f), images)


@case("tracing", isolated=True)
def grid_sample_of_one_image_by_many_grids(run):
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(3, 2, 3, 4, 4, generator=generator)
    grids = torch.rand(2, 4, 4, 2, generator=generator) * 1.6 - 0.8
    g = run.wrap(lambda g, im: F.grid_sample(im, g, align_corners=True))
    yield run.either(
        lambda: torch.stack([g(grids, im) for im in images]),
        lambda: jax.vmap(g, (None, 0))(jnp.asarray(grids.numpy()), jnp.asarray(images.numpy())),
    )


# Shapes that depend on data.


@case("shapes", "xla")
def nonzero_and_index_add(run):
    def f(v):
        index = torch.nonzero(v > 2).squeeze(1)
        return torch.zeros(4).index_add(0, index, v[index])

    yield run(run.wrap(f), V)


@case("shapes", "xla")
def sum_of_a_selection(run):
    f = run.wrap(lambda v: v[v > 2].sum())
    yield run(f, V)
    yield run.grad(f, V)


@case("shapes", "xla")
def number_of_unique_values(run):
    yield run(run.wrap(lambda v: v * torch.unique(v.floor()).numel()), V)


@case("shapes", "xla")
def least_squares(run):
    a = torch.tensor([[1.0, 2.0], [3.0, 1.0], [0.5, 4.0], [2.0, 2.0]])
    yield run(run.wrap(lambda v: torch.linalg.lstsq(a, v[:, None]).solution), V)


@case("shapes", "xla")
def selection_written_back(run):
    def f(v):
        y = v.clone()
        y[v > 2] = v[v > 2] * 10
        return y

    yield run(run.wrap(f), V)
    yield run.grad(run.wrap(f), V)


@case("shapes", "xla")
def repeat_interleave_by_an_argument(run):
    yield run(run.wrap(lambda n: torch.arange(3).repeat_interleave(n).sum()), torch.tensor([1, 0, 2]))


@case("shapes", "xla")
def packed_sequence(run):
    torch.manual_seed(0)
    rnn = nn.GRU(2, 3, batch_first=True)

    def f(x, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return nn.utils.rnn.pad_packed_sequence(rnn(packed)[0], batch_first=True, total_length=3)[0]

    yield run(run.wrap(f), torch.arange(12.0).reshape(2, 3, 2) / 12, torch.tensor([1, 3]))


@case("shapes", "xla")
def experts_by_token(run):
    weights = torch.stack([torch.eye(2) * (i + 1) for i in range(3)])

    def f(x, choice):
        y = torch.zeros_like(x)
        for i in range(3):
            index = torch.where(choice == i)[0]
            y[index] += x[index] @ weights[i]
        return y

    yield run(run.wrap(f), torch.arange(8.0).reshape(4, 2), torch.tensor([0, 2, 2, 1]))


@case("shapes", "xla")
def mined_pairs(run):
    def f(v):
        i, j = torch.where((v[:, None] - v[None]).abs() > 1.5)
        return (v[i] - v[j]).square().mean()

    yield run(run.wrap(f), V)
    yield run.grad(run.wrap(f), V)


@case("shapes")
def embeddings_by_token_value(run):
    def f(ids, images):
        table = torch.arange(10.0).reshape(5, 2)
        y = table[ids]
        y[ids == 4] = images
        return y

    yield run(run.wrap(f), torch.tensor([0, 4, 1, 4]), torch.full((2, 2), -1.0))


@case("shapes", "jit")
def selection_is_the_result(run):
    yield run(run.wrap(lambda v: v[v > 2]), V)


@case("shapes", "jit")
def nonzero_is_the_result(run):
    yield run(run.wrap(lambda v: v.nonzero()), V)


@case("shapes", "jit")
def gradient_of_a_selection(run):
    f = run.wrap(lambda v: v[v > 2])
    yield run.grad(f, V)


@case("shapes")
def mask_of_a_constant(run):
    mask = torch.tensor([True, False, True, True])
    yield run(run.wrap(lambda v: v[mask] * 2), V)


@case("shapes")
def assertion_that_holds(run):
    def f(v):
        torch._assert((v > 0).all(), "positive")
        assert v.shape[0] == 4
        return v * 2

    yield run(run.wrap(f), V)


@case("shapes")
def deepcopy_inside(run):
    yield run(run.wrap(lambda v: copy.deepcopy(v) * 2), V)


@case("shapes")
def reentrant_checkpoint(run):
    f = run.wrap(lambda v: torch.utils.checkpoint.checkpoint(torch.sin, v, use_reentrant=True))
    yield run(f, V)


@case("shapes")
def attribute_converted_in_forward(run):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.c = torch.ones(4)

        def forward(self, v):
            self.c = self.c.to(v.dtype)
            return v * self.c

    yield run(run.wrap(Net()), V)


@case("shapes")
def fake_quantization(run):
    f = run.wrap(lambda v: torch.fake_quantize_per_tensor_affine(v, 0.3, 0, 0, 10))
    yield run(f, V)
    yield run.grad(f, V)
    yield run.vmap(f, ROWS)


@case("shapes")
def fake_quantization_of_channels(run):
    zero = torch.tensor([0, 1, 2, 3], dtype=torch.int32)
    f = run.wrap(lambda v, s: torch.fake_quantize_per_channel_affine(v, s, zero, 1, 0, 10))
    yield run(f, ROWS, V / 7)
    g = run.wrap(lambda v, s: torch._fake_quantize_learnable_per_channel_affine(v, s, zero.float(), 1, 0, 10, 1.0))
    yield run.grad(g, ROWS, V / 7)


@case("shapes")
def distances_forward(run):
    f = run.wrap(lambda v: torch.cdist(v[:, None], v[:, None] + 9)[0])
    yield run.jacfwd(f, V)


@case("shapes")
def batch_norm_with_buffers_as_arguments(run):
    x = torch.stack([V, V.sin(), V * V])

    def f(x, mean, variance):
        return F.batch_norm(x, mean, variance, training=True).sin() * x.cos()

    # Torch refuses buffers that require a gradient; to JAX they are arguments like others, with a gradient of zero.
    if run.is_torch:
        gradients = [*run.grad(lambda x: f(x, torch.zeros(4), torch.ones(4)), x), torch.zeros(4), torch.zeros(4)]
    else:
        gradients = run.grad(run.wrap(f), x, torch.zeros(4), torch.ones(4))
    yield gradients


@case("shapes")
def transposed_linear_function(run):
    f = run.wrap(lambda v: 2 * v.flip(0).cumsum(0))
    yield run.either(
        lambda: run.grad(lambda v: (2 * v.flip(0).cumsum(0)) * V, V)[0],
        lambda: jax.linear_transpose(f, jnp.ones(4))(jnp.asarray(V.numpy()))[0],
    )


@case("shapes")
def wrapped_inside_wrapped(run):
    inner = run.wrap(lambda v: v.sin())
    f = run.wrap(lambda v: inner(v) * 2)
    yield run(f, V)
    yield run.grad(f, V)
    yield run(run.wrap(run.wrap(torch.cos)), V)


@case("shapes", "eager", "jit")
def coroutine_function(run):
    async def f(v):
        return v

    yield run.either(lambda: torch.zeros(()), lambda: run.wrap(f)(jnp.zeros(())))


# Other threads, and torch afterwards.


def _beside(run: Any, other: Callable[[], Any]) -> Any:
    def main() -> None:
        net = nn.Sequential(_fresh(), nn.Tanh(), nn.LayerNorm(4))
        f = run.wrap(lambda v: net(v) * 2)
        run(f, V)
        run.grad(f, V)

    return run.beside(other, main)


def _fresh() -> nn.Linear:
    layer = nn.utils.skip_init(nn.Linear, 4, 4)  # which draws nothing
    with torch.no_grad():
        layer.weight.copy_(torch.eye(4))
        layer.bias.zero_()
    return layer


@case("threads")
def another_thread_draws(run):
    def other():
        torch.manual_seed(3)
        return torch.stack([torch.rand(()) for _ in range(3000)])

    yield _beside(run, other)


@case("threads")
def another_thread_makes_tensors(run):
    yield _beside(run, lambda: torch.tensor(sum(torch.empty(1).element_size() for _ in range(3000))))


@case("threads")
def another_thread_records(run):
    def other():
        x = torch.ones(2, requires_grad=True)
        return torch.tensor(sum((x * 2).requires_grad for _ in range(3000)))

    yield _beside(run, other)


@case("threads")
def another_thread_calls_a_module(run):
    def other():
        net, calls = _fresh(), []
        net.register_forward_hook(lambda m, a, y: calls.append(type(y)) or None)
        total = sum(net(V).sum() for _ in range(1000)).detach()
        return total, torch.tensor(len(calls)), torch.tensor(all(t is torch.Tensor for t in calls))

    yield _beside(run, other)


@case("threads")
def another_thread_has_its_flags(run):
    def flags():
        return (torch.backends.mkldnn.enabled, torch.backends.mha.get_fastpath_enabled(), torch.compiler.is_exporting())

    def other():
        first = flags()
        return torch.tensor(all(flags() == first for _ in range(5000)))

    yield _beside(run, other)


@case("threads")
def torch_s_stream_is_untouched(run):
    torch.manual_seed(5)
    f = run.wrap(lambda v: v.sin() @ v.cos())
    run(f, V)
    run.grad(f, V)
    yield torch.rand(4)


@case("threads")
def default_dtype_of_the_trace_alone(run):
    f = run.wrap(lambda v: v * torch.ones(1).element_size())
    torch.set_default_dtype(torch.float64)
    first = run(f, V)
    torch.set_default_dtype(torch.float32)
    yield first
    yield torch.tensor(torch.empty(1).element_size())
    yield run(f, V)


@case("threads")
def two_threads_call_one_function(run):
    f = run.wrap(lambda v: v.cumsum(0) * 2)
    results = []

    def work():
        results.append(run(f, V))

    import threading

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    yield torch.tensor(len(results))
    yield results


# JAX's tools.


@case("tools")
def jit_disabled(run):
    f = run.wrap(lambda v: v * 2 + 1)

    def call():
        with jax.disable_jit():
            return f(jnp.asarray(V.numpy()))

    yield run.either(lambda: f(V), call)


@case("tools")
def copied_before_and_after_a_call(run):
    f = run.wrap(_top_level)
    yield run(copy.deepcopy(f), V)
    yield run(f, V)
    yield run(copy.deepcopy(f), V)


def _top_level(v):
    return v * 2 + 1


@case("tools")
def pickled_before_and_after_a_call(run):
    f = run.wrap(_top_level)
    yield run(pickle.loads(pickle.dumps(f)), V)
    yield run(f, V)
    yield run(pickle.loads(pickle.dumps(f)), V)


@case("tools")
def nan_is_noticed(run):
    f = run.wrap(lambda v: torch.log(v - 3))

    def call():
        with jax.debug_nans(True):
            try:
                jax.block_until_ready(jax.jit(f)(jnp.asarray(V.numpy())))
            except FloatingPointError:
                return jnp.asarray(True)
        return jnp.asarray(False)

    yield torch.tensor(True) if run.is_torch else call()


@case("tools")
def checkpointed(run):
    f = run.wrap(lambda v: v.sin() * v)
    g = f if run.is_torch else jax.checkpoint(f)
    yield run.grad(g, V)


@case("tools")
def scanned(run):
    f = run.wrap(lambda v: (v * 0.5).sin())

    def of_torch():
        v = V
        for _ in range(3):
            v = f(v)
        return v

    def of_jax():
        return jax.lax.scan(lambda v, _: (f(v), None), jnp.asarray(V.numpy()), length=3)[0]

    yield run.either(of_torch, of_jax)


@case("tools")
def solved_by_gmres(run):
    a = torch.eye(4) * 3 + torch.ones(4, 4) * 0.5
    f = run.wrap(lambda v: a @ v)

    def of_jax():
        return jax.scipy.sparse.linalg.gmres(f, jnp.asarray(V.numpy()), tol=1e-7)[0]

    yield run.either(lambda: torch.linalg.solve(a, V), of_jax)


@case("tools")
def solved_with_a_gradient(run):
    a = torch.eye(4) * 3 + torch.ones(4, 4) * 0.5
    f = run.wrap(lambda v: a @ v)

    def of_jax():
        def solve(b):
            return jax.lax.custom_linear_solve(
                f, b, lambda mv, b: jax.scipy.sparse.linalg.cg(mv, b, tol=1e-7)[0], symmetric=True
            )

        return jax.grad(lambda b: solve(b).sum())(jnp.asarray(V.numpy()))

    yield run.either(lambda: torch.linalg.solve(a, torch.ones(4)), of_jax)


@case("tools")
def static_method(run):
    class Model:
        @staticmethod
        def f(v):
            return v * 2

    class Wrapped:
        f = run.wrap(Model.__dict__["f"]) if not run.is_torch else Model.__dict__["f"]

    yield run(Wrapped().f, V)


@case("tools")
def recursion_by_name(run):
    def f(v, n=3):
        return v if n == 0 else g(v * 2, n - 1)

    g = run.wrap(f)
    yield run(g, V)


@case("tools")
def many_python_numbers(run):
    f = run.wrap(lambda v, rate: v * rate)
    for i in range(5):
        yield run(lambda v, i=i: f(v, 0.1 * i), V)
