"""`wrap` takes every kind of callable that torch code calls."""

from __future__ import annotations

import collections
import copy
import functools
import logging
import re
import unittest.mock
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jtbridge
from jtbridge.errors import ArgumentError, MutationError

from .compare import assert_matches

X = jnp.array([0.5, -1.0, 2.0])
T = torch.tensor([0.5, -1.0, 2.0])


def affine(w: torch.Tensor, b: Any, x: torch.Tensor, *, scale: Any = 1.0) -> torch.Tensor:
    return w * x * scale + b


class Model:
    """A class with wrapped methods that are decorated in every way."""

    def __init__(self, factor: float):
        self.factor = factor

    @jtbridge.wrap
    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        """Scaled."""
        return x * self.factor

    @jtbridge.wrap(residuals="recompute")
    def power(self, x: torch.Tensor, exponent: int = 2) -> torch.Tensor:
        return x**exponent * self.factor

    @staticmethod
    @jtbridge.wrap
    def static(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    @classmethod
    @jtbridge.wrap
    def of_class(cls, x: torch.Tensor) -> torch.Tensor:
        return x * len(cls.__name__)

    def plain(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x - self.factor


def check(wrapped: Any, fn: Any) -> None:
    """Assert that value, compiled value, gradient and batch equal torch's."""
    t = T.clone().requires_grad_()
    (expected,) = torch.autograd.grad((fn(t) ** 2).sum(), t)
    assert_matches(wrapped(X), fn(T).detach())
    assert_matches(jax.jit(wrapped)(X), fn(T).detach())
    assert_matches(jax.jit(jax.grad(lambda x: (wrapped(x) ** 2).sum()))(X), expected)
    rows = jnp.stack([X, 2 * X])
    assert_matches(jax.vmap(wrapped)(rows), torch.stack([fn(T), fn(2 * T)]).detach())


def test_lambda(backend: str):
    check(jtbridge.wrap(lambda x: x.sin() * 2), lambda x: x.sin() * 2)


@pytest.mark.parametrize("fn", [torch.sin, torch.Tensor.exp, torch.nn.functional.softplus, torch.ops.aten.tanh.default])
def test_builtin_torch_functions(fn: Any, backend: str):
    check(jtbridge.wrap(fn), fn)


def test_builtin_with_keyword(backend: str):
    assert_matches(jtbridge.wrap(torch.softmax)(X, dim=0), torch.softmax(T, dim=0))
    assert_matches(jax.jit(lambda x: jtbridge.wrap(torch.sum)(x, dim=0, keepdim=True))(X), T.sum(0, keepdim=True))


def test_methods(backend: str):
    model = Model(3.0)
    check(model.scaled, model.plain)
    check(model.power, lambda x: x**2 * 3)
    check(functools.partial(model.power, exponent=3), lambda x: x**3 * 3)
    check(Model.static, lambda x: x + 1)
    check(Model.of_class, lambda x: x * 5)
    check(jtbridge.wrap(model.plain), model.plain)
    check(jtbridge.wrap(model), model)


def test_methods_of_two_instances_are_two_functions(backend: str):
    first, second = Model(2.0), Model(5.0)
    assert first.scaled(X).tolist() == (2 * T).tolist()
    assert second.scaled(X).tolist() == (5 * T).tolist()


def test_names_and_docstrings_are_kept():
    assert Model.scaled.__doc__ == "Scaled."
    assert Model.scaled.__name__ == "scaled"
    assert repr(jtbridge.wrap(affine)) == "<jtbridge.wrap of affine>"
    assert jtbridge.wrap(affine).__wrapped__ is affine


@pytest.mark.parametrize("make", [jnp.asarray, torch.as_tensor, float])
def test_partial(make: Any, backend: str):
    partial = functools.partial(affine, make(2.0), scale=make(3.0))
    nested = functools.partial(jtbridge.wrap(partial), 1.0)
    check(nested, lambda x: 6 * x + 1)
    check(jtbridge.wrap(functools.partial(partial, 1.0)), lambda x: 6 * x + 1)
    check(lambda x: jtbridge.wrap(partial)(1.0, x, scale=2.0), lambda x: 4 * x + 1)


def test_partial_passes_its_objects_unchanged():
    """As in torch, the function may read, keep and write to these objects. Only JAX arrays become tensors."""
    calls, buffer, weight = [], torch.zeros(3), torch.nn.Parameter(torch.ones(3))
    array, offsets = np.ones(3, np.float32), collections.OrderedDict(a=1.0)

    def f(calls, buffer, x, *, weight, array, offsets, scale):
        calls.append(len(calls))
        (weight * x).sum().backward()
        return buffer.add_(x) * torch.from_numpy(array) + offsets.setdefault("b", 2.0) + scale["w"]

    state = {"weight": weight, "array": array, "offsets": offsets, "scale": {"w": jnp.ones(())}}
    wrapped = jtbridge.wrap(functools.partial(f, calls, buffer, **state))
    assert [wrapped(X).tolist() for _ in range(2)] == [(T + 3).tolist(), (2 * T + 3).tolist()]
    assert calls == [0, 1]
    assert buffer.tolist() == (2 * T).tolist()
    assert weight.grad is not None
    assert weight.grad.tolist() == (2 * T).tolist()
    assert offsets == {"a": 1.0, "b": 2.0}
    array[:] = 2.0
    assert wrapped(X).tolist() == (6 * T + 3).tolist()


@pytest.mark.parametrize("backend", ["auto", "dlpack"])
@pytest.mark.parametrize(
    ("write", "make", "name"),
    [
        (lambda state, x: (state.append(1), x)[1], list, "state"),
        (lambda state, x: (state.append(1), x)[1], collections.deque, "state"),
        (lambda state, x: (state.update(n=len(state)), x)[1], dict, 'state["n"]'),
        (lambda state, x: state.add_(x), lambda: torch.zeros(3), "a closed-over tensor"),
    ],
    ids=["list", "deque", "dict", "tensor"],
)
def test_writes_to_the_objects_of_a_partial_are_refused_in_a_program(write, make, name, backend):
    state = make()
    before = copy.copy(state)
    with pytest.raises(MutationError, match=re.escape(name)):
        jax.jit(jtbridge.wrap(functools.partial(write, state), backend=backend))(X)
    assert str(state) == str(before)


def test_fixed_arguments_of_a_partial_are_read_in_each_call():
    partial = functools.partial(lambda x, *, scale: x * scale, scale=2.0)
    wrapped = jtbridge.wrap(partial)
    check(lambda x: wrapped(x), lambda x: x * 2)
    partial.keywords["scale"] = 5.0
    check(lambda x: wrapped(x), lambda x: x * 5)
    partial.keywords["scale"] = jnp.array(3.0)
    check(lambda x: wrapped(x), lambda x: x * 3)
    partial.__setstate__((torch.mul, (4.0,), {}, {}))
    check(lambda x: wrapped(x), lambda x: x * 4)


def test_tensors_of_a_partial_keep_their_dtype_and_layout():
    fine = torch.tensor(1 + 2.0**-40, dtype=torch.float64)
    f = functools.partial(lambda fine, x: ((fine - 1) * 2.0**40).float() * x, fine)
    check(jtbridge.wrap(f), lambda x: x)
    g = functools.partial(lambda sparse, x: sparse @ x, torch.eye(3).to_sparse())
    assert jtbridge.wrap(g)(X).tolist() == T.tolist()
    h = functools.partial(lambda table, x: x + table.stride(0), torch.ones(1).expand(3))
    check(jtbridge.wrap(h), lambda x: x)


def test_gradient_with_respect_to_the_arrays_of_a_partial(backend: str):
    @jax.jit
    @jax.grad
    def gradient(parameters):
        f = jtbridge.wrap(functools.partial(affine, parameters["w"], b=parameters["b"], scale=parameters["scale"]))
        return f(x=X).sum()

    found = gradient({"w": jnp.ones(3), "b": jnp.zeros(()), "scale": jnp.array(2.0)})
    assert_matches(found, {"w": 2 * T, "b": torch.tensor(3.0), "scale": T.sum()})


def test_module_with_parameters_inside_and_outside(backend: str):
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.GELU())
    check(jtbridge.wrap(model), model)
    parameters = dict(model.named_parameters())
    f = jtbridge.wrap(lambda p, x: torch.func.functional_call(model, p, (x,)).sum())
    found = jax.jit(jax.grad(f))(jtbridge.to_jax(parameters), X)
    expected = torch.autograd.grad(model(T).sum(), list(parameters.values()))
    assert_matches(found, dict(zip(parameters, expected, strict=True)))


def test_weights_changed_in_place_are_used(backend: str):
    """The function closes over a module: every call, also a compiled one, reads the module's current weights."""
    model = torch.nn.Linear(3, 1, bias=False)
    f = jax.jit(jtbridge.wrap(model))
    f(X)
    with torch.no_grad():
        model.weight.fill_(2.0)
    assert f(X).tolist() == [3.0]


def test_deep_modules_that_write_to_their_intermediate_tensors():
    """Memory is reused often, and must never be mistaken for the memory of a weight."""
    for _ in range(6):
        layers = [(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5), torch.nn.LayerNorm(4)) for _ in range(15)]
        f = jtbridge.wrap(torch.nn.Sequential(*(layer for block in layers for layer in block)))
        found = jax.eval_shape(lambda x, key, f=f: f(x, rng=key), jnp.ones((2, 4)), jax.random.key(0))
        assert found.shape == (2, 4)


