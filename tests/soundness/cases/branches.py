"""Branches and loops on values, and values that leave torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from ._case import CASES, Case, V, case


@case("branches")
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
    "number that is compared": lambda v: v.sum().item() > 5,
    "number compared with one that float32 does not have": lambda v: v[0].item() > 0.1,
    "integer that is compared": lambda v: 1 <= v.argmax().item() < 2.5,
    "two numbers that are compared": lambda v: v[0].item() >= v[1].item() or v[2].item() == 0,
    "truth of a number that is read": lambda v: v.argmax().item(),
    "two conditions": lambda v: v.sum() > 5 and not v[0] < 0,
}


def _branches(name: str, condition: Callable[[torch.Tensor], Any]) -> None:
    """Add a case for a condition in an ``if``, with values for both branches."""

    def script(run: Any) -> Iterator[Any]:
        f = run.wrap(lambda v: v * 2 if condition(v) else v.sin())
        for v in (V, -V, torch.tensor([0.0, 3.0, 0.0, torch.nan])):
            yield run(f, v)
            yield run.grad(f, v)
        yield run.vmap(f, torch.stack([V, -V, V + 1]))
        yield run.jacfwd(f, V)

    CASES.append(Case(f"branch by {name}", "branches", script))


for _name, _condition in _CONDITIONS.items():
    _branches(_name, _condition)


@case("branches")
def truth_that_is_returned(run):
    f = run.wrap(lambda v: torch.tensor(torch.equal(v, V)) & torch.tensor(3 in v))
    yield run(f, V)
    yield run(f, -V)


@case("branches")
def branch_that_writes(run):
    def f(v):
        if v[0] > 0:
            v.mul_(3)
        return v + 1

    f = run.wrap(f)
    yield run(f, V)
    yield run(f, -V)


@case("branches", "xla")
def branch_to_another_dtype(run):
    f = run.wrap(lambda v: (v.int() if v[0] > 0 else v.long()).float())
    yield run(f, V)
    g = run.wrap(lambda v: v.sum() if v[0] > 0 else v.sum().reshape(1)[0])
    yield run(g, -V)


@case("branches", "xla")
def many_branches(run):
    def f(v):
        for limit in range(6):
            if v.sum() < limit:
                return v + limit
        return v

    f = run.wrap(f)
    yield run(f, V)
    yield run(f, V / 3)


@case("branches", "xla")
def loop_on_data(run):
    def f(v):
        while v.sum() < 100:
            v = v * 2 + 1
        return v

    yield run(run.wrap(f), V)


@case("branches", "xla")
def loop_on_data_that_never_ends_for_zeros(run):
    def f(v):
        while v.sum() < 100:
            v = v * 2
        return v

    yield run(run.wrap(f), V)


@case("branches", "jit")
def loop_on_a_numpy_view_that_never_ends_for_examples(run):
    def f(v):
        while v.numpy()[0] != 10:
            v = v * 1
        return v

    yield run(run.wrap(f), V * 10)


@case("branches", "jit")
def loop_on_an_array_that_never_ends_for_examples(run):
    def f(v):
        while np.asarray(v)[0] != 10 or v.tolist()[0] != 10:
            pass
        return v

    yield run(run.wrap(f), V * 10)


@case("branches", "jit")
def loop_on_data_that_never_ends_for_examples(run):
    def f(v):
        while float(v[0]) != 10:
            v = v * 1
        return v

    yield run(run.wrap(f), V * 10)


@case("branches", "xla")
def numpy_inside(run):
    yield run(run.wrap(lambda v: torch.from_numpy(np.sort(v.numpy())[::-1].copy())), V)


@case("branches", "xla")
def tolist_inside(run):
    yield run(run.wrap(lambda v: torch.tensor([x * 2 for x in v.tolist()])), V)
