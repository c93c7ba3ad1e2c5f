"""State that changes while a program is traced, or between its trace and the trace of a derivative."""

from __future__ import annotations

import collections
import contextvars
import functools
import sys
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jtbridge

X = jnp.arange(1.0, 4)


class Scales:
    """A factor in every kind of state that a function may read."""

    def __init__(self, size: int):
        self.size = size
        self.items = [2.0]
        self.number = 2.0
        self.module: Any = torch.nn.Module()
        self.module.weight = torch.nn.Parameter(torch.full((size,), 2.0))
        self.tensor = torch.full((size,), 2.0)
        self.table = {"scale": 2.0}


KINDS: dict[str, tuple[Callable[[Scales], Any], Callable[[Scales, float], Any]]] = {
    "list": (lambda s: s.items[0], lambda s, value: s.items.__setitem__(0, value)),
    "attribute": (lambda s: s.number, lambda s, value: setattr(s, "number", value)),
    "dict": (lambda s: s.table["scale"], lambda s, value: s.table.update(scale=value)),
    "mode": (
        lambda s: 2.0 if s.module.training else 7.0,
        lambda s, value: s.module.train(value == 2.0),
    ),
    "tensor in place": (lambda s: s.tensor[:3], lambda s, value: s.tensor.fill_(value)),
    "weight in place": (lambda s: s.module.weight[:3], lambda s, value: _fill(s.module.weight, value)),
    "weight assigned": (
        lambda s: s.module.weight[:3],
        lambda s, value: setattr(s.module, "weight", torch.nn.Parameter(torch.full((s.size,), value))),
    ),
    "value read": (lambda s: s.items[0] * torch.tensor([s.number]).item() / 2, lambda s, v: s.items.__setitem__(0, v)),
}


@torch.no_grad()
def _fill(tensor: torch.Tensor, value: float) -> None:
    tensor.fill_(value)


@pytest.fixture(params=KINDS)
def kind(request) -> str:
    return request.param


@pytest.fixture(params=[3, 10_000], ids=["small", "large"])
def parts(request, kind: str) -> tuple[Callable[..., Any], Callable[[float], Any]]:
    """Return a wrapped function that scales the square of its argument, and a function that sets the factor."""
    scales = Scales(request.param)
    read, write = KINDS[kind]
    return jtbridge.wrap(lambda x: x**2 * read(scales)), lambda value: write(scales, value)