def scripted_function(x: torch.Tensor) -> torch.Tensor:
    if x.dim() == 1:
        x = x * 2
    return torch.tanh(x)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::jtbridge.errors.SequentialVmapWarning")
def test_torchscript(backend: str):
    scripted = torch.jit.script(scripted_function)
    check(jtbridge.wrap(scripted), scripted_function)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Tanh())
    check(jtbridge.wrap(torch.jit.script(model)), model)


def test_compiled_functions_are_called_as_written(backend: str):
    def fn(x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x) * 2

    check(jtbridge.wrap(torch.compile(fn, backend="eager")), fn)
    model = torch.nn.Linear(3, 2)
    check(jtbridge.wrap(torch.compile(model, backend="eager")), model)


class Doubled(torch.nn.Module):
    """A module whose part has the name under which torch's compiled modules hold theirs."""

    def __init__(self, part: torch.nn.Module):
        super().__init__()
        self._orig_mod = part

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * self._orig_mod(x)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor", "ignore:Dynamo detected a call")
def test_code_around_a_compiled_function_runs(backend: str):
    """`functools.wraps` copies the attributes by which torch finds the function that it compiled."""
    compiled = torch.compile(torch.sin, backend="eager")

    @functools.wraps(compiled)
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return 2 * compiled(x)

    check(jtbridge.wrap(doubled), lambda x: 2 * x.sin())
    check(jtbridge.wrap(functools.partial(doubled)), lambda x: 2 * x.sin())
    check(jtbridge.wrap(Doubled(torch.nn.Tanh())), lambda x: 2 * x.tanh())


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor", "ignore:Dynamo detected a call")
def test_hooks_of_a_compiled_module_run(backend: str):
    model = torch.compile(torch.nn.Tanh(), backend="eager")
    model.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    model.register_forward_hook(lambda module, args, out: out * 3)
    check(jtbridge.wrap(model), lambda x: 3 * (x + 1).tanh())


