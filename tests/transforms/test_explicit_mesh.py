"""Arrays whose sharding is part of their type (explicit axes of `jax.make_mesh`): derivatives have these types too."""

from __future__ import annotations

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jtbridge

TRANSFORMS = {
    "grad": lambda f: jax.grad(lambda x: f(x).sum()),
    "vjp": lambda f: lambda x: jax.vjp(f, x)[1](x)[0],
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (x,))[1],
    "second": lambda f: jax.grad(lambda x: jax.grad(lambda x: f(x).sum())(x).sum()),
    "of a sum": lambda f: jax.grad(lambda x: jtbridge.wrap(torch.sum)(f(x))),
}


@pytest.fixture
def mesh():
    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,), devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        yield mesh


@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("backend", ["auto", "xla"])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_derivatives_have_the_type_of_the_argument(name: str, backend: str, jitted: bool, mesh):
    x = jax.device_put(jnp.linspace(0.1, 2.0, 24).reshape(8, 3), NamedSharding(mesh, P("d")))
    got = (jax.jit if jitted else lambda f: f)(TRANSFORMS[name](jtbridge.wrap(torch.sin, backend=backend)))(x)
    want = TRANSFORMS[name](jnp.sin)(x) if name != "of a sum" else jnp.cos(x)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    if not (jitted and name == "jvp"):  # the types of results inside `jit` have no sharding; XLA chooses it
        assert jax.typeof(got) == jax.typeof(x)


@pytest.mark.parametrize("backend", ["dlpack", "callback"])
def test_gradients_of_called_functions(backend: str, mesh):
    x = jax.device_put(jnp.linspace(0.1, 2.0, 24).reshape(8, 3), NamedSharding(mesh, P("d")))
    f = jtbridge.wrap(torch.sin, backend=backend)
    got = jax.grad(lambda x: f(x).sum())(x)
    np.testing.assert_allclose(got, jnp.cos(x), rtol=1e-6)
    assert jax.typeof(got) == jax.typeof(x)


BATCHED = {
    "values": lambda f: f,
    "grad": lambda f: jax.grad(lambda x: f(x).sum()),
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (x,))[1].sum(),
    "linearize": lambda f: lambda x: jax.linearize(f, x)[1](x).sum(),
    "hessian": lambda f: jax.hessian(lambda x: f(x).sum()),
    "second": lambda f: jax.grad(lambda x: jax.grad(lambda x: f(x).sum())(x).sum()),
    "checkpoint": lambda f: jax.grad(lambda x: jax.checkpoint(f)(x).sum()),
}


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("within", [False, True], ids=["outside", "within"])
@pytest.mark.parametrize("backend", ["auto", "dlpack"])
@pytest.mark.parametrize("name", BATCHED)
def test_batches_have_the_type_of_the_argument(name: str, backend: str, within: bool, axis: int):
    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,), devices=jax.devices()[:4])
    spec = P("d") if axis == 0 else P(None, "d")
    x = jnp.linspace(0.1, 2.0, 32).reshape((8, 4) if axis == 0 else (4, 8))
    f = jtbridge.wrap(torch.sin, backend=backend)
    want = jax.vmap(BATCHED[name](jnp.sin), in_axes=axis)(x)
    with jax.set_mesh(mesh) if within else contextlib.nullcontext():
        x = jax.device_put(x, NamedSharding(mesh, spec))
        got = jax.jit(jax.vmap(BATCHED[name](f), in_axes=axis))(x)
        assert jax.typeof(got).sharding.spec[0] == "d"
        got = jax.device_get(got)
    np.testing.assert_allclose(got, want, rtol=1e-5)
