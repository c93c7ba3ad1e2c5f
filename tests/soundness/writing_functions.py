"""Functions that write to state. Each case has the function, a reader of the state, and the name of the state."""

from __future__ import annotations

import array as arrays_of_c
import collections
import contextvars
import ctypes
import itertools
import mmap
import random
from collections.abc import Callable
from queue import Queue
from typing import Any

import numpy as np
import scipy.sparse
import torch

from tests import with_state

from .writing_case import Case, array_of, iterator, memory, own_generator, sparse

calls = 0


class Module(torch.nn.Module):
    """A module that calls `body` with itself as an argument."""

    limit = 3

    def __init__(self, body: Callable[..., Any]):
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)
        self.register_buffer("table", torch.zeros(3))
        self.calls, self.last = 0, None
        self.body = [body]  # not a method

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body[0](self, x)


class Slotted:
    __slots__ = ("n",)

    def __init__(self) -> None:
        self.n = 0


def counting() -> Case:
    counter = {"n": 1}

    def f(x):
        counter["n"] += 1
        return x * counter["n"]

    return Case("a dict of a closure", f, lambda: dict(counter), '`counter["n"]`')


def nonlocal_variable() -> Case:
    total = 0

    def f(x):
        nonlocal total
        total += 1
        return x * total

    return Case("a variable of a closure", f, lambda: total, "`total`")


def global_variable() -> Case:
    def f(x):
        global calls
        calls += 1
        return x * calls

    return Case("a global", f, lambda: calls, "global `calls`")


def of_another_module() -> Case:
    def f(x):
        with_state.count += 1
        return x * with_state.count

    return Case("a variable of a module", f, lambda: with_state.count, "global `count`")


def by_helpers() -> Case:
    return Case(
        "by a helper of a helper", lambda x: with_state.outer(x), lambda: list(with_state.seen), "global `seen`"
    )


def growing_list() -> Case:
    seen: list[Any] = []

    def f(x):
        seen.append(x.shape)
        return x * len(seen)

    return Case("a list that grows", f, lambda: list(seen), "`seen`")


def list_of_tensors() -> Case:
    seen: list[Any] = []

    def f(x):
        seen.append(x * 2)
        return x + 1

    return Case("a list of tensors", f, lambda: list(seen), "`seen`")


def set_of_numbers() -> Case:
    known: set[int] = set()

    def f(x):
        known.add(len(known))
        return x

    return Case("a set", f, lambda: set(known), "`known`")


def queue() -> Case:
    last = collections.deque([0, 0], maxlen=2)

    def f(x):
        last.append(last[-1] + 1)
        return x * last[0]

    return Case("a deque", f, lambda: list(last), "`last[1]`")


def attribute() -> Case:
    def body(self, x):
        self.calls += 1
        return self.linear(x) * self.calls

    module = Module(body)
    return Case("an attribute of a module", module, lambda: module.calls, "`self.calls`")


def class_of_an_object() -> Case:
    class Closed:
        def size(self):
            return 1.0

    class Open:
        def size(self):
            return 2.0

    door = Closed()

    def f(x):
        y = x * door.size()
        door.__class__ = Open if type(door) is Closed else Closed
        return y

    return Case("the class of an object", f, lambda: type(door).__name__, "`door.__class__`")


def class_of_a_module() -> Case:
    class Other(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x) * 2

    layer = torch.nn.Linear(3, 3)

    def f(x):
        y = layer(x)
        layer.__class__ = Other if type(layer) is torch.nn.Linear else torch.nn.Linear
        return y

    return Case("the class of a module", f, lambda: type(layer).__name__, "`layer.__class__`")


def attribute_of_a_method() -> Case:
    class Model:
        def __init__(self):
            self.steps = [0]

        def step(self, x):
            self.steps[0] += 1
            return x * self.steps[0]

    model = Model()
    return Case("an attribute behind a method", model.step, lambda: list(model.steps), "`self.steps[0]`")


def tensor_attribute() -> Case:
    def body(self, x):
        before = 0 if self.last is None else self.last
        self.last = x * 2
        return x + before

    module = Module(body)
    return Case("the last argument in a module", module, lambda: module.last, "`self.last`")


def rebound_buffer() -> Case:
    def body(self, x):
        self.table = self.table + x
        return self.table * 1

    module = Module(body)
    buffer = module.table
    return Case("a buffer, assigned", module, lambda: module.table is buffer, "`self.table`")


def rebound_constant() -> Case:
    def body(self, x):
        self.table = self.table + 1
        return x * self.table

    module = Module(body)
    return Case("a buffer that counts", module, lambda: module.table.tolist(), "`self.table`")


def inner_module() -> Case:
    def body(self, x):
        self.calls += 1
        return x

    outer = torch.nn.Sequential(torch.nn.Identity(), Module(body))
    return Case("an inner module", outer, lambda: outer[1].calls, "`self[1].calls`")


def class_attribute() -> Case:
    class Counter:
        made = 0

        def __call__(self, x):
            type(self).made += 1
            return x * Counter.made

    return Case("an attribute of a class", Counter(), lambda: Counter.made, "`Counter.made`")


def slot() -> Case:
    slotted = Slotted()

    def f(x):
        slotted.n += 1
        return x

    return Case("a slot", f, lambda: slotted.n, "`slotted.n`")


def attribute_of_a_function() -> Case:
    def f(x):
        f.calls = getattr(f, "calls", 0) + 1
        return x * f.calls

    return Case("an attribute of a function", f, lambda: hasattr(f, "calls"), "`f.calls`")


