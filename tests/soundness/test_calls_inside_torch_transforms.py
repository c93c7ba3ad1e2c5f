"""Calls on JAX arrays while a transform or a tracing mode of torch is active around them: they compute on values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

import jtbridge

X = jnp.arange(3.0)
LARGE = jnp.arange(4096.0)  # its memory is shared


def in_fake_mode(call: Callable[[], Any]) -> Any:
    with FakeTensorMode():
        return call()


def inside(transform: Callable[[Callable], Callable], x: torch.Tensor) -> Callable[[Callable[[], Any]], Any]:
    def run(call: Callable[[], Any]) -> Any:
        found = []

        def fn(t):
            found.append(call())
            return t * 2

        transform(fn)(x)
        return found[0]

    return run


AROUND = {
    "fake tensors": in_fake_mode,
    "functionalize": inside(torch.func.functionalize, torch.ones(2)),
    "make_fx": inside(make_fx, torch.ones(2)),
    "make_fx on fake tensors": inside(lambda fn: make_fx(fn, tracing_mode="fake"), torch.ones(2)),
    "vmap": inside(torch.func.vmap, torch.ones(2)),
    "grad": inside(torch.func.grad, torch.tensor(2.0)),
    "vmap of grad": inside(lambda fn: torch.func.vmap(torch.func.grad(fn)), torch.ones(2)),
}
WAYS: dict[str, Callable[[Any], Any]] = {
    "eager": lambda f: f,
    "jit": jax.jit,
    "grad": lambda f: jax.grad(lambda x: f(x).sum()),
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (x,))[1],
    "vmap": lambda f: lambda x: jax.vmap(f)(x[None])[0],
    "jit of grad": lambda f: jax.jit(jax.grad(lambda x: f(x).sum())),
}


@pytest.mark.parametrize("backend", ["auto", "dlpack", "callback"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("around", AROUND)
def test_results(around: str, way: str, backend: str):
    for x in (X, LARGE):
        f = WAYS[way](jtbridge.wrap(lambda t: t * t + 1, backend=backend))
        wanted = np.asarray(WAYS[way](lambda t: t * t + 1)(x))
        got = AROUND[around](lambda f=f, x=x: np.asarray(f(x)))
        np.testing.assert_allclose(got, wanted, rtol=1e-6)
        np.testing.assert_allclose(f(x), wanted, rtol=1e-6)


def test_mode_is_active_after_the_call():
    f = jtbridge.wrap(lambda t: t * 2)
    with FakeTensorMode() as mode:
        f(X)
        assert getattr(torch.ones(2), "fake_mode", None) is mode


def test_a_mode_of_the_user_sees_an_eager_call():
    f = jtbridge.wrap(lambda t: t @ t)
    with FlopCounterMode(display=False) as counter:
        f(jnp.ones((4, 4)))
    assert counter.get_total_flops() == 2 * 4**3
