"""State that a function writes: refused by name where it is traced, and left as it was."""

from __future__ import annotations

import csv
import functools
import io
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jtbridge
from jtbridge.errors import CalledWarning, MutationError, PurityWarning

from .writing_functions import CASES, counting

X = jnp.asarray([1.0, 2.0, 4.0])
ROUTES: dict[str, Callable[[Callable], Any]] = {
    "jit": lambda f: jax.jit(f)(X),
    "eval_shape": lambda f: jax.eval_shape(f, X),
    "scan": lambda f: jax.lax.scan(lambda x, _: (x, f(x)), X, None, length=2),
    "jit(grad)": lambda f: jax.jit(jax.grad(lambda x: jnp.sum(f(x))))(X),
}


@pytest.mark.parametrize("make", CASES, ids=lambda make: getattr(make, "__name__", ""))
@pytest.mark.parametrize("backend", ["xla", "dlpack"])
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.filterwarnings("ignore:Pickle, copy, and deepcopy support will be removed from itertools")  # Python 3.12
def test_written_state_is_refused_by_name_and_restored(make, backend, route):
    case = make()
    before = case.state()
    with pytest.raises(MutationError) as caught:
        ROUTES[route](jtbridge.wrap(case.fn, backend=backend))
    assert case.written in str(caught.value), case.name
    assert 'effects="ordered"' in str(caught.value)
    assert repr(case.state()) == repr(before), case.name


class CannotBeCopied(itertools.chain):
    """An iterator without `__reduce__`. From Python 3.14 on, the iterators of itertools have none."""

    def __reduce__(self):
        raise TypeError("cannot pickle")


def test_an_iterator_that_cannot_be_copied_is_refused():
    numbers = CannotBeCopied([1], [2, 3])
    with pytest.raises(MutationError, match="`numbers`"):
        jax.jit(jtbridge.wrap(lambda x: x * next(numbers)))(X)


def test_a_generator_that_is_advanced_is_refused():
    numbers = (i for i in range(5))
    with pytest.raises(MutationError, match="`numbers`"):
        jax.jit(jtbridge.wrap(lambda x: x * next(numbers)))(X)


def test_write_through_a_memoryview_is_refused():
    counts = bytearray(8)
    view = memoryview(counts)[2:]

    def f(x):
        view[0] += 1
        return x * view[0]

    with pytest.raises(MutationError, match="`view`"):
        jax.jit(jtbridge.wrap(f))(X)
    assert not any(counts)


def test_spawned_random_generators_are_refused():
    source = np.random.default_rng(0)
    with pytest.raises(MutationError, match="`source`"):
        jax.jit(jtbridge.wrap(lambda x: x * source.spawn(1)[0].random()))(X)


def test_a_local_array_may_be_written_to_through_torch():
    def f(x):
        local = np.ones(3, np.float32)
        torch.from_numpy(local).add_(1)
        return x * torch.from_numpy(local)

    np.testing.assert_array_equal(jtbridge.wrap(f)(X), 2 * X)
    with pytest.warns(CalledWarning, match="shares with a NumPy array"):
        np.testing.assert_array_equal(jax.jit(jtbridge.wrap(f))(X), 2 * X)


def test_a_backward_that_counts_is_refused():
    class Counted(torch.autograd.Function):
        runs = 0

        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        def backward(ctx, g):
            Counted.runs += 1
            return g * (1 + Counted.runs)

    for backend in ("xla", "dlpack"):
        f = jtbridge.wrap(lambda x: Counted.apply(x), backend=backend)
        with pytest.raises(MutationError, match=r"`Counted.runs`"):
            jax.jit(jax.grad(lambda x, f=f: f(x).sum()))(X)
        assert Counted.runs == 0


def test_failed_trace_undoes_writes():
    seen = []

    def f(x):
        seen.append(x)
        raise LookupError("on purpose")

    with pytest.raises(LookupError, match="on purpose"):
        jax.jit(jtbridge.wrap(f))(X)
    assert seen == []


