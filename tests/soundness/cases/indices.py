"""Indices: out of range, negative, and views that they make."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ._case import ROWS, V, case


@case("indices")
def index_out_of_range(run):
    index = torch.tensor([0, 9])
    f = run.wrap(lambda v, i: v.gather(0, i))
    yield run.fails(f, V, index)


@case("indices")
def gather_of_a_negative_index(run):
    f = run.wrap(lambda v, i: v.gather(0, i))
    yield run.fails(f, V, torch.tensor([0, -1]))


@case("indices")
def scatter_of_a_negative_index(run):
    f = run.wrap(lambda v, i: v.scatter(0, i, torch.ones(2)))
    yield run.fails(f, V, torch.tensor([0, -1]))


@case("indices")
def index_select_of_a_negative_index(run):
    f = run.wrap(lambda v, i: v.index_select(0, i))
    yield run.fails(f, V, torch.tensor([0, -1]))


@case("indices")
def embedding_out_of_range(run):
    table = torch.randn(3, 2, generator=torch.Generator().manual_seed(0))
    yield run.fails(run.wrap(lambda i: F.embedding(i, table)), torch.tensor([0, 5]))


@case("indices")
def negative_index_where_torch_has_it(run):
    yield run(run.wrap(lambda v, i: v[i]), V, torch.tensor([0, -1]))


@case("indices")
def writes_that_overlap(run):
    def f(v):
        y = v.clone()
        a, b = y[:3], y[1:]
        a.mul_(2)
        b.add_(10)
        y.view(2, 2)[0] = y[2:].clone()
        return y, a * 1, b * 1

    yield run(run.wrap(f), V)


@case("indices", "xla")
def view_at_an_index_tensor_is_written(run):
    def f(v, i):
        y = v.clone()
        part = y[i]
        part += 100
        return y

    f = run.wrap(f)
    yield run(f, V, torch.tensor(2))
    yield run.vmap(f, torch.stack([V, V]), torch.tensor([1, 3]))


@case("indices", "xla")
def base_of_a_view_at_an_index_tensor_is_written(run):
    def f(v, i):
        y = v * 2
        part = y[i]
        y.fill_(7)
        return part * 1

    f = run.wrap(f)
    yield run(f, V, torch.tensor(2))
    yield run.vmap(f, torch.stack([V, V]), torch.tensor([1, 3]))


@case("indices")
def elements_at_index_tensors_are_replaced(run):
    def f(v, i):
        y = v.clone()
        for _ in range(2):
            y[i] = y[i] * 3 + y[i - 1]
        return y

    f = run.wrap(f)
    yield run(f, V, torch.tensor(2))
    yield run.vmap(f, torch.stack([V, V]), torch.tensor([1, 3]))


@case("indices", "xla")
def view_at_a_place_of_data_returned_after_a_write(run):
    def f(v):
        w = v * 1
        part = w[..., v.argmin()]
        w[0] = -1.0
        return part

    yield run(run.wrap(f), V)
    yield run.vmap(run.wrap(f), ROWS)


@case("indices")
def item_at_a_place_of_data_returned_before_a_write(run):
    def f(v):
        w = v * 1
        part = w[v.argmin()] * 2
        w[0] = -1.0
        return part + w

    yield run(run.wrap(f), V)
    yield run.vmap(run.wrap(f), ROWS)