def default_argument() -> Case:
    def f(x, seen=[]):  # noqa: B006
        seen.append(1)
        return x * len(seen)

    return Case("a default argument", f, lambda: list(f.__defaults__[0]), "`seen`")


def user_dict() -> Case:
    counter = collections.UserDict(n=1)

    def f(x):
        counter["n"] += 1
        return x * counter["n"]

    return Case("a UserDict", f, lambda: dict(counter), '`counter.data["n"]`')


def queue_of_numbers() -> Case:
    numbers: Queue = Queue()
    for i in range(9):
        numbers.put(float(i))
    return Case("a queue.Queue", lambda x: x * numbers.get_nowait(), lambda: [*numbers.queue], "`numbers.queue`")


def context_variable() -> Case:
    variable = contextvars.ContextVar("variable", default=0)

    def f(x):
        variable.set(variable.get() + 1)
        return x * variable.get()

    return Case("a context variable that has its default", f, variable.get, "`variable`")


def order_of_a_dict() -> Case:
    scales = {"a": 1.0, "b": 2.0}

    def f(x):
        first = next(iter(scales))
        scales[first] = scales.pop(first)
        return x * scales[first]

    return Case("the order of a dict", f, lambda: [*scales], "`scales`")


def cache_of_arguments() -> Case:
    cache: dict[str, Any] = {}

    def f(x):
        if "x" not in cache:
            cache["x"] = x * 2
        return x + cache["x"]

    return Case("a cache of an argument", f, lambda: dict(cache), '`cache["x"]`')


def gradient() -> Case:
    weight = torch.nn.Parameter(torch.ones(3))

    def f(x):
        loss = (weight * x).sum()
        loss.backward()
        return loss.detach()

    return Case("a gradient", f, lambda: weight.grad, "`weight.grad`")


def array() -> Case:
    counts = np.zeros(2)

    def f(x):
        counts[0] += 1
        return x * float(counts[0])

    return Case("a NumPy array", f, lambda: counts.tolist(), "`counts`")


def array_of_c_that_grows() -> Case:
    numbers = arrays_of_c.array("d", [1.0])

    def f(x):
        numbers.append(2.0)
        return x * len(numbers)

    return Case("array.array that grows", f, lambda: list(numbers), "`numbers`")


def structure() -> Case:
    class Counter(ctypes.Structure):
        _fields_ = (("n", ctypes.c_int),)

    counter = Counter(1)

    def f(x):
        counter.n += 1
        return x * counter.n

    return Case("ctypes.Structure", f, lambda: counter.n, "`counter`")


def array_through_torch() -> Case:
    counts = np.zeros(3, np.float32)

    def f(x):
        torch.from_numpy(counts)[:2].add_(1)
        return x * 2

    return Case("a NumPy array, through torch", f, lambda: counts.tolist(), "`counts`")


def values_through_torch() -> Case:
    last = np.zeros(3, np.float32)

    def f(x):
        torch.as_tensor(last).copy_(x)
        return x * 2

    return Case("a NumPy array, by values", f, lambda: last.tolist(), "`last`")


def points() -> Case:
    engine = torch.quasirandom.SobolEngine(1)
    return Case(
        "torch's SobolEngine", lambda x: x * engine.draw()[0], lambda: engine.num_generated, "`engine.num_generated`"
    )


CASES = [
    *(counting, nonlocal_variable, global_variable, of_another_module, by_helpers, growing_list, list_of_tensors),
    *(set_of_numbers, queue, attribute, attribute_of_a_method, tensor_attribute, rebound_buffer, rebound_constant),
    *(class_of_an_object, class_of_a_module),
    *(
        inner_module,
        class_attribute,
        slot,
        attribute_of_a_function,
        default_argument,
        user_dict,
        queue_of_numbers,
        context_variable,
        order_of_a_dict,
        cache_of_arguments,
        gradient,
        array,
        array_of_c_that_grows,
        structure,
        array_through_torch,
        values_through_torch,
        points,
    ),
    memory(lambda: arrays_of_c.array("d", [1.0]), "array.array"),
    memory(lambda: (ctypes.c_double * 2)(1, 2), "an array of ctypes"),
    memory(lambda: mmap.mmap(-1, 8), "mmap"),
    array_of(3),
    array_of(10_000),
    sparse(lambda: scipy.sparse.csr_matrix(np.eye(2)), "`matrix.data`"),
    sparse(lambda: scipy.sparse.lil_matrix((2, 2)), "`matrix.data[0]`"),
    sparse(lambda: scipy.sparse.dok_matrix((2, 2)), "`matrix._dict"),
    iterator(lambda: iter([1, 2, 3]), "an iterator over a list"),
    iterator(lambda: iter({1: 0, 2: 0, 3: 0}), "an iterator over a dict"),
    iterator(lambda: itertools.count(1), "itertools.count"),
    iterator(lambda: itertools.cycle([1, 2, 3]), "itertools.cycle"),
    iterator(lambda: map(float, [1, 2, 3]), "map"),
    iterator(lambda: itertools.tee([1, 2, 3])[0], "itertools.tee"),
    iterator(lambda: iter([3, 2, 1].pop, 0), "iter(callable, sentinel)"),
    iterator(lambda: iter(np.arange(1.0, 4.0)), "an iterator over an array"),
    own_generator(lambda: random.Random(0), lambda source: source.random(), "random.Random"),
    own_generator(lambda: np.random.default_rng(0), lambda source: source.random(), "numpy.random.Generator"),
    own_generator(
        lambda: np.random.PCG64(0), lambda source: source.random_raw() / 2.0**64, "numpy.random.BitGenerator"
    ),
]