class Proxy:
    """A proxy has an attribute of every name."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args: None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x.sin() * 2


class ProxyModule(torch.nn.Module):
    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return lambda *args: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sin() * 2


class ComparedByElement:
    """An object whose comparison has no truth value, as of an array."""

    def __eq__(self, other: Any) -> Any:
        return T == 1

    __hash__ = None  # type: ignore[assignment]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x.sin() * 2


@pytest.mark.filterwarnings("ignore::jtbridge.errors.SequentialVmapWarning")  # a mock stores its arguments
@pytest.mark.parametrize(
    "make", [Proxy, ProxyModule, ComparedByElement, lambda: unittest.mock.Mock(side_effect=lambda x: x.sin() * 2)]
)
def test_objects_with_unusual_attributes(backend: str, make: Any):
    fn = make()
    check(jtbridge.wrap(fn), lambda x: x.sin() * 2)
    check(jtbridge.wrap(functools.partial(fn)), lambda x: x.sin() * 2)
    plain = jtbridge.wrap(lambda x: x.sin() * 2)
    assert jtbridge.explain(jtbridge.wrap(fn), X).backend == jtbridge.explain(plain, X).backend


def test_torch_func_transforms(backend: str):
    check(jtbridge.wrap(torch.func.grad(lambda x: (x**3).sum())), lambda x: 3 * x**2)
    check(jtbridge.wrap(torch.vmap(torch.exp)), torch.exp)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_torchscript_modules_are_translated():
    inner = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Tanh())
    model = torch.nn.Sequential(torch.jit.script(inner), torch.nn.Softmax(-1))
    check(jtbridge.wrap(model, backend="xla"), model)
    check(jtbridge.wrap(torch.jit.script(inner), backend="xla"), inner)
    assert not torch.compiler.is_exporting()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_a_compiled_function_of_large_arrays(compiler: str, log_records: list[logging.LogRecord]):
    """Torch's compiler does not compile the modes that protect the memory of arrays."""

    def doubled_sine(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        y.mul_(2)
        return y

    compiled = torch.compile(doubled_sine, backend=compiler)
    f = jtbridge.wrap(lambda x: compiled(x.add_(1)).sum())
    x = jnp.arange(300_000.0)
    wanted = doubled_sine(torch.arange(300_000.0) + 1)
    np.testing.assert_allclose(f(x), wanted.sum(), rtol=1e-4)
    np.testing.assert_allclose(jax.vmap(f)(x.reshape(3, -1)), wanted.reshape(3, -1).sum(1), rtol=1e-4)
    np.testing.assert_allclose(jax.grad(f)(x), 2 * np.cos(np.arange(300_000.0) + 1), atol=0.05)
    assert x[:2].tolist() == [0, 1]
    assert not log_records


# Under grad the argument is not a leaf, because torch code may write to it, and dynamo reads every tensor's `.grad`.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled_functions_inside_are_translated():
    compiled = torch.compile(lambda x: x.sin() * 2, backend="eager")
    linear = torch.nn.Linear(3, 3)
    module = torch.compile(linear, backend="eager")
    f = jtbridge.wrap(lambda x: module(compiled(x)))
    x = jnp.asarray([1.0, 2.0, 3.0])
    explained = jtbridge.explain(f, x)
    assert (explained.backend, explained.gradient) == ("xla", "xla")
    tensor = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    want = linear(tensor.sin() * 2)
    np.testing.assert_allclose(f(x), want.detach(), rtol=1e-5)
    (gradient,) = torch.autograd.grad(want.sum(), tensor)
    np.testing.assert_allclose(jax.grad(lambda x: f(x).sum())(x), gradient, rtol=1e-5)


def test_jax_array_argument_of_an_inner_wrapped_function_is_refused():
    """Its torch code would compute with JAX's methods: JAX's `std` differs from torch's."""
    spread = jtbridge.wrap(lambda x: x.std())
    with pytest.raises(ArgumentError, match="was called with a JAX array inside another wrapped function"):
        jtbridge.wrap(lambda x: x + float(spread(jnp.array([1.0, 2.0]))))(jnp.zeros(1))
    with pytest.raises(ArgumentError, match="was called with a JAX array inside another wrapped function"):
        jtbridge.wrap(lambda x: x + float(spread({"x": [jnp.array([1.0, 2.0])]})))(jnp.zeros(1))
    assert jtbridge.wrap(lambda x: spread(x) * 2)(jnp.array([1.0, 2.0])) == spread(jnp.array([1.0, 2.0])) * 2
    keyed = jtbridge.wrap(lambda by_key: by_key[1] * 2)
    assert jtbridge.wrap(lambda x: keyed({1: x, "a": x}))(jnp.ones(1)).tolist() == [2.0]


@pytest.mark.parametrize("backend", ["auto", "xla", "dlpack"])
def test_a_function_that_sets_the_default_device_is_refused_in_a_program(backend):
    def f(x):
        torch.set_default_device("cpu")
        return torch.sin(x)

    for _ in range(2):
        with pytest.raises(MutationError, match=r"calls `torch.set_default_device`.*Pass `device=`"):
            jax.jit(jtbridge.wrap(f, backend=backend))(jnp.ones(2))
    assert torch.get_default_device() == torch.device("cpu")
