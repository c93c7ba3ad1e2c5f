"""Constants that a function creates or closes over."""

from __future__ import annotations

import torch

from ._case import V, case


@case("constants")
def sign_of_a_zero_constant(run):
    zeros = torch.tensor([0.0, -0.0, 0.0, -0.0])
    yield run(run.wrap(lambda v: v / zeros), V)


@case("constants")
def two_constants_that_compare_equal(run):
    a, b = torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0])
    yield run(run.wrap(lambda v: torch.stack([v[:2] / a, v[:2] / b])), V)


@case("constants")
def number_minus_zero(run):
    yield run(run.wrap(lambda v: torch.full_like(v, -0.0) * 1), V)
    yield run(run.wrap(lambda v: 1 / (v * -0.0)), V)


@case("constants")
def nan_constant(run):
    a = torch.tensor([float("nan"), 1.0, float("inf"), -float("inf")])
    yield run(run.wrap(lambda v: v * a), V)


@case("constants")
def result_is_a_constant(run):
    w = torch.ones(4)
    f = run.wrap(lambda v: (w, v))
    first = run(f, V)
    yield first
    w.mul_(3)
    yield first if not run.is_torch else (torch.ones(4), V)  # JAX arrays never change


@case("constants")
def result_that_torch_keeps_and_writes(run):
    kept: list[torch.Tensor] = []

    def f(v):
        y = v * 2
        if not kept:
            return y
        return y + 1

    g = run.wrap(f)
    yield run(g, V)