def test_two_calls_in_one_trace_read_current_state(parts):
    f, write = parts

    def both(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        write(2.0)
        first = f(x)
        write(7.0)
        return first, f(x)

    first, second = jax.jit(both)(X)
    assert first.tolist() == (2 * X**2).tolist()
    assert second.tolist() == (7 * X**2).tolist()


def test_two_loops_in_one_trace_read_current_state(parts):
    f, write = parts

    def both(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        write(2.0)
        first = jax.lax.map(lambda row: f(row), x[None])[0]
        write(7.0)
        return first, jax.grad(lambda x: f(x).sum())(x)

    first, second = jax.jit(both)(X)
    assert first.tolist() == (2 * X**2).tolist()
    assert second.tolist() == (14 * X).tolist()


DERIVATIVES: dict[str, tuple[Callable[..., Any], Callable[[jax.Array], jax.Array]]] = {
    "grad": (lambda f: jax.grad(lambda x: f(x).sum())(X), lambda x: 4 * x),
    "jvp": (lambda f: jax.jvp(f, (X,), (X,))[1], lambda x: 4 * x * x),
    "vmap": (lambda f: jax.vmap(f)(X[None])[0], lambda x: 2 * x * x),
    "hessian": (lambda f: jax.hessian(lambda x: f(x).sum())(X), lambda x: 4 * jnp.eye(3)),
    "jit": (lambda f: jax.jit(f)(X), lambda x: 2 * x * x),
}


@pytest.mark.parametrize("derivative", DERIVATIVES)
def test_a_derivative_of_a_program_has_the_state_of_the_program(parts, derivative: str):
    f, write = parts
    write(2.0)
    program = jax.jit(lambda x: f(x))
    program(X)  # JAX keeps its trace
    write(7.0)
    run, expected = DERIVATIVES[derivative]
    assert run(program).tolist() == expected(X).tolist()
    assert f(X).tolist() == (7 * X**2).tolist()  # the state is as it was
    assert jax.jit(lambda x: f(x))(X).tolist() == (7 * X**2).tolist()


def test_a_linear_function_has_the_state_of_its_trace(parts):
    f, write = parts
    write(2.0)
    linear = jax.linearize(jax.jit(lambda x: f(x)), X)[1]
    write(7.0)
    assert linear(X).tolist() == (4 * X * X).tolist()
    assert jax.jit(linear)(X).tolist() == (4 * X * X).tolist()


def test_a_module_in_both_modes_in_one_trace():
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Dropout(0.9))
    f = jtbridge.wrap(model)

    @jax.jit
    def both(x: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        model.train()
        noisy = f(x, rng=key)
        model.eval()
        return noisy, f(x, rng=key)

    noisy, exact = both(jnp.ones((50, 3)), jax.random.key(0))
    assert (noisy == 0).mean() > 0.5
    assert jnp.allclose(exact, jtbridge.wrap(model.eval())(jnp.ones((50, 3))), atol=1e-6)


def test_a_weight_that_is_loaded_twice_in_one_trace():
    model = torch.nn.Linear(200, 3)
    f = jtbridge.wrap(model)
    states = [{"weight": torch.full((3, 200), value), "bias": torch.full((3,), value)} for value in (1.0, 2.0)]

    @jax.jit
    def ensemble(x: jax.Array) -> jax.Array:
        results = []
        for state in states:
            model.load_state_dict(state)
            results.append(f(x))
        return jnp.stack(results)

    assert ensemble(jnp.ones(200))[:, 0].tolist() == [201, 402]


def _function(body: str, **scope: Any) -> Callable[..., Any]:
    exec(f"def f(x, *, factor=2.0):\n    {body}", scope)
    return scope["f"]


def _of_an_imported_module() -> tuple[Callable[..., Any], Callable[[], Any]]:
    module = types.ModuleType("a_module_of_a_user")
    module.factor = 2.0  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module
    f = _function("import a_module_of_a_user\n    return x * a_module_of_a_user.factor")
    return f, lambda: setattr(module, "factor", 3.0)


def _of_a_metaclass() -> tuple[Callable[..., Any], Callable[[], Any]]:
    meta = type("Meta", (type,), {"factor": 2.0})
    cls: Any = meta("Class", (), {})
    return lambda x: x * cls.factor, lambda: setattr(meta, "factor", 3.0)


def _of_a_base_class() -> tuple[Callable[..., Any], Callable[[], Any]]:
    first, second = type("First", (), {"factor": 2.0}), type("Second", (), {"factor": 3.0})
    cls: Any = type("Class", (first,), {})
    return lambda x: x * cls().factor, lambda: setattr(cls, "__bases__", (second,))


def _of_a_special_method() -> tuple[Callable[..., Any], Callable[[], Any]]:
    cls: Any = type("Class", (), {"__call__": lambda self: 2.0})
    thing = cls()
    return lambda x: x * thing(), lambda: setattr(cls, "__call__", lambda self: 3.0)


def _of_a_gradient() -> tuple[Callable[..., Any], Callable[[], Any]]:
    weight = torch.ones(3, requires_grad=True)
    weight.grad = torch.full((3,), 2.0)
    return lambda x: x * weight.grad, lambda: weight.grad.mul_(1.5)  # type: ignore[union-attr]


def _of_an_order(table: dict[str, float]) -> tuple[Callable[..., Any], Callable[[], Any]]:
    return lambda x: x * next(iter(table.values())), lambda: table.update(a=table.pop("a"))


def _of_a_context_variable() -> tuple[Callable[..., Any], Callable[[], Any]]:
    variable = contextvars.ContextVar[dict[str, float]]("variable")
    variable.set({"factor": 2.0})
    return lambda x: x * variable.get()["factor"], lambda: variable.get().update(factor=3.0)


def _of_a_partial() -> tuple[Callable[..., Any], Callable[[], Any]]:
    partial = functools.partial(lambda x, factor: x * factor, factor=2.0)
    return lambda x: partial(x), lambda: partial.keywords.update(factor=3.0)


def _of_a_view() -> tuple[Callable[..., Any], Callable[[], Any]]:
    table = {"factor": 2.0}
    view = types.MappingProxyType(table)
    return lambda x: x * view["factor"], lambda: table.update(factor=3.0)


def _of_a_user_dict() -> tuple[Callable[..., Any], Callable[[], Any]]:
    table = collections.UserDict(factor=2.0)
    return lambda x: x * table["factor"], lambda: table.update(factor=3.0)


def _of_a_default() -> tuple[Callable[..., Any], Callable[[], Any]]:
    f = _function("return x * factor")
    return f, lambda: setattr(f, "__kwdefaults__", {"factor": 3.0})


def _of_code() -> tuple[Callable[..., Any], Callable[[], Any]]:
    f = _function("return x * 2.0")
    return f, lambda: setattr(f, "__code__", _function("return x * 3.0").__code__)


PLACES = [
    *(_of_an_imported_module, _of_a_metaclass, _of_a_base_class, _of_a_special_method, _of_a_gradient, _of_a_view),
    *(_of_a_context_variable, _of_a_partial, _of_a_user_dict, _of_a_default, _of_code),
    lambda: _of_an_order({"a": 2.0, "b": 3.0}),
    lambda: _of_an_order(collections.OrderedDict(a=2.0, b=3.0)),
]


@pytest.mark.parametrize("make", PLACES, ids=lambda make: make.__name__)
def test_two_calls_in_one_trace_read_any_kind_of_state(make):
    fn, change = make()
    f = jtbridge.wrap(fn)

    @jax.jit
    def program(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        first = f(x)
        change()
        return first, f(x)

    first, second = program(X)
    assert jnp.array_equal(first, 2 * X)
    assert jnp.array_equal(second, 3 * X)


def test_a_zero_that_changes_its_sign_in_one_trace():
    state = {"zero": 0.0, "tensor": torch.tensor(0.0)}
    f = jtbridge.wrap(lambda x: (x / torch.tensor(state["zero"]), x / state["tensor"]))

    @jax.jit
    def program(x: jax.Array) -> Any:
        first = f(x)
        state.update(zero=-0.0)
        second = f(x)
        state.update(zero=0.0, tensor=torch.tensor(-0.0))
        return first, second, f(x)

    signs = [[float(y[0]) for y in pair] for pair in program(X)]
    assert signs == [[jnp.inf, jnp.inf], [-jnp.inf, jnp.inf], [jnp.inf, -jnp.inf]]


def test_float_subclass_with_an_imprecise_repr():
    class Rounded(float):
        def __repr__(self):
            return "about 2"

    state = {"by": Rounded(2.25)}
    f = jtbridge.wrap(lambda x: x * state["by"])

    @jax.jit
    def twice(x):
        first = f(x)
        state["by"] = Rounded(2.5)
        return first, f(x)

    first, second = twice(jnp.ones(2))
    np.testing.assert_array_equal(first, [2.25, 2.25])
    np.testing.assert_array_equal(second, [2.5, 2.5])


def test_float8_that_is_closed_over_is_compared():
    weight = torch.tensor([1.0, -2.0]).to(torch.float8_e4m3fn)
    f = jtbridge.wrap(lambda x: x * weight.float())

    @jax.jit
    def twice(x):
        first = f(x)
        weight.copy_(torch.tensor([3.0, -0.0]))
        return first, f(x)

    first, second = twice(jnp.ones(2))
    np.testing.assert_array_equal(first, [1, -2])
    np.testing.assert_array_equal(second, [3, 0])
    assert np.signbit(second[1])


@pytest.mark.parametrize("taken", [torch.Tensor.numpy, np.asarray, lambda t: t.cpu().numpy()])
@pytest.mark.parametrize("length", [3, 10_000])
def test_tensor_converted_to_numpy_is_read_by_the_trace(taken, length):
    numbers = torch.arange(1.0, length + 1)

    def fn(x):
        array = taken(numbers)
        return x[: int(array[1])] * float(array.sum()) + torch.tensor(array[:1])

    f = jtbridge.wrap(fn)
    x = jnp.arange(5.0)
    for _ in range(2):
        want = fn(torch.arange(5.0))
        for got in (f(x), jax.jit(lambda x: f(x))(x)):
            np.testing.assert_allclose(got, want, rtol=1e-6)
        assert "xla" in str(jtbridge.explain(f, x)).split("inside jit")[1].splitlines()[0]
        numbers.add_(1)
