"""Arithmetic where torch and JAX differ: integers, rounding, promotion, NaN."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ._case import ROWS, V, case


@case("arithmetic")
def equal_of_two_dtypes(run):
    f = run.wrap(lambda a, b: torch.tensor(torch.equal(a, b)))
    yield run(f, torch.tensor([1.0]), torch.tensor([1]))


@case("arithmetic")
def integer_division_and_remainder(run):
    n = torch.tensor([-7, 7, -7, 7])
    d = torch.tensor([2, -2, -2, 2])
    yield run(run.wrap(lambda a, b: [a // b, a % b, torch.fmod(a, b), torch.div(a, b, rounding_mode="trunc")]), n, d)


@case("arithmetic")
def integers_wrap_around(run):
    yield run(run.wrap(lambda a: a.to(torch.uint8) * 2), torch.tensor([200, 255, 3]))
    yield run(run.wrap(lambda a: (a.to(torch.int8) + 1).long()), torch.tensor([127, -128, 3]))


@case("arithmetic")
def rounding_to_even(run):
    yield run(run.wrap(torch.round), torch.tensor([0.5, 1.5, 2.5, -0.5]))


@case("arithmetic")
def promotion_of_numbers(run):
    i = torch.tensor([1, 2])
    yield run(run.wrap(lambda i: [i * 2.5, i / 2, i + True, i * torch.tensor(2.0), i**2]), i)


@case("arithmetic")
def nan_of_extrema(run):
    x = torch.tensor([1.0, float("nan"), 3.0])
    one = torch.ones(3)
    yield run(run.wrap(lambda x: [x.max(), x.argmax(), torch.fmax(x, one), x.sort().values, x.clamp(0, 2)]), x)


@case("arithmetic")
def nan_times_a_mask(run):
    x, mask = torch.tensor([float("nan"), float("inf"), -1.0, 5.0]), torch.tensor([False, False, False, True])
    yield run(run.wrap(lambda x, m: [x * m, (x * m.float()).sum(), 1 / (x[2:] * m[2:])]), x, mask)


@case("arithmetic")
def weighted_l1_loss(run):
    f = run.wrap(lambda x, w: F.l1_loss(x, torch.zeros(4), reduction="sum", weight=w))
    yield run(f, V, ROWS[0])
    yield run.grad(f, V, ROWS[0])
    yield run.vmap(f, ROWS, ROWS)
