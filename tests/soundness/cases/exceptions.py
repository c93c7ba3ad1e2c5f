"""Exceptions that only tracing or only running raises, and functions that catch them."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ._case import V, case


@case("exceptions", "xla")
def swallowed_exception(run):
    def f(v):
        try:
            s = float(v.sum())
        except Exception:  # noqa: BLE001 - as users write it
            s = 0.0
        return v * s

    yield run(run.wrap(f), V)


@case("exceptions", "xla")
def swallowed_exception_of_item(run):
    def f(v):
        try:
            n = v[0].item()
        except (RuntimeError, TypeError, ValueError):
            n = -1
        return v + n

    yield run(run.wrap(f), V)


@case("exceptions", "xla")
def caught_error_of_linear_algebra(run):
    def f(m):
        try:
            return torch.linalg.inv(m)
        except torch.linalg.LinAlgError:
            return m * 0 - 1

    f = run.wrap(f)
    yield run(f, torch.eye(2) * 2)
    yield run(f, torch.ones(2, 2))


@case("exceptions", "xla")
def caught_error_of_a_second_factorization(run):
    def f(m):
        y = torch.linalg.inv(m)
        for _ in range(3):
            try:
                return torch.linalg.cholesky(m) + y
            except RuntimeError:
                m = m + torch.eye(2)
        return y

    f = run.wrap(f)
    yield run(f, torch.eye(2) * 2)
    yield run(f, torch.eye(2) * -0.5)


@case("exceptions", "xla")
def last_attempt_of_a_loop_raises(run):
    def f(m):
        jitter = 0.0
        for attempt in range(4):
            try:
                return torch.linalg.cholesky(m + jitter * torch.eye(2))
            except torch.linalg.LinAlgError:
                if attempt == 3:
                    raise
                jitter = 10.0 ** (attempt - 3)
        raise AssertionError("the last attempt returns or raises")

    f = run.wrap(f)
    yield run(f, torch.eye(2) * 2)
    yield run(f, torch.ones(2, 2))
    yield run(f, torch.zeros(2, 2))


@case("exceptions", "xla")
def one_line_outside_and_inside_a_handler(run):
    def inverse(m):
        return torch.linalg.inv(m)

    def f(m):
        with torch.no_grad():
            y = inverse(m + torch.eye(2))
        try:
            return inverse(m) + y
        except RuntimeError:
            return y

    f = run.wrap(f)
    yield run(f, torch.eye(2) * 2)
    yield run(f, torch.ones(2, 2))


@case("exceptions", "xla")
def caught_after_many_others(run):
    def f(m):
        i = m[0, 0].long()
        with torch.no_grad():
            y = m[i]
            y = y + m[i]
            y = y + m[i]
            y = y + m[i]
            y = y + m[i]
            y = y + m[i]
            y = y + m[i]
            y = y + m[i]
            y = y + m[i]
        try:
            return torch.linalg.inv(m) + y
        except RuntimeError:
            return m * y

    f = run.wrap(f)
    yield run(f, torch.eye(2))
    yield run(f, torch.ones(2, 2))


@case("exceptions", "xla")
def caught_index_error(run):
    table = torch.arange(6.0).reshape(3, 2)

    def f(i):
        try:
            return F.embedding(i, table)
        except IndexError:
            return torch.zeros(2, 2)

    f = run.wrap(f)
    yield run(f, torch.tensor([0, 2]))
    yield run(f, torch.tensor([0, 5]))


@case("exceptions")
def error_that_nobody_catches(run):
    def f(m):
        try:
            return torch.linalg.inv(m).sum(0)
        finally:
            state["calls"] = 0

    state = {"calls": 0}
    yield run(run.wrap(f), torch.eye(2) * 2)


@case("exceptions", "xla")
def check_before_a_caught_error(run):
    def f(m):
        if m.isnan().any():
            raise ValueError("no numbers")
        try:
            return torch.linalg.inv(m)
        except torch.linalg.LinAlgError:
            return m * 0 - 1

    f = run.wrap(f)
    yield run(f, torch.eye(2) * 2)
    yield run(f, torch.ones(2, 2))


@case("exceptions", "xla")
def error_caught_on_one_of_two_ways(run):
    def f(m):
        if m.sum() > 100:
            return m * 2
        try:
            return torch.linalg.inv(m)
        except torch.linalg.LinAlgError:
            return m * 0 - 1

    f = run.wrap(f)
    yield run(f, torch.eye(2) * 2)
    yield run(f, torch.ones(2, 2))
    yield run(f, torch.ones(2, 2) * 100)


@case("exceptions", "xla")
def check_before_an_assignment_to_data(run):
    def f(v):
        if v.isnan().any():
            raise ValueError("no numbers")
        w = v.clone()
        w.data = v * 5
        return w

    yield run(run.wrap(f), V)
