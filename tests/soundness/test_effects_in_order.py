"""Functions whose state must be kept: `effects="ordered"` keeps it, in the order of the calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jtbridge

X = jnp.asarray([1.0, 2.0, 4.0])


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
    "Adam": lambda ps: torch.optim.Adam(ps, lr=0.1),
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=0.1, foreach=True),
}


def training_step(optimizer: str) -> tuple[Callable[..., Any], torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    made = OPTIMIZERS[optimizer](model.parameters())

    def step(x):
        made.zero_grad()
        loss = (model(x) ** 2).sum()
        loss.backward()
        made.step()
        return loss.detach()

    return step, model, made


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("route", ["eager", "jit", "scan"])
def test_training_steps_in_order(optimizer, route):
    step, model, _ = training_step(optimizer)
    x = torch.tensor(np.asarray(X))
    want = [float(step(x)) for _ in range(5)]
    step, ours, made = training_step(optimizer)
    f = jtbridge.wrap(step, effects="ordered")
    if route == "scan":
        found = jax.jit(lambda x: jax.lax.scan(lambda x, _: (x, f(x)), x, None, length=5)[1])(X).tolist()
    else:
        run = jax.jit(f) if route == "jit" else f
        found = [float(run(X)) for _ in range(5)]
    jax.effects_barrier()
    np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-6)
    for parameter, other in zip(ours.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(parameter, other)
        assert type(parameter.grad) is torch.Tensor
        for value in made.state[parameter].values():
            assert value is None or type(value) in (torch.Tensor, int, float)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_tracing_a_training_step_leaves_no_effect(optimizer):
    step, model, made = training_step(optimizer)
    before = [p.detach().clone() for p in model.parameters()]
    jax.eval_shape(jtbridge.wrap(step, effects="ordered"), X)
    assert [p.grad for p in model.parameters()] == [None, None]
    assert len(made.state) == 0
    for parameter, was in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, was)
    step(torch.ones(3))
    state = [{k: v.clone() for k, v in made.state[p].items() if v is not None} for p in model.parameters()]
    grads = [p.grad.clone() for p in model.parameters()]
    jax.eval_shape(jtbridge.wrap(step, effects="ordered"), jnp.ones((2, 3)))
    for parameter, grad, was in zip(model.parameters(), grads, state, strict=True):
        assert torch.equal(parameter.grad, grad)
        for name, value in was.items():
            assert torch.equal(made.state[parameter][name], value)


@pytest.mark.parametrize("reads_values", [False, True])
def test_a_buffer_that_is_assigned_in_order(reads_values):
    class Sum(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("b", torch.zeros(3))
            self.n = 0

        def forward(self, v):
            self.b = self.b + v
            self.n += 1
            if reads_values and float(v.sum()) > 100:
                return self.b * 0
            return self.b * 1

    module = Sum()
    f = jtbridge.wrap(module, effects="ordered")
    found = [f(X).tolist(), jax.jit(f)(X).tolist(), jax.jit(lambda x: f(x))(X).tolist()]
    jax.effects_barrier()
    assert found == [[n * v for v in X.tolist()] for n in (1, 2, 3)]
    assert type(module.b) is torch.Tensor
    assert module.b.tolist() == found[-1]
    assert module.n == 3
