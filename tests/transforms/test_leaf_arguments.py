"""To a function whose derivative is taken, its arguments are leaves of torch's graph, eagerly and under jit."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jtbridge
from jtbridge.errors import DifferentiationError

X = jnp.arange(1.0, 4.0)


def by_backward(x: torch.Tensor) -> torch.Tensor:
    x.requires_grad_()
    (x**3).sum().backward(create_graph=True)
    return x.grad


def by_backward_twice(x: torch.Tensor) -> torch.Tensor:
    x.requires_grad = True
    for _ in range(2):
        (x**2).sum().backward(inputs=[x], create_graph=True)
    first, x.grad = x.grad, None
    torch.autograd.backward((x**3).sum(), create_graph=True)
    second = x.grad
    del x.grad
    return first * second if x.grad is None else x


def with_set_attribute(x: torch.Tensor) -> torch.Tensor:
    x.requires_grad = True
    return torch.autograd.grad((x**3).sum(), x, create_graph=True)[0]


def with_is_leaf(x: torch.Tensor) -> torch.Tensor:
    return x * (3.0 if x.requires_grad_().is_leaf else 5.0)


def without_gradient(x: torch.Tensor) -> torch.Tensor:
    y = x.requires_grad_(False) * 2
    return y.exp()


FUNCTIONS = [by_backward, by_backward_twice, with_set_attribute, with_is_leaf, without_gradient]


def torch_gradient(fn: Callable) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.arange(1.0, 4.0, requires_grad=True)
    y = fn(x)
    if not y.requires_grad:
        return y, torch.zeros(3)
    return y.detach(), torch.autograd.grad(y.sum(), x)[0]


@pytest.fixture(autouse=True)
def without_warning_of_cycles():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Using backward\\(\\) with create_graph=True")
        yield


@pytest.mark.parametrize("size", [3, 3_000_000])
@pytest.mark.parametrize("wrapper", [lambda f: f, jax.jit])
@pytest.mark.parametrize("fn", FUNCTIONS)
def test_gradient(fn: Callable, wrapper: Callable, size: int):
    value, gradient = torch_gradient(fn)
    x = jnp.resize(X, size)
    f = jtbridge.wrap(fn)
    np.testing.assert_allclose(f(x)[:3], value, rtol=1e-6)
    np.testing.assert_allclose(wrapper(jax.grad(lambda x: f(x).sum()))(x)[:3], gradient, rtol=1e-6)
    if size == 3:
        out, tangent = wrapper(lambda x: jax.jvp(f, (x,), (jnp.ones(3),)))(x)
        np.testing.assert_allclose(out, value, rtol=1e-6)
        np.testing.assert_allclose(tangent, gradient, rtol=1e-6)


@pytest.mark.filterwarnings("ignore::jtbridge.errors.SequentialVmapWarning")
@pytest.mark.parametrize("fn", FUNCTIONS)
def test_gradients_of_rows(fn: Callable):
    _, gradient = torch_gradient(fn)
    f = jtbridge.wrap(fn)
    by_rows = jax.vmap(jax.grad(lambda x: f(x).sum()))(jnp.stack([X, X]))
    np.testing.assert_allclose(by_rows, np.stack([gradient, gradient]), rtol=1e-6)
    of_rows = jax.grad(lambda x: jax.vmap(f)(x).sum())(jnp.stack([X, X]))
    np.testing.assert_allclose(of_rows, np.stack([gradient, gradient]), rtol=1e-6)


@pytest.mark.filterwarnings("ignore::jtbridge.errors.SequentialVmapWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_second_derivative_through_backward():
    f = jtbridge.wrap(by_backward)
    for hessian in (jax.hessian, lambda f: jax.jit(jax.hessian(f))):
        np.testing.assert_allclose(hessian(lambda x: f(x).sum())(X), 6 * np.eye(3), rtol=1e-6)


@pytest.mark.filterwarnings("ignore::jtbridge.errors.CalledWarning")
@pytest.mark.parametrize("wrapper", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_step_of_an_optimizer_on_an_argument(wrapper: Callable):
    def fn(x: torch.Tensor) -> torch.Tensor:
        optimizer = torch.optim.SGD([x.requires_grad_()], lr=0.1)
        (x**3).sum().backward()
        optimizer.step()
        return x**2

    value, gradient = torch_gradient(fn)
    f = jtbridge.wrap(fn)
    np.testing.assert_allclose(wrapper(f)(X), value, rtol=1e-6)
    np.testing.assert_allclose(wrapper(jax.grad(lambda x: f(x).sum()))(X), gradient, rtol=1e-6)


def test_gradients_that_a_module_reads():
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(3, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.linear(x).square().sum().backward(create_graph=True)
            return self.linear.weight.grad.sum() * (1.0 if self.linear.bias.is_leaf else 2.0)

    model = Model()
    net = jtbridge.module(model)
    params, state = net.init()
    expected = torch.autograd.grad(model(torch.arange(1.0, 4.0)), list(model.parameters()))
    for wrapper in (lambda f: f, jax.jit):
        found = wrapper(jax.grad(lambda params: net(params, state, X)[0]))(params)
        for name, gradient in zip(params, expected, strict=True):
            np.testing.assert_allclose(found[name], gradient, rtol=1e-5)


def test_switching_off_and_on_is_refused():
    def fn(x: torch.Tensor) -> torch.Tensor:
        y = x.requires_grad_(False) * 2
        return y * x.requires_grad_()

    with pytest.raises(DifferentiationError, match="to False and then to True"):
        jax.grad(lambda x: jtbridge.wrap(fn)(x).sum())(X)


def test_runs_leave_no_gradients_alive():
    """A gradient with a graph that a leaf of this graph refers to would never be freed."""
    import gc
    import weakref

    graphs = []

    def fn(x: torch.Tensor) -> torch.Tensor:
        gradient = by_backward(x)
        graphs.append(weakref.ref(gradient))
        return gradient

    f = jtbridge.wrap(fn)
    for _ in range(3):
        jax.grad(lambda x: f(x).sum())(X)
    gc.collect()
    assert len(graphs) == 3
    assert not any(graph() is not None for graph in graphs)


def by_graph(x: torch.Tensor) -> torch.Tensor:
    return (x**3).sum() * (2 if x.is_leaf else 1) * (10 if x.grad_fn is None else 1)


def of_leaf(x: torch.Tensor) -> torch.Tensor:
    y = x if x.is_leaf else x.detach()
    return (y**3).sum()


def first_of_rows(gradient: Callable, x: jax.Array) -> jax.Array:
    return gradient(jnp.stack([x, 2 * x]))[0]


FIRST: dict[str, Callable] = {
    "grad": jax.grad,
    "jit": lambda f: jax.jit(jax.grad(f)),
    "vmap": lambda f: lambda x: first_of_rows(jax.vmap(jax.grad(f)), x),
    "jit of vmap": lambda f: lambda x: first_of_rows(jax.jit(jax.vmap(jax.grad(f))), x),
    "grad of vmap": lambda f: lambda x: first_of_rows(jax.grad(lambda xs: jax.vmap(f)(xs).sum()), x),
    "jacfwd": jax.jacfwd,
}
SECOND: dict[str, Callable] = {
    "hessian": jax.hessian,
    "jit": lambda f: jax.jit(jax.hessian(f)),
    "reverse": lambda f: jax.jacrev(jax.jacrev(f)),
    "jit of reverse": lambda f: jax.jit(jax.jacrev(jax.jacrev(f))),
}


@pytest.mark.filterwarnings("ignore::jtbridge.errors.SequentialVmapWarning")
@pytest.mark.parametrize("backend", ["auto", "dlpack"])
@pytest.mark.parametrize("f", [by_graph, of_leaf])
def test_an_argument_has_no_grad_fn(f: Callable, backend: str):
    values = torch.tensor([1.0, 2.0], requires_grad=True)
    (first,) = torch.autograd.grad(f(values), values)
    factor = (f(values) / (values**3).sum()).item()
    second = factor * torch.diag(6 * values)
    wrapped, x = jtbridge.wrap(f, backend=backend), jnp.array([1.0, 2.0])
    for way in FIRST.values():
        assert way(wrapped)(x).tolist() == first.tolist()
    for way in SECOND.values():
        assert way(wrapped)(x).tolist() == second.tolist()