def test_state_written_on_real_values_is_restored():
    seen = []

    def f(x):
        seen.append(float(x.sum()))
        return x * len(seen)

    with pytest.raises(MutationError, match="`seen`"):
        jax.jit(jtbridge.wrap(f))(X)
    assert seen == []


@pytest.mark.parametrize("first", [0.0, 3.0])
def test_write_that_equals_the_state_for_some_arguments_is_refused(first):
    """Untraceable functions run on arguments of zeros and of ones, whose sums are these."""
    last = [first]

    def f(x):
        last[0] = float(x.numpy().sum())
        return x * 2

    with pytest.raises(MutationError, match="`last"):
        jax.jit(jtbridge.wrap(f))(X)
    assert last == [first]


@pytest.mark.parametrize("backend", ["xla", "dlpack"])
def test_purity_warn_runs_from_the_original_state(backend):
    case = counting()
    f = jtbridge.wrap(case.fn, backend=backend, purity="warn")
    with pytest.warns(PurityWarning, match=r'`counter\["n"\]`'):
        compiled = jax.jit(f).lower(X).compile()
    assert case.state() == {"n": 1}
    np.testing.assert_array_equal(compiled(X), 2 * X)


def test_trace_does_not_perform_allowed_writes():
    case = counting()
    f = jax.jit(jtbridge.wrap(case.fn, backend="xla", purity="allow"))
    for _ in range(3):
        np.testing.assert_array_equal(f(X), 2 * X)
    assert case.state() == {"n": 1}


@pytest.mark.parametrize("name", ["append", "pop", "next", "draw", "partial"])
def test_builtin_methods_are_traversed_to_their_objects(name):
    items, numbers, generator = [1, 2], iter(range(9)), np.random.default_rng(0)
    methods = {
        "append": items.append,
        "pop": items.pop,
        "next": numbers.__next__,
        "draw": generator.normal,
        "partial": functools.partial(items.insert, 0, 1),
    }
    method = methods[name]
    give = {"append": (3,)}.get(name, ())

    def f(x):
        return x * float(method(*give) or 1)

    with pytest.raises(MutationError, match="state from one call to the next"):
        jax.jit(jtbridge.wrap(f))(X)
    assert items == [1, 2]


def test_state_of_a_builtin_method_is_read_again():
    factors = {"k": 1.0}
    get = factors.get
    f = jtbridge.wrap(lambda x: x * get("k"))

    def both(x):
        first = f(x)
        factors["k"] = 3.0
        return first, f(x)

    for got, factor in zip(jax.jit(both)(X), (1, 3), strict=True):
        np.testing.assert_array_equal(got, factor * X)


@pytest.mark.parametrize(
    ("make", "take"),
    [
        (lambda: iter(torch.utils.data.DataLoader(torch.arange(1.0, 9.0), batch_size=1)), lambda each: next(each)[0]),
        (lambda: csv.reader(["1", "2", "3"]), lambda each: float(next(each)[0])),
        (lambda: np.ndenumerate(np.arange(3.0)), lambda each: next(each)[1]),
        (lambda: np.arange(3.0).flat, next),
        (lambda: io.StringIO("1\n2\n3"), lambda each: float(each.readline())),
        (lambda: io.BytesIO(b"123"), lambda each: float(each.read(1))),
    ],
    ids=["DataLoader", "csv", "ndenumerate", "flat", "StringIO", "BytesIO"],
)
@pytest.mark.parametrize("by", ["auto", "dlpack"])
def test_reads_that_consume_uncopyable_state_are_refused(make, take, by):
    numbers = make()
    with pytest.raises(MutationError, match="`numbers`"):
        jax.jit(jtbridge.wrap(lambda x: x * take(numbers), backend=by))(X)
    others = make()
    taken = [float(take(others)) for _ in range(2)]
    f = jtbridge.wrap(lambda x: x * take(numbers), backend=by)
    numbers = make()
    assert [float(f(X)[0]) for _ in range(2)] == taken  # an eager call continues to read


def test_text_stream_is_not_state():
    text = io.StringIO()

    def f(x):
        print("traced", file=text)
        return x * 2

    assert jax.jit(jtbridge.wrap(f))(X).tolist() == [2, 4, 8]
