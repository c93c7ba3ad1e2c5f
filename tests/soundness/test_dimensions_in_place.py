"""Tensors whose dimensions change in place while views of them exist: a trace would recompute the views wrongly."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np
import pytest
import torch

import jtbridge
from jtbridge.errors import TranslationError

pytestmark = [
    pytest.mark.filterwarnings("ignore::jtbridge.errors.CalledWarning"),
    pytest.mark.filterwarnings("ignore::jtbridge.errors.SequentialVmapWarning"),
    pytest.mark.usefixtures("x64"),
]

X = np.sin(np.arange(9.0)).reshape(3, 3)
WEIGHT = torch.arange(9.0, dtype=torch.float64).reshape(3, 3)


def transposed(y: torch.Tensor) -> torch.Tensor:
    view = y.mT
    y.t_()
    return view * WEIGHT


def written_before(y: torch.Tensor) -> torch.Tensor:
    view = y.mT
    y.mul_(-0.3)
    y.t_()
    return view * view * WEIGHT


def written_after(y: torch.Tensor) -> torch.Tensor:
    view = y[0]
    y.t_()
    y.mul_(2)
    return view * view * WEIGHT


def written_through_the_view(y: torch.Tensor) -> torch.Tensor:
    view = y[0]
    y.transpose_(0, 1)
    view.mul_(3)
    return y * WEIGHT


def given_a_dimension(y: torch.Tensor) -> torch.Tensor:
    view = y[1:].sin_()
    y.unsqueeze_(0)
    return (view[:, None] * WEIGHT).sum(1)


def view_of_a_view(y: torch.Tensor) -> torch.Tensor:
    row = y.mT[0]
    y.swapaxes_(0, 1)
    return row * WEIGHT


def view_alone(y: torch.Tensor) -> torch.Tensor:
    view = y[0]
    view.unsqueeze_(0)
    y.mul_(3)
    return view * WEIGHT


def without_views(y: torch.Tensor) -> torch.Tensor:
    y.t_()
    y[0].mul_(2)
    return y * WEIGHT


def view_without_gradients(y: torch.Tensor) -> torch.Tensor:
    view = y.reshape(9).view(3, 3)
    with torch.no_grad():
        view.swapaxes_(0, -1)
    return view * WEIGHT


REFUSED_FOR_DERIVATIVES = [
    transposed,
    written_before,
    written_after,
    written_through_the_view,
    given_a_dimension,
    view_of_a_view,
    view_without_gradients,
]
TRANSLATED = [view_alone, without_views]


def on_a_copy(fn: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: fn(x * 1.0)


def by_differences(fn: Callable[[torch.Tensor], torch.Tensor]) -> np.ndarray:
    steps = 1e-5 * torch.eye(9, dtype=torch.float64).reshape(9, 3, 3)
    x = torch.from_numpy(X)
    columns = [(fn(x + step) - fn(x - step)) / 2e-5 for step in steps]
    return torch.stack(columns, -1).reshape(*columns[0].shape, 3, 3).numpy()


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("by", ["auto", "dlpack", "callback"])
@pytest.mark.parametrize("transform", [jax.jacrev, jax.jacfwd])
@pytest.mark.parametrize("change", REFUSED_FOR_DERIVATIVES + TRANSLATED)
def test_derivatives(change: Callable, transform: Callable, by: str, jitted: bool):
    fn = on_a_copy(change)
    jacobian = transform(jtbridge.wrap(fn, backend=by))
    found = (jax.jit(jacobian) if jitted else jacobian)(X)
    np.testing.assert_allclose(found, by_differences(fn), atol=1e-7)


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("change", REFUSED_FOR_DERIVATIVES + TRANSLATED)
def test_derivatives_of_rows(change: Callable, jitted: bool):
    fn = on_a_copy(change)
    jacobians = jax.vmap(jax.jacrev(jtbridge.wrap(fn)))
    found = (jax.jit(jacobians) if jitted else jacobians)(X[None])
    np.testing.assert_allclose(found[0], by_differences(fn), atol=1e-7)


@pytest.mark.parametrize("change", REFUSED_FOR_DERIVATIVES + TRANSLATED)
def test_values_are_translated(change: Callable):
    fn = on_a_copy(change)
    found = jax.jit(jtbridge.wrap(fn, backend="xla"))(X)
    np.testing.assert_allclose(found, fn(torch.from_numpy(X)), rtol=1e-12)


@pytest.mark.parametrize("transform", [jax.jacrev, jax.jacfwd])
@pytest.mark.parametrize("change", REFUSED_FOR_DERIVATIVES)
def test_a_traced_derivative_is_refused(change: Callable, transform: Callable):
    f = jtbridge.wrap(on_a_copy(change), backend="xla")
    with pytest.raises(TranslationError, match=r"it changes the dimensions of a (tensor|view) in place"):
        jax.jit(transform(f))(X)


@pytest.mark.parametrize("transform", [jax.jacrev, jax.jacfwd])
@pytest.mark.parametrize("change", TRANSLATED)
def test_a_traced_derivative(change: Callable, transform: Callable):
    fn = on_a_copy(change)
    found = jax.jit(transform(jtbridge.wrap(fn, backend="xla")))(X)
    np.testing.assert_allclose(found, by_differences(fn), atol=1e-7)
