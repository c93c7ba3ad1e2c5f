"""shard_map over four CPU devices: each calls torch on its own shard."""

from __future__ import annotations

import queue

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jtbridge
from tests.compare import assert_matches

from .problem import tensor


@pytest.fixture
def mesh() -> jax.sharding.Mesh:
    assert len(jax.devices()) >= 4, "tests/conftest.py asks for four CPU devices"
    return jax.make_mesh((4,), ("i",), devices=jax.devices()[:4], axis_types=(jax.sharding.AxisType.Auto,))


@pytest.fixture
def data(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    return rng.normal(size=(3,)), rng.normal(size=(8, 3))


def model(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ w)


@pytest.mark.parametrize("jit", [False, True])
def test_forward(mesh, data, jit: bool, backend: str, x64: None):
    run = jax.shard_map(jtbridge.wrap(model), mesh=mesh, in_specs=(P(), P("i")), out_specs=P("i"))
    found = (jax.jit(run) if jit else run)(*map(jnp.asarray, data))
    assert_matches(found, model(*map(tensor, data)))


def test_each_device_sees_its_shard(mesh, backend: str):
    shapes = queue.SimpleQueue()  # not seen by jtbridge, which undoes changes of state that it sees

    def f(x: torch.Tensor) -> torch.Tensor:
        shapes.put(tuple(x.shape))
        return x.sum().reshape(1)

    run = jax.jit(jax.shard_map(jtbridge.wrap(f), mesh=mesh, in_specs=P("i"), out_specs=P("i")))
    assert run(jnp.arange(8.0)).tolist() == [1, 5, 9, 13]
    assert {shapes.get() for _ in range(shapes.qsize())} == {(2,)}


def test_shard_map_needs_no_gather(mesh, backend: str):
    run = jax.jit(jax.shard_map(jtbridge.wrap(torch.sin), mesh=mesh, in_specs=P("i"), out_specs=P("i")))
    x = jax.device_put(jnp.arange(8.0), NamedSharding(mesh, P("i")))
    text = run.lower(x).compile().as_text()
    assert "all-gather" not in text
    assert ("custom-call" in text) == (backend != "xla")
    assert run(x).sharding.is_equivalent_to(x.sharding, 1)


@pytest.mark.parametrize("jit", [False, True])
def test_gradient_of_a_replicated_argument(mesh, data, jit: bool, backend: str, x64: None):
    """The weights are the same on every device, so their gradient is a sum over the devices."""
    f = jtbridge.wrap(model)

    def loss(w, x):
        rows = jax.shard_map(f, mesh=mesh, in_specs=(P(), P("i")), out_specs=P("i"))(w, x)
        return jnp.sum(rows**2)

    grad = jax.grad(loss, argnums=(0, 1))
    found = (jax.jit(grad) if jit else grad)(*map(jnp.asarray, data))
    w, x = (tensor(a).requires_grad_() for a in data)
    assert_matches(list(found), list(torch.autograd.grad((model(w, x) ** 2).sum(), (w, x))))


def test_gradient_inside_with_psum(mesh, data, backend: str, x64: None):
    """Data-parallel training: per-device gradients, summed by JAX."""
    f = jtbridge.wrap(lambda w, x: (torch.tanh(x @ w) ** 2).sum())

    @jax.jit
    def run(w, x):
        def device(w, x):
            return jax.lax.psum(f(w, x), "i")

        total = jax.shard_map(device, mesh=mesh, in_specs=(P(), P("i")), out_specs=P())
        return jax.value_and_grad(total)(w, x)

    value, grad = run(*map(jnp.asarray, data))
    w, x = tensor(data[0]).requires_grad_(), tensor(data[1])
    expected = (model(w, x) ** 2).sum()
    assert_matches(value, expected.detach())
    assert_matches(grad, torch.autograd.grad(expected, w)[0])


def test_jvp_and_hessian_of_a_replicated_argument(mesh, data, backend: str, x64: None):
    f = jtbridge.wrap(model)

    def loss(w):
        rows = jax.shard_map(f, mesh=mesh, in_specs=(P(), P("i")), out_specs=P("i"))(w, jnp.asarray(data[1]))
        return jnp.sum(rows**2)

    def torch_loss(w):
        return (model(w, tensor(data[1])) ** 2).sum()

    w = tensor(data[0])
    hessian = torch.autograd.functional.hessian(torch_loss, w)
    gradient = torch.autograd.functional.jacobian(torch_loss, w)
    found = jax.jit(lambda w: jax.jvp(loss, (w,), (jnp.ones(3),)))(jnp.asarray(data[0]))
    assert_matches(found, (torch_loss(w), gradient.sum()))
    assert_matches(jax.jit(jax.hessian(loss))(jnp.asarray(data[0])), hessian)


def test_vmap_of_shard_map_and_inside(mesh, data, backend: str, x64: None):
    f = jax.vmap(jtbridge.wrap(lambda w, x: torch.tanh(x @ w)), in_axes=(None, 0))
    run = jax.shard_map(f, mesh=mesh, in_specs=(P(), P("i")), out_specs=P("i"))
    ws = np.stack([data[0], 2 * data[0]])
    found = jax.jit(jax.vmap(run, in_axes=(0, None)))(jnp.asarray(ws), jnp.asarray(data[1]))
    assert_matches(found, torch.stack([model(tensor(w), tensor(data[1])) for w in ws]))


def test_sharded_arrays_outside_shard_map(mesh, data, backend: str, x64: None):
    """Without shard_map the inputs are gathered, and the result is right."""
    f = jtbridge.wrap(model)
    w = jax.device_put(jnp.asarray(data[0]), NamedSharding(mesh, P()))
    x = jax.device_put(jnp.asarray(data[1]), NamedSharding(mesh, P("i")))
    expected = model(*map(tensor, data))
    assert_matches(f(w, x), expected)
    assert_matches(jax.jit(f)(w, x), expected)
    gradient = jax.grad(lambda w, x: f(w, x).sum())
    assert_matches(jax.jit(gradient)(w, x), (1 - expected**2) @ tensor(data[1]).T.T)
    assert_matches(gradient(w, x), (1 - expected**2) @ tensor(data[1]).T.T)
    assert_matches(jax.vmap(f, in_axes=(None, 0))(w, x), expected)
    assert_matches(jax.vmap(gradient, in_axes=(None, 0))(w, x), (1 - expected**2)[:, None] * tensor(data[1]))
    assert_matches(jax.jvp(f, (w, x), (0 * w, x))[1], (1 - expected**2) * (tensor(data[1]) @ tensor(data[0])))


def test_derivatives_of_eager_calls_along_sharded_arrays(mesh, data, backend: str, x64: None):
    """The arguments are on one device, and the tangents and cotangents on four: torch gets their values."""
    f = jtbridge.wrap(lambda x: torch.sin(x), backend=backend)
    x, expected = jnp.asarray(data[1]), tensor(data[1])
    spread = jax.device_put(2 * x, NamedSharding(mesh, P("i")))
    out, pull = jax.vjp(f, x)
    assert_matches(out, expected.sin())
    assert_matches(pull(spread)[0], 2 * expected * expected.cos())
    assert_matches(jax.linearize(f, x)[1](spread), 2 * expected * expected.cos())
    assert_matches(jax.jvp(f, (x,), (spread,))[1], 2 * expected * expected.cos())
    assert_matches(jax.grad(lambda x: (f(x) * spread).sum())(x), 2 * expected * expected.cos())


def test_results_stay_on_the_device_of_the_array(backend: str):
    device = jax.devices()[2]
    x = jax.device_put(jnp.arange(3.0), device)
    f = jtbridge.wrap(torch.sin)
    for out in (f(x), jax.jit(f)(x), jax.grad(lambda x: f(x).sum())(x)):
        assert out.devices() == {device}


@pytest.mark.parametrize(
    "derivative",
    [
        lambda f, x: jax.grad(lambda x: f(x).sum())(x),
        lambda f, x: jax.jvp(f, (x,), (x,))[1],
        lambda f, x: jax.vmap(f)(x),
        lambda f, x: jax.vmap(jax.grad(f))(x),
        lambda f, x: jax.hessian(lambda x: f(x).sum())(x),
        lambda f, x: jax.vjp(f, jnp.arange(8.0))[1](x)[0],  # only the cotangent is divided
        lambda f, x: jax.linearize(f, jnp.arange(8.0))[1](x),
    ],
)
def test_eager_derivatives_at_an_array_on_several_devices(mesh, derivative):
    x = jnp.arange(8.0)
    f = jtbridge.wrap(lambda x: torch.sin(x) * x)
    found = derivative(f, jax.device_put(x, NamedSharding(mesh, P("i"))))
    np.testing.assert_allclose(found, derivative(lambda x: jnp.sin(x) * x, x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", ["dlpack", "callback"], indirect=True)
def test_result_on_several_devices_is_an_argument_of_later_calls(mesh, backend: str):
    x = jax.device_put(jnp.arange(8.0), NamedSharding(mesh, P("i")))
    f = jtbridge.wrap(lambda x: x * 2)
    run = jax.jit(f)
    for out in (f(f(x)) + x, run(run(x)) + x, run(x) + f(x) + run(x)[:1]):
        assert out.devices() == x.devices()
    np.testing.assert_array_equal(run(run(x)) + x, np.arange(8.0) * 5)
