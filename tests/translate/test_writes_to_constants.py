"""Functions that write to tensors which they computed from closed-over tensors alone are translated."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jtbridge

X = np.array([[1, 2], [3, 4]], np.float32)
A, B = torch.arange(6.0).reshape(2, 3), torch.ones(3, 2)


def added(x):
    h = A @ B
    h += x
    return h, h.sum()


def row_of_copy(x):
    h = A.clone()
    h[0].add_(x[0].sum())
    return h


def column(x):
    h = torch.relu(A)
    h[:, 0] = x[0]
    return h


def view(x):
    h = A @ B
    h.t().mul_(x)
    h.view(4)[1] = 3.0
    return h


def one_of_two_results(x):
    values, places = torch.sort(A @ B)
    values += x
    return values, places


def one_of_two_views(x):
    h = A @ B
    first, second = h[:1], h[1:]
    second += x[:1]
    return first, second


def by_a_constant_first(x):
    h = A @ B
    h += h
    copy = h * 1
    h += x
    copy[0] = h[1]
    return h, copy, A @ B


FUNCTIONS = [added, row_of_copy, column, view, one_of_two_results, one_of_two_views, by_a_constant_first]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_results_match_torch(function):
    want = jax.tree.map(np.asarray, function(torch.from_numpy(X)))
    translated = jtbridge.wrap(function, backend="xla")
    jax.tree.map(np.testing.assert_array_equal, jax.jit(translated)(X), want)
    np.testing.assert_array_equal(A, np.arange(6.0).reshape(2, 3))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_gradients_match_torch(function):
    def loss(x):
        return sum((y**2).sum() for y in jax.tree.leaves(function(x)))

    x = torch.from_numpy(X).requires_grad_()
    (want,) = torch.autograd.grad(loss(x), x)
    gradient = jax.grad(jtbridge.wrap(loss, backend="xla"))
    np.testing.assert_array_equal(jax.jit(gradient)(jnp.asarray(X)), want)


def accumulated(x):
    total = torch.tensor(0.0)
    for row in x:
        total += row.sum()
    return total


def assigned(x):
    values = torch.tensor([1.0, 2.0, 3.0])
    values[0] = x.sum()
    return values.mul_(torch.as_tensor([1.0, 10.0, 100.0]))


@pytest.mark.parametrize("fn", [accumulated, assigned])
def test_a_literal_is_written_to_in_place(fn):
    f = jax.jit(jtbridge.wrap(fn))  # a function that is called warns, which is an error here
    for x in (torch.ones(2, 3), torch.arange(6.0).view(2, 3)):
        np.testing.assert_array_equal(f(x.numpy()), fn(x))
