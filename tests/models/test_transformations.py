"""`jtbridge.module` under JAX's transformations, on every backend, and from several threads."""

from __future__ import annotations

import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import PartitionSpec as P

import jtbridge
from tests.models.zoo import Tied, make


def mlp(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.BatchNorm1d(8), torch.nn.Tanh(), torch.nn.Linear(8, 2))


X = np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32)


def loss(net: Any, params: Any, state: Any, x: Any, **options: Any) -> Any:
    out, changed = net(params, state, x, **options)
    return (out**2).mean(), changed


@pytest.mark.parametrize("backend", ["auto", "xla", "dlpack", "callback"])
@pytest.mark.parametrize("mode", ["eager", "jit"])
def test_every_backend_gives_the_same_training_run(backend: str, mode: str):
    reference = mlp().train()
    net = jtbridge.module(mlp(), backend=backend)
    params, state = net.init()
    step = jax.value_and_grad(lambda p, s, x: loss(net, p, s, x, train=True), has_aux=True)
    (value, changed), gradients = (jax.jit(step) if mode == "jit" else step)(params, state, X)
    expected = (reference(torch.from_numpy(X)) ** 2).mean()
    expected.backward()
    np.testing.assert_allclose(value, expected.detach(), rtol=1e-5)
    for name, p in reference.named_parameters():
        np.testing.assert_allclose(gradients[name], p.grad, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(changed["1.running_mean"], reference[1].running_mean, rtol=1e-5)
    assert changed["1.num_batches_tracked"] == 1


@pytest.mark.parametrize("jit", [False, True])
def test_ensembles_by_vmap_over_stacked_parameters(jit: bool):
    nets = [jtbridge.module(mlp(seed)) for seed in range(3)]
    single = [net.init() for net in nets]
    params, state = jax.tree.map(lambda *leaves: jnp.stack(leaves), *single)
    call = jax.vmap(lambda p, s, x: nets[0](p, s, x, train=True), in_axes=(0, 0, None))
    out, changed = (jax.jit(call) if jit else call)(params, state, X)
    for i, (net, (p, s)) in enumerate(zip(nets, single, strict=True)):
        expected, expected_changed = net(p, s, X, train=True)
        np.testing.assert_allclose(out[i], expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(changed["1.running_mean"][i], expected_changed["1.running_mean"], rtol=1e-5)


def test_one_model_for_a_batch_of_examples():
    net = jtbridge.module(mlp())
    params, state = net.init()
    per_example = jax.vmap(jax.grad(lambda p, x: loss(net, p, state, x[None])[0]), in_axes=(None, 0))(params, X)
    for i in range(len(X)):
        expected = jax.grad(lambda p, i=i: loss(net, p, state, X[i : i + 1])[0])(params)
        np.testing.assert_allclose(per_example["0.weight"][i], expected["0.weight"], rtol=1e-4, atol=1e-6)


def test_scan_carries_the_state():
    net = jtbridge.module(mlp())
    params, state = net.init()

    def body(state: Any, x: Any) -> Any:
        out, changed = net(params, state, x, train=True)
        return state | changed, out

    batches = jnp.stack([X, X + 1, X * 2])
    final, _ = jax.lax.scan(body, state, batches)
    for x in batches:
        state = state | net(params, state, x, train=True)[1]
    np.testing.assert_allclose(final["1.running_var"], state["1.running_var"], rtol=1e-5)
    assert final["1.num_batches_tracked"] == 3


@pytest.mark.parametrize("jit", [False, True])
def test_checkpoint(jit: bool):
    net = jtbridge.module(mlp())
    params, state = net.init()
    plain = jax.grad(lambda p: loss(net, p, state, X)[0])
    saved = jax.grad(lambda p: jax.checkpoint(lambda p: loss(net, p, state, X)[0])(p))
    expected, found = plain(params), (jax.jit(saved) if jit else saved)(params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), found, expected)


def test_donation():
    net = jtbridge.module(mlp())
    params, state = net.init()
    expected = net(params, state, X, train=True)[1]
    for release in (False, True):
        params, state = jtbridge.module(mlp()).init(release=release)

        def step(params: Any, state: Any) -> Any:
            return jax.tree.map(lambda p: p * 0.5, params), net(params, state, X, train=True)[1]

        donated, changed = jax.jit(step, donate_argnums=(0, 1))(params, state)
        np.testing.assert_allclose(changed["1.running_mean"], expected["1.running_mean"], rtol=1e-5)
        assert not jax.tree.leaves(donated)[0].is_deleted()


@pytest.mark.parametrize("jit", [False, True])
def test_bfloat16_compute_with_float32_parameters(jit: bool):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 2))
    net = jtbridge.module(model)
    params, state = net.init()

    def narrow(params: Any) -> Any:
        half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
        out, _ = net(half, state, jnp.asarray(X, jnp.bfloat16))
        assert out.dtype == jnp.bfloat16
        return out.astype(jnp.float32).sum()

    value, gradients = (jax.jit if jit else lambda f: f)(jax.value_and_grad(narrow))(params)
    half = model.bfloat16()
    expected = half(torch.from_numpy(X).bfloat16()).float().sum()
    expected.backward()
    np.testing.assert_allclose(value, expected.detach(), rtol=3e-2, atol=3e-2)
    assert gradients["0.weight"].dtype == jnp.float32
    np.testing.assert_allclose(gradients["2.bias"], half[2].bias.grad.float(), rtol=3e-2, atol=3e-2)


