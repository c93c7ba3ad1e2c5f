"""Wrapped functions inside wrapped functions, over the descriptors of classes, and what cannot be wrapped."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jtbridge
from jtbridge.errors import ArgumentError

BACKENDS = ["xla", "dlpack", "callback"]
X = jnp.arange(1.0, 5.0)


@jtbridge.wrap
def factorial_times(x: torch.Tensor, n: int) -> torch.Tensor:
    return x if n == 0 else factorial_times(x, n - 1) * n


@pytest.mark.parametrize("name", BACKENDS)
def test_recursion_by_name(name: str):
    with jtbridge.config(backend=name):
        assert factorial_times(X, 4).tolist() == (24 * X).tolist()
        assert jax.jit(jax.grad(lambda v: factorial_times(v, 3).sum()))(X).tolist() == [6.0] * 4


@pytest.mark.parametrize("name", BACKENDS)
def test_torch_code_calls_the_torch_function(name: str):
    @functools.partial(jtbridge.wrap, backend="callback")
    def inner(v, scale=1.0):
        assert isinstance(v, torch.Tensor)
        return torch.sin(v) * scale

    outer = jtbridge.wrap(lambda v: inner(v) + functools.partial(inner, scale=2.0)(v).sum(), backend=name)

    def expected(v: jax.Array) -> jax.Array:
        return jnp.sin(v) + 2 * jnp.sin(v).sum()

    for run in (lambda f: f, jax.jit, jax.jacfwd, jax.jacrev, jax.hessian, lambda f: jax.jit(jax.hessian(f))):
        np.testing.assert_allclose(run(outer)(X), run(expected)(X), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(jax.vmap(outer)(X[None]), expected(X)[None], rtol=1e-5)
    np.testing.assert_allclose(inner(torch.ones(3)), np.sin(np.ones(3)), rtol=1e-6)  # outside it is a JAX function


@pytest.mark.parametrize("options", [{"return_mutated": True}, {}])
def test_jax_options_are_refused_inside_another_wrapped_function(options: dict[str, Any]):
    inner = jtbridge.wrap(lambda v: torch.sin(v), **options)
    keywords = {} if options else {"rng": 1}
    with pytest.raises(ArgumentError, match="inside another wrapped function"):
        jtbridge.wrap(lambda v: inner(v, **keywords), backend="xla")(X)


def test_options_of_the_outer_wrap_apply():
    inner = jtbridge.wrap(torch.sin, backend="callback", return_mutated=True)
    for outer in (jtbridge.wrap(inner, backend="xla"), jtbridge.wrap(functools.partial(inner), backend="xla")):
        assert outer.backend == "xla"
        assert outer.function is torch.sin
        np.testing.assert_allclose(outer(X), jnp.sin(X), rtol=1e-6)


class Model:
    """A class with every kind of method, wrapped outside and inside of the other decorator."""

    factor = 3.0

    @jtbridge.wrap
    @staticmethod
    def static_above(v: torch.Tensor) -> torch.Tensor:
        return v * 3

    @staticmethod
    @jtbridge.wrap
    def static_below(v: torch.Tensor) -> torch.Tensor:
        return v * 3

    @jtbridge.wrap(residuals="recompute")
    @classmethod
    def class_above(cls, v: torch.Tensor) -> torch.Tensor:
        return v * cls.factor

    @classmethod
    @jtbridge.wrap
    def class_below(cls, v: torch.Tensor) -> torch.Tensor:
        return v * cls.factor

    @jtbridge.wrap
    def method(self, v: torch.Tensor) -> torch.Tensor:
        return v * self.factor

    @property
    @jtbridge.wrap
    def numbers(self) -> torch.Tensor:
        return torch.ones(2) * self.factor


@pytest.mark.parametrize("name", BACKENDS)
def test_descriptors(name: str):
    model = Model()
    with jtbridge.config(backend=name):
        for f in (
            *(Model.static_above, model.static_above, Model.static_below, model.static_below),
            *(Model.class_above, model.class_above, Model.class_below, model.class_below),
            *(model.method, jtbridge.wrap(model.method), functools.partial(Model.method, model)),
        ):
            assert f(X).tolist() == (3 * X).tolist()
            assert jax.jit(jax.grad(lambda v, f=f: f(v).sum()))(X).tolist() == [3.0] * 4
        assert model.numbers.tolist() == [3.0, 3.0]


async def coroutine(v: torch.Tensor) -> torch.Tensor:
    return v


def generator(v: torch.Tensor):
    yield v


async def asynchronous_generator(v: torch.Tensor):
    yield v


class Rows:
    def __call__(self, v: torch.Tensor):
        yield from v


class Later(torch.nn.Module):
    async def forward(self, v: torch.Tensor) -> torch.Tensor:
        return v


@pytest.mark.parametrize(
    ("fn", "kind"),
    [
        (coroutine, "`coroutine` is a coroutine function"),
        (generator, "`generator` is a generator function"),
        (asynchronous_generator, "an asynchronous generator function"),
        (functools.partial(generator, 1), "a generator function"),
        (Rows(), "`Rows` is a generator function"),
        (Later(), "`Later` is a coroutine function"),
        (property(lambda self: 1), "Put `@property` above `@wrap`"),
    ],
)
def test_objects_that_cannot_be_wrapped_are_refused(fn: Any, kind: str):
    with pytest.raises(ArgumentError, match=kind):
        jtbridge.wrap(fn)
