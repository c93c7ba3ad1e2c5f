"""State written by hooks that a function reaches only through torch: hooks of tensors, all modules and optimizers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

import jtbridge

X = jnp.ones((2, 3))
Undo = Callable[[], None]


def of_a_tensor(n: list[int]) -> tuple[Callable, Undo]:
    w = torch.ones(3, requires_grad=True)

    def hook(grad: torch.Tensor) -> torch.Tensor:
        n[0] += 1
        return grad * n[0]

    return lambda x: torch.autograd.grad((x * w).sum(), w)[0].sum(), w.register_hook(hook).remove


def after_accumulation(n: list[int]) -> tuple[Callable, Undo]:
    w = torch.ones(3, requires_grad=True)

    def hook(param: torch.Tensor) -> None:
        n[0] += 1
        param.grad *= n[0]

    def fn(x: torch.Tensor) -> torch.Tensor:
        w.grad = None
        (x * w).sum().backward()
        assert w.grad is not None
        return w.grad.sum()

    return fn, w.register_post_accumulate_grad_hook(hook).remove


def of_several_tensors(n: list[int]) -> tuple[Callable, Undo]:
    w = torch.ones(3, requires_grad=True)

    def hook(grads: object) -> None:
        n[0] += 1

    def fn(x: torch.Tensor) -> torch.Tensor:
        (x * w).sum().backward()
        w.grad = None
        return x.sum() + n[0]

    return fn, torch.autograd.graph.register_multi_grad_hook([w], hook).remove


def of_all_modules(n: list[int]) -> tuple[Callable, Undo]:
    net = torch.nn.Linear(3, 3)

    def hook(module: object, inputs: object, output: torch.Tensor) -> torch.Tensor:
        n[0] += 1
        return output * 0 + n[0]

    undo = torch.nn.modules.module.register_module_forward_hook(hook).remove
    return lambda x: net(x).sum().detach(), undo


def of_saved_tensors(n: list[int]) -> tuple[Callable, Undo]:
    w = torch.ones(3, requires_grad=True)

    def unpack(x: torch.Tensor) -> torch.Tensor:
        n[0] += 1
        return x * n[0]

    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: x, unpack)

    def fn(x: torch.Tensor) -> torch.Tensor:
        with hooks:
            y = (x * w * w).sum()
        return torch.autograd.grad(y, w)[0].sum()

    return fn, lambda: None


def of_all_optimizers(n: list[int]) -> tuple[Callable, Undo]:
    w = torch.ones(3, requires_grad=True)
    optimizer = torch.optim.SGD([w], lr=0.1)

    def hook(optimizer: object, args: object, kwargs: object) -> None:
        n[0] += 1

    def fn(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        (x * w).sum().backward()
        optimizer.step()
        return w.detach().sum() + n[0]

    return fn, register_optimizer_step_post_hook(hook).remove


HOOKS = [of_a_tensor, after_accumulation, of_several_tensors, of_all_modules, of_saved_tensors, of_all_optimizers]


@contextlib.contextmanager
def hooked(make: Callable) -> Iterator[tuple[Callable, list[int]]]:
    n = [0]
    torch.manual_seed(0)
    fn, undo = make(n)
    try:
        yield fn, n
    finally:
        undo()


@pytest.mark.parametrize("make", HOOKS)
def test_ordered_function_matches_results_of_torch_in_sequence(make: Callable):
    with hooked(make) as (fn, n):
        want = [float(fn(torch.ones(2, 3))) for _ in range(3)], n[0]
    with hooked(make) as (fn, n):
        f = jax.jit(jtbridge.wrap(fn, effects="ordered"))
        assert ([float(f(X)) for _ in range(3)], n[0]) == want


@pytest.mark.parametrize("make", HOOKS)
def test_a_function_without_effects_is_refused(make: Callable):
    with hooked(make) as (fn, n):
        with pytest.raises(jtbridge.errors.MutationError, match=r"n\[0\]|writes to"):
            jax.jit(jtbridge.wrap(fn))(X)
        assert n == [0]


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_an_optimizer_steps_in_the_backward(optimizer: type):
    def training_step() -> Callable:
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
        options = {"momentum": 0.9} if optimizer is torch.optim.SGD else {}
        optimizers = {param: optimizer([param], lr=0.1, **options) for param in net.parameters()}

        def hook(param: torch.Tensor) -> None:
            optimizers[param].step()
            optimizers[param].zero_grad()

        for param in net.parameters():
            param.register_post_accumulate_grad_hook(hook)

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = net(x).square().mean()
            loss.backward()
            return loss.detach()

        return step

    step = training_step()
    want = [float(step(torch.ones(2, 3))) for _ in range(4)]
    f = jax.jit(jtbridge.wrap(training_step(), effects="ordered"))
    assert [float(f(X)) for _ in range(4)] == pytest.approx(want, rel=1e-5)


def test_ordered_step_with_dropout_uses_the_torch_generator():
    def training_step() -> Callable:
        torch.manual_seed(0)
        net = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = torch.nn.functional.dropout(net(x)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    step = training_step()
    torch.manual_seed(1)
    want = [float(step(torch.ones(2, 3))) for _ in range(4)]
    f = jax.jit(jtbridge.wrap(training_step(), effects="ordered"))
    torch.manual_seed(1)
    assert [float(f(X)) for _ in range(4)] == pytest.approx(want, rel=1e-5)


def test_a_custom_operator_of_an_ordered_function_may_draw():
    @torch.library.custom_op("jtbridge_test_hooks::noisy", mutates_args=())
    def noisy(x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand(x.shape)

    noisy.register_fake(torch.empty_like)
    f = jax.jit(jtbridge.wrap(noisy, effects="ordered"))
    torch.manual_seed(0)
    want = noisy(torch.ones(2, 3))
    torch.manual_seed(0)
    assert f(X).tolist() == want.tolist()