def test_shard_map():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    net = jtbridge.module(mlp())
    params, state = net.init()
    x = np.concatenate([X, X])
    call = jax.shard_map(
        lambda p, s, x: net(p, s, x)[0], mesh=mesh, in_specs=(P(), P(), P("data")), out_specs=P("data")
    )
    np.testing.assert_allclose(jax.jit(call)(params, state, x), net(params, state, x)[0], rtol=1e-5, atol=1e-6)


def test_gradients_of_a_tied_weight_are_summed():
    torch.manual_seed(0)
    model = Tied()
    net = jtbridge.module(model)
    params, state = net.init()
    ids = np.array([[1, 2, 3]])
    gradients = jax.jit(jax.grad(lambda p: loss(net, p, state, ids)[0]))(params)
    (model(torch.from_numpy(ids)) ** 2).mean().backward()
    np.testing.assert_allclose(gradients["embed.weight"], model.embed.weight.grad, rtol=1e-4, atol=1e-6)


def test_second_derivatives():
    net = jtbridge.module(torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)))
    params, state = net.init()

    def energy(x: Any) -> Any:
        return net(params, state, x)[0].sum()

    eager, traced = jax.hessian(energy)(X[0]), jax.jit(jax.hessian(energy))(X[0])
    np.testing.assert_allclose(eager, traced, rtol=1e-4, atol=1e-6)


def test_call_does_not_affect_other_threads():
    model = mlp().train()
    net = jtbridge.module(model)
    params, state = net.init()
    zeros = jax.tree.map(jnp.zeros_like, params)
    x = torch.from_numpy(X)
    expected = model.eval()(x)
    different: list[Any] = []
    stop = threading.Event()

    def use_torch() -> None:
        while not stop.is_set():
            if not torch.equal(model(x), expected) or model.training:
                different.append(model.training)

    thread = threading.Thread(target=use_torch)
    thread.start()
    try:
        for _ in range(3):
            for call in (net, jax.jit(lambda p, s, x: net(p, s, x, train=True))):
                call(zeros, state, X)
            net(zeros, state, X, train=True)
            jax.grad(lambda p: loss(net, p, state, X, train=True)[0])(zeros)
    finally:
        stop.set()
        thread.join()
    assert different == []


def test_concurrent_calls_are_independent():
    net = jtbridge.module(mlp())
    params, state = net.init()
    call = jax.jit(lambda p, s, x: net(p, s, x)[0])
    scaled = [jax.tree.map(lambda p, i=i: p * i, params) for i in range(4)]
    expected = [np.asarray(net(p, state, X)[0]) for p in scaled]
    failures: list[int] = []

    def work(i: int) -> None:
        for _ in range(20):
            for f in (call, lambda p, s, x: net(p, s, x)[0]):
                if not np.allclose(f(scaled[i], state, X), expected[i], rtol=1e-5, atol=1e-5):
                    failures.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_explain_check_and_purity():
    net = jtbridge.module(mlp())
    params, state = net.init()
    text = str(jtbridge.explain(net, params, state, X))
    assert "Sequential" in text
    assert "addmm" in text
    report = jtbridge.check(net, params, state, X)
    assert report.ok, report
    assert not jtbridge.purity(net, params, state, X).findings


def test_a_net_is_a_field_and_a_static_argument():
    model, (x,) = make("linear")
    net = jtbridge.module(model)
    params, state = net.init()
    call = jax.jit(lambda net, p, s, x: net(p, s, x)[0], static_argnums=0)
    np.testing.assert_allclose(call(net, params, state, jtbridge.to_jax(x)), model(x).detach(), rtol=1e-5, atol=1e-6)
    assert hash(net.method("forward")) == hash(net.method("forward"))
    assert net.method("forward") == net.method("forward")
