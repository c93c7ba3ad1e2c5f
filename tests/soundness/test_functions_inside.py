"""State of functions that a wrapped function calls: wrapped and decorated functions, and methods of functools."""

from __future__ import annotations

import functools
import random
import sys
import types
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jtbridge
from jtbridge.errors import MutationError, RandomnessError

X = jnp.array([1.0, 2.0, 3.0])


class Counter:
    """A function that counts its calls in a list, in several forms."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def step(self, number: int, x: torch.Tensor) -> torch.Tensor:
        self.calls.append(number)
        return x * len(self.calls)

    once = functools.partialmethod(step, 1)

    @functools.singledispatchmethod
    def dispatched(self, x: torch.Tensor) -> torch.Tensor:
        return self.step(1, x)


def wrapped(counter: Counter) -> Callable:
    inner = jtbridge.wrap(lambda x: counter.step(1, x))
    return lambda x: inner(x)


def wrapped_partial(counter: Counter) -> Callable:
    inner = jtbridge.wrap(functools.partial(counter.step, 1))
    return lambda x: inner(x)


def wrapped_in_a_list(counter: Counter) -> Callable:
    layers = [jtbridge.wrap(lambda x: counter.step(1, x))]
    return lambda x: layers[0](x)


def of_a_module(counter: Counter) -> Callable:
    class Layer(torch.nn.Module):
        def forward(self, x):
            return counter.step(1, x)

    net = jtbridge.wrap(Layer())
    return lambda x: net(x)


def by_partialmethod(counter: Counter) -> Callable:
    return lambda x: counter.once(x)


def by_singledispatchmethod(counter: Counter) -> Callable:
    return lambda x: counter.dispatched(x)


def with_the_name_of_torchs(counter: Counter) -> Callable:
    @functools.wraps(torch.sin)
    def sin(x):
        return counter.step(1, x)

    return lambda x: sin(x)


def with_a_forward_in_its_place(counter: Counter) -> Callable:
    layer = torch.nn.Linear(3, 3)

    @functools.wraps(layer.forward)
    def forward(x):
        return counter.step(1, x)

    layer.forward = forward
    return layer


forms = pytest.mark.parametrize(
    "form",
    [
        *(wrapped, wrapped_partial, wrapped_in_a_list, of_a_module, by_partialmethod, by_singledispatchmethod),
        *(with_the_name_of_torchs, with_a_forward_in_its_place),
    ],
)


@forms
def test_write_in_an_inner_function_is_refused_and_undone(form):
    counter = Counter()
    f = jtbridge.wrap(form(counter))
    with pytest.raises(MutationError, match="calls"):
        jax.jit(f)(X)
    assert counter.calls == []
    np.testing.assert_array_equal(f(X), X)
    np.testing.assert_array_equal(f(X), 2 * X)
    assert counter.calls == [1, 1]


@forms
def test_reports_do_not_change_state(form):
    counter = Counter()
    assert not jtbridge.purity(form(counter), X).is_pure
    with pytest.raises(MutationError):
        jtbridge.explain(form(counter), X)
    assert counter.calls == []


@forms
def test_eager_sequential_batch_runs_each_row_once(form):
    counter = Counter()
    inner = form(counter)
    rows = jnp.ones((3, 3))
    with pytest.warns(jtbridge.errors.SequentialVmapWarning):
        got = jax.vmap(jtbridge.wrap(lambda x: inner(x) * float(x.sum())))(rows)
    np.testing.assert_array_equal(got[:, 0], [3.0, 6.0, 9.0])


def test_state_is_read_again_between_two_calls_in_one_trace():
    scale, weight = [2.0], torch.ones(3)
    inner = jtbridge.wrap(lambda x: x * scale[0] * weight)
    outer = jtbridge.wrap(lambda x: inner(x))

    def both(x):
        scale[0] = 2.0
        weight.fill_(1.0)
        first = outer(x)
        scale[0] = 5.0
        second = outer(x)
        weight.fill_(10.0)
        return first, second, outer(x)

    for got, factor in zip(jax.jit(both)(X), (2.0, 5.0, 50.0), strict=True):
        np.testing.assert_array_equal(got, factor * X)


def test_a_module_that_is_switched_between_two_calls():
    layer = torch.nn.Dropout(0.5)
    inner = jtbridge.wrap(layer)
    outer = jtbridge.wrap(lambda x: inner(x))

    def both(x):
        layer.eval()
        first = outer(x)
        layer.train()
        return first, outer(x)

    with pytest.raises(RandomnessError):
        jax.jit(both)(X)


def test_draws_of_python_are_refused():
    inner = jtbridge.wrap(lambda x: x * random.random())
    with pytest.raises(RandomnessError, match="Python's global generator"):
        jax.jit(jtbridge.wrap(lambda x: inner(x)))(X)


def test_traced_tensors_are_removed_from_attributes():
    class Keeper:
        last = None

    keeper = Keeper()

    @jtbridge.wrap
    def inner(x):
        keeper.last = x
        return x * 2

    with pytest.raises(MutationError, match="last"):
        jax.jit(jtbridge.wrap(lambda x: inner(x)))(X)
    assert keeper.last is None


def test_ordered_effects_run_once_per_call():
    counter = Counter()
    f = jax.jit(jtbridge.wrap(wrapped(counter), effects="ordered"))
    for number in (1, 2, 3):
        np.testing.assert_array_equal(f(X), number * X)


def test_changed_keyword_defaults_are_refused():
    def f(x, *, k=1):
        f.__kwdefaults__["k"] += 1
        return x * k

    with pytest.raises(MutationError, match=r"`f\.__kwdefaults__\[\"k\"\]`"):
        jax.jit(jtbridge.wrap(f))(X)
    assert f.__kwdefaults__ == {"k": 1}


def test_singledispatch_is_not_a_write():
    @functools.singledispatch
    def double(x):
        return x * 2

    np.testing.assert_array_equal(jax.jit(jtbridge.wrap(lambda x: double(x)))(X), 2 * X)


def test_user_module_named_like_a_standard_module(tmp_path, monkeypatch):
    (tmp_path / "code.py").write_text("calls = []\ndef step(x):\n    calls.append(1)\n    return x * len(calls)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "code", raising=False)
    import code

    assert isinstance(code, types.ModuleType)
    assert code.__file__ == str(tmp_path / "code.py")
    from jtbridge.state import of_library

    of_library.cache_clear()
    try:
        with pytest.raises(MutationError, match="calls"):
            jax.jit(jtbridge.wrap(lambda x: code.step(x)))(X)
        assert code.calls == []
    finally:
        of_library.cache_clear()
        monkeypatch.delitem(sys.modules, "code", raising=False)


@pytest.mark.parametrize("backend", ["auto", "dlpack", "callback"])
def test_a_write_that_the_next_run_undoes(backend: str):
    """The result requires a gradient, so the function is traced with and without recording."""
    layer, state = torch.nn.Linear(3, 3), {"flag": True}

    def f(x):
        state["flag"] = not state["flag"]
        return layer(x) * (2 if state["flag"] else 3)

    with pytest.raises(MutationError, match="flag"):
        jax.jit(jtbridge.wrap(f, backend=backend))(X)
    assert state == {"flag": True}


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
@pytest.mark.parametrize("backend", ["auto", "dlpack"])
def test_hooks_of_closed_over_tensors(register: str, backend: str):
    weight = torch.ones(3, requires_grad=True)
    first = weight.register_hook(lambda grad: grad * 5)

    def f(x):
        getattr(weight, register)(lambda grad: None)
        return x * weight

    with pytest.raises(MutationError, match="hooks"):
        jax.jit(jtbridge.wrap(f, backend=backend))(X)
    (weight * 1).sum().backward()
    torch.testing.assert_close(weight.grad, torch.full((3,), 5.0))
    first.remove()
    weight.grad = None
    (weight * 1).sum().backward()
    torch.testing.assert_close(weight.grad, torch.ones(3))
