"""Wrapped functions are copied and pickled as the functions they are made of, before they are used and after."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jtbridge

X = jnp.arange(1.0, 5.0)
BACKENDS = ["auto", "xla", "dlpack", "callback"]


@jtbridge.wrap
def decorated(v: torch.Tensor) -> torch.Tensor:
    return 2 * v


def plain(v: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    return torch.sin(v) * scale


MAKE: dict[str, Callable[[str], Any]] = {
    "builtin": lambda name: jtbridge.wrap(torch.sin, backend=name),
    "function": lambda name: jtbridge.wrap(plain, backend=name, residuals="recompute"),
    "partial": lambda name: jtbridge.wrap(functools.partial(plain, scale=3.0), backend=name),
    "module": lambda name: jtbridge.wrap(torch.nn.Linear(4, 2), backend=name),
    "twice": lambda name: jtbridge.wrap(jtbridge.wrap(plain), backend=name),
}


def same(a: Any, b: Any) -> None:
    assert type(a) is type(b)
    assert a.backend == b.backend
    np.testing.assert_array_equal(a(X), b(X))
    np.testing.assert_array_equal(jax.grad(lambda v: a(v).sum())(X), jax.grad(lambda v: b(v).sum())(X))


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("kind", MAKE)
def test_copies(kind: str, used: bool, name: str):
    f = MAKE[kind](name)
    if used:
        jax.jit(jax.vmap(jax.grad(lambda v: f(v).sum())))(X[None])
        f(X)
    for copied in (copy.copy(f), copy.deepcopy(f), pickle.loads(pickle.dumps(f))):
        same(copied, f)


def test_deep_copy_has_separate_weights():
    module = torch.nn.Linear(4, 2)
    f = jtbridge.wrap(module, backend="dlpack")
    expected = f(X)
    copied = copy.deepcopy(f)
    with torch.no_grad():
        module.weight.zero_()
    np.testing.assert_array_equal(copied(X), expected)
    assert copied.function is not module


def test_a_decorated_function_is_pickled_by_name():
    decorated(X)
    assert pickle.loads(pickle.dumps(decorated)) is decorated


@pytest.mark.parametrize("used", [False, True])
def test_cloudpickle(used: bool):
    cloudpickle = pytest.importorskip("cloudpickle", reason="it is not installed")
    scale = 3.0
    for f in (jtbridge.wrap(lambda v: torch.sin(v) * scale), decorated, jtbridge.wrap(torch.nn.Linear(4, 2))):
        if used:
            f(X)
        same(cloudpickle.loads(cloudpickle.dumps(f)), f)


@jtbridge.to_torch_function
def in_torch(x: jax.Array) -> dict[str, jax.Array]:
    return {"y": jnp.sin(x) * x}


def test_a_decorated_jax_function_is_pickled_by_name():
    in_torch(torch.ones(2))
    assert pickle.loads(pickle.dumps(in_torch)) is in_torch


@pytest.mark.parametrize("used", [False, True])
def test_cloudpickle_of_a_jax_function(used: bool):
    cloudpickle = pytest.importorskip("cloudpickle", reason="it is not installed")
    scale = 3
    f = jtbridge.to_torch_function(lambda x: (jnp.sin(x) * scale, jnp.argmax(x)), int32="keep")
    x = torch.tensor([1.0, 2.0])
    if used:
        torch.func.grad(lambda x: f(x)[0].sum())(x)
    copied = cloudpickle.loads(cloudpickle.dumps(f))
    for value, wanted in zip(copied(x), f(x), strict=True):
        assert value.dtype is wanted.dtype
        assert torch.equal(value, wanted)
    torch.testing.assert_close(torch.func.grad(lambda x: copied(x)[0].sum())(x), 3 * x.cos())
    compiled = torch.compile(lambda x: copied(x)[0] + 1, backend="eager")
    torch.testing.assert_close(compiled(x), 3 * x.sin() + 1)
