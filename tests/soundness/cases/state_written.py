"""State that is written: torch's result, or a refusal under a trace."""

from __future__ import annotations

import contextvars
import itertools
import os
import random
import threading
import types
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import jtbridge

from ._case import ROWS, V, case


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


def three_calls_in_a_module(run, source):
    """Call the function `f` of a module with this source three times."""
    module = types.ModuleType("counting")
    exec(source, module.__dict__)
    f = run.wrap(module.f)
    for _ in range(3):
        yield run(f, V)


@case("state written", "jit")
def counter_in_a_global(run):
    return three_calls_in_a_module(run, "N = 0\ndef f(v):\n    global N\n    N += 1\n    return v * N")


@case("state written", "jit")
def counter_in_globals(run):
    return three_calls_in_a_module(run, "def f(v):\n    globals()['N'] = globals().get('N', 0) + 1\n    return v * N")


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
        # The state is as before, or as torch leaves it, and never holds an object of the tracer.
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


@case("state written", "jit")
def context_variable_counted(run):
    count = contextvars.ContextVar("count", default=0)

    def f(v):
        count.set(count.get() + 1)
        return v * count.get()

    for _ in range(3):
        yield run(run.wrap(f), V)
    yield torch.tensor(count.get())


@case("state written", "jit")
def attribute_of_a_thread_counted(run):
    local = threading.local()
    local.count = 0

    def f(v):
        local.count += 1
        return v * local.count

    for _ in range(3):
        yield run(run.wrap(f), V)
    yield torch.tensor(local.count)


@case("state written", "jit")
def environment_counted(run):
    os.environ["JTBRIDGE_COUNT"] = "0"

    def f(v):
        os.environ["JTBRIDGE_COUNT"] = str(int(os.environ["JTBRIDGE_COUNT"]) + 1)
        return v * int(os.environ["JTBRIDGE_COUNT"])

    for _ in range(3):
        yield run(run.wrap(f), V)
    yield torch.tensor(int(os.environ.pop("JTBRIDGE_COUNT")))
