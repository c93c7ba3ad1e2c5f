"""State in places that few programs use: written in each call of torch, refused by name in a trace, and restored."""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.nn.utils import parametrize

import jtbridge
from jtbridge.errors import MutationError

X = jnp.asarray([1.0, 2.0])
Function = Callable[[Any], Any]


class Plain:
    n = 0.0


def replaced_dict() -> Function:
    o = Plain()

    def f(x):
        o.__dict__ = {"n": o.n + 1}
        return x * o.n

    return f


def dict_of_a_module() -> Function:
    layer = torch.nn.Identity()
    layer.n = 0

    def f(x):
        layer.__dict__ = {**layer.__dict__, "n": layer.n + 1}
        return layer(x) * layer.n

    return f


class Private:
    __slots__ = ("__n",)

    def __init__(self):
        self.__n = 0

    def step(self, x):
        self.__n += 1
        return x * self.__n


class ListWithSlot(list):
    __slots__ = ("n",)


class Text(str):
    """A value with attributes."""


class Pair(NamedTuple):
    a: int
    b: int


class PairWithAttributes(Pair):
    pass


def attribute_of(o: Any) -> Callable[[], Function]:
    def make() -> Function:
        o.n = 0

        def f(x):
            o.n += 1
            return x * o.n

        return f

    return make


def integer_enumeration() -> Function:
    class Level(enum.IntEnum):
        LOW = 1

    return attribute_of(Level.LOW)()


def made_dataclass() -> Function:
    return attribute_of(dataclasses.make_dataclass("Made", ["n"])(0))()


def first_attribute_of_a_tensor() -> Function:
    t = torch.ones(2)

    def f(x):
        t.calls = getattr(t, "calls", 0) + 1  # type: ignore[attr-defined]
        return x * t.calls  # type: ignore[attr-defined]

    return f


def sparse(convert: Callable[[torch.Tensor], torch.Tensor], values: str) -> Callable[[], Function]:
    def make() -> Function:
        w = convert(torch.eye(2))

        def f(x):
            getattr(w, values)().add_(1)
            return w.to_dense() @ x

        return f

    return make


def default_factory() -> Function:
    calls = [0]

    def new():
        calls[0] += 1
        return calls[0]

    table = collections.defaultdict(new)
    return lambda x: x * table.pop("a", None) if "a" in table else x * (table["a"], table.pop("a"))[0]


def other_default_factory() -> Function:
    table = collections.defaultdict(lambda: 1)

    def f(x):
        y = x * table["a"]
        table.clear()
        table.default_factory = (lambda: 2) if y is not None else None
        return y

    return f


def shape_of_an_array() -> Function:
    table = np.ones((1, 2), np.float32)

    def f(x):
        y = x * table.ndim
        table.shape = (2,)
        return y

    return f


def size_of_an_array() -> Function:
    table = np.ones(3, np.float32)

    def f(x):
        y = x * len(table)
        table.resize(len(table) + 1, refcheck=False)
        return y

    return f


def method_with_arguments() -> Function:
    class Counts:
        def _count(self, calls):
            calls.append(1)
            return len(calls)

        count = functools.partialmethod(_count, [])

    o = Counts()
    return lambda x: x * o.count()


def cached_method() -> Function:
    calls = [0]

    class Counts:
        @classmethod
        @functools.lru_cache(maxsize=1)
        def count(cls, k):
            calls[0] += 1
            return calls[0]

    return lambda x: x * (Counts.count(1) + Counts.count(2))


def setter_of_a_property() -> Function:
    calls = [0]

    def count(o, value):
        calls[0] += value

    class Counts:
        total = property(lambda self: calls[0], count)

    o = Counts()

    def f(x):
        o.total = 1
        return x * calls[0]

    return f


def list_in_a_cache() -> Function:
    held = functools.cache(lambda: [0])

    def f(x):
        held()[0] += 1
        return x * held()[0]

    return f


def environment() -> Function:
    variables = os.environ
    variables["JTBRIDGE_TEST"] = ""

    def f(x):
        variables["JTBRIDGE_TEST"] += "1"
        return x * len(variables["JTBRIDGE_TEST"])

    return f


def vectorized() -> Function:
    calls = [0]

    def count(_):
        calls[0] += 1
        return calls[0]

    numbers = np.vectorize(count, otypes=[float])
    return lambda x: x * float(numbers(0.0))


def distribution() -> Function:
    normal = torch.distributions.Normal(torch.zeros(()), torch.ones(()), validate_args=False)

    def f(x):
        normal.loc = normal.loc + 1
        return x * normal.mean

    return f


MAKE: dict[str, tuple[Callable[[], Function], str]] = {
    "replaced __dict__": (replaced_dict, "`o.__dict__`"),
    "replaced __dict__ of a module": (dict_of_a_module, "`layer.__dict__`"),
    "private slot": (lambda: Private().step, "`self._Private__n`"),
    "slot of a list": (attribute_of(ListWithSlot()), "`o.n`"),
    "attribute of a text": (attribute_of(Text("a")), "`o.n`"),
    "attribute of a tuple": (attribute_of(PairWithAttributes(1, 2)), "`o.n`"),
    "attribute of a partial": (attribute_of(functools.partial(int, 1)), "`o.n`"),
    "integer enumeration": (integer_enumeration, "`o.n`"),
    "made dataclass": (made_dataclass, "`o.n`"),
    "first attribute of a tensor": (first_attribute_of_a_tensor, "`t.calls`"),
    "COO": (sparse(torch.Tensor.to_sparse, "_values"), "`w._values()`"),
    "CSR": (sparse(torch.Tensor.to_sparse_csr, "values"), "`w.values()`"),
    "CSC": (sparse(torch.Tensor.to_sparse_csc, "values"), "`w.values()`"),
    "default factory": (default_factory, "`calls[0]`"),
    "other default factory": (other_default_factory, "`table.default_factory`"),
    "shape of an array": (shape_of_an_array, "`table`"),
    "size of an array": (size_of_an_array, "`table`"),
    "method with arguments": (method_with_arguments, "`Counts[0]`"),
    "cached method": (cached_method, "`calls[0]`"),
    "setter of a property": (setter_of_a_property, "`calls[0]`"),
    "list in a cache": (list_in_a_cache, "what `<lambda>` keeps in its cache"),
    "environment": (environment, '`variables["JTBRIDGE_TEST"]`'),
    "vectorized": (vectorized, "`calls[0]`"),
    "distribution": (distribution, "`normal.loc`"),
}
ROUTES: dict[str, Callable[[Callable], Any]] = {
    "jit": lambda f: jax.jit(f)(X),
    "jit(grad)": lambda f: jax.jit(jax.grad(lambda x: f(x).sum()))(X),
}


