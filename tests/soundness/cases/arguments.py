"""Arguments: their order, their static parts, and arrays that share memory or have strides."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import torch

from ._case import V, case


@case("arguments")
def order_of_a_dict_argument(run):
    f = run.wrap(lambda d: torch.cat(list(d.values())))
    yield run(f, {"b": V, "a": V * 10, "c": V * 100})


@case("arguments")
def order_of_keywords(run):
    f = run.wrap(lambda **d: torch.cat(list(d.values())))
    yield run(f, z=V, a=V * 10)


@case("arguments")
def order_of_keys_after_another_order(run):
    f = run.wrap(lambda d: torch.cat([d[k] * i for i, k in enumerate(d)]))
    yield run(f, {"a": V, "b": V * 10})
    yield run(f, {"b": V * 10, "a": V})


@case("arguments")
def ordered_dict_moved_to_end(run):
    f = run.wrap(lambda d: torch.cat(list(d.values())))
    yield run(f, dict(collections.OrderedDict(z=V, b=V * 2)))


@dataclasses.dataclass(frozen=True)
class Options:
    """A static argument whose values compare equal with different types."""

    scale: Any


@case("arguments")
def static_argument_by_type(run):
    f = run.wrap(lambda v, n: v * 2 if isinstance(n, bool) else v * 3 if isinstance(n, int) else v * 5)
    for n in (1, 1.0, True):
        yield run(lambda v, n=n: f(v, n), V)


@case("arguments")
def static_dataclass_by_type(run):
    f = run.wrap(lambda v, o: v * (2 if isinstance(o.scale, bool) else 3 if isinstance(o.scale, int) else 5))
    for n in (1, 1.0, True):
        yield run(lambda v, n=n: f(v, Options(n)), V)


@case("arguments")
def static_tuple_by_type(run):
    f = run.wrap(lambda v, o: v * (2 if isinstance(o[0], bool) else 3 if isinstance(o[0], int) else 5))
    for n in (1, 1.0, True):
        yield run(lambda v, n=n: f(v, (n, "x")), V)


@case("arguments")
def static_minus_zero(run):
    f = run.wrap(lambda v, n: v / torch.tensor(n))
    for n in (0.0, -0.0):
        yield run(lambda v, n=n: f(v, n), V)


@case("arguments")
def one_array_as_two_arguments(run):
    def f(a, b):
        a.add_(1)
        return a * b

    def twice(v):
        return g(v, v * 1)

    g = run.wrap(f)
    yield run(twice, V)


@case("arguments")
def result_is_an_argument(run):
    f = run.wrap(lambda v: (v, v.view(2, 2), v))
    yield run(f, V)


@case("arguments")
def expanded_and_strided_arguments(run):
    f = run.wrap(lambda m: torch.as_strided(m, (2, 2), (1, 2)))
    yield run(f, torch.arange(6.0).reshape(2, 3))


@case("arguments")
def contiguity_is_torch_s(run):
    yield run(run.wrap(lambda m: m * 2 if m.T.is_contiguous() else m * 3), torch.arange(6.0).reshape(2, 3))