@pytest.mark.filterwarnings("ignore:Sparse CS:UserWarning", "ignore:The PyTorch API of nested:UserWarning")
@pytest.mark.filterwarnings("ignore:Setting the shape on a NumPy array:DeprecationWarning")
@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("route", ROUTES)
def test_write_is_refused_by_name_and_restored(name, route):
    make, written = MAKE[name]
    twin = make()
    want = [twin(torch.tensor([1.0, 2.0])).detach() for _ in range(3)]
    function = make()
    f = jtbridge.wrap(function)
    for _ in range(2):
        with pytest.raises(MutationError) as caught:
            ROUTES[route](f)
        assert written in str(caught.value)
    for value in want:
        np.testing.assert_allclose(f(X), value)


@pytest.mark.parametrize("purity", ["warn", "allow"])
@pytest.mark.filterwarnings("ignore::jtbridge.errors.PurityWarning")
def test_write_that_later_runs_do_not_repeat_is_undone(purity):
    """This holds for all settings of `purity`. Later runs write nothing, as with a constant, but the result differs."""
    layer = torch.nn.Dropout(0.5)

    def f(x):
        y = x * (1 + layer.training)
        layer.eval()
        return y

    np.testing.assert_array_equal(jax.jit(jtbridge.wrap(f, purity=purity))(X), 2 * X)
    assert layer.training


def test_a_hook_of_all_modules_is_refused():
    layer = torch.nn.Identity()

    def f(x):
        torch.nn.modules.module.register_module_forward_hook(lambda module, args, out: out + 1)
        return layer(x)

    with pytest.raises(MutationError, match="_global_forward_hooks"):
        jax.jit(jtbridge.wrap(f))(X)
    assert not torch.nn.modules.module._global_forward_hooks


def test_cached_result_of_a_refused_trace_is_dropped():
    class Counts:
        n = 0

        @functools.cache  # noqa: B019
        def count(self, k):
            self.n += 1
            return self.n

    o = Counts()
    f = jtbridge.wrap(lambda x: x * o.count(o.n))
    with pytest.raises(MutationError, match=r"`o.n`"):
        jax.jit(f)(X)
    np.testing.assert_array_equal(f(X), X)
    np.testing.assert_array_equal(f(X), 2 * X)


def test_parametrization_removed_by_a_trace_is_restored():
    class Doubled(torch.nn.Module):
        def forward(self, w):
            return w * 2

    layer = torch.nn.Linear(2, 2)
    parametrize.register_parametrization(layer, "weight", Doubled())
    want = layer(torch.tensor([1.0, 2.0])).detach()

    def f(x):
        y = layer(x)
        if parametrize.is_parametrized(layer):
            parametrize.remove_parametrizations(layer, "weight", leave_parametrized=False)
        return y

    with pytest.raises(MutationError, match="`layer"):
        jax.jit(jtbridge.wrap(f))(X)
    np.testing.assert_allclose(layer(torch.tensor([1.0, 2.0])).detach(), want)
    np.testing.assert_allclose(jtbridge.wrap(f)(X), want)


@pytest.mark.filterwarnings("ignore::jtbridge.errors.SequentialVmapWarning")
def test_a_batch_that_changes_the_dtype_of_a_layer_with_gradients():
    def make():
        layer = torch.nn.Linear(2, 2)
        layer(torch.ones(2)).sum().backward()

        def f(x):
            y = x * layer.weight.grad.element_size()
            layer.double()
            return y

        return f

    twin = jtbridge.wrap(make())
    want = [twin(row) for row in jnp.ones((2, 2))]
    np.testing.assert_array_equal(jax.vmap(jtbridge.wrap(make()))(jnp.ones((2, 2))), want)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128, torch.float64])
def test_unchanged_tensors_with_nan(dtype):
    w = torch.tensor([[float("nan"), 1.0], [2.0, -0.0]], dtype=dtype).T  # not contiguous
    result = jax.jit(jtbridge.wrap(lambda x: x * torch.view_as_real(w.to(torch.complex64))[0, 1]))(X)
    np.testing.assert_array_equal(result, X * np.array([2.0, 0.0]))


def test_strides_that_change_between_two_calls_of_a_trace():
    w = torch.arange(4.0).reshape(2, 2)
    f = jtbridge.wrap(lambda x: w @ x)

    def two(x):
        first = f(x)
        w.t_()
        return first, f(x)

    first, second = jax.jit(two)(X)
    np.testing.assert_array_equal(second, w @ torch.tensor([1.0, 2.0]))
    np.testing.assert_array_equal(first, w.T @ torch.tensor([1.0, 2.0]))
