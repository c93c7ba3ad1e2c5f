"""Called functions over several devices under plain jit: each device calls torch with its rows, nothing is gathered."""

from __future__ import annotations

import queue
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax._src import dispatch
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jtbridge
from jtbridge.errors import ArgumentError, ShardingError

W = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
X = np.random.default_rng(1).normal(size=(16, 3)).astype(np.float32)


@pytest.fixture
def mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((2, 4), ("data", "model"))


def model(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ w) * x.sum(1, keepdim=True)


def layer(**options: Any) -> Any:
    return jtbridge.wrap(model, backend="dlpack", batched="x", **options)


def placed(mesh: jax.sharding.Mesh, *axes: str) -> tuple[jax.Array, jax.Array]:
    return jtbridge.shard(W, mesh, "replicated"), jtbridge.shard_batch(X, mesh, axis=axes)


def compiled(f: Any, *args: Any) -> tuple[Any, list[str]]:
    """Return the compiled program, and its collective operations."""
    program = jax.jit(f).lower(*args).compile()
    names = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
    return program, re.findall(rf" ({names})(?:-start)?\(", program.as_text())


def expected_value_and_gradients(w: Any, x: Any) -> Any:
    w, x = torch.tensor(w, requires_grad=True), torch.tensor(x, requires_grad=True)
    out = model(w, x)
    (out**2).sum().backward()
    assert w.grad is not None
    assert x.grad is not None
    return out.detach().numpy(), w.grad.numpy(), x.grad.numpy()


def close(found: Any, expected: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5), tuple(found), tuple(expected))


@pytest.mark.parametrize("axes", [("data",), ("model",), ("data", "model")])
def test_each_device_calls_torch_with_its_rows(mesh, axes):
    shapes = queue.SimpleQueue()  # not seen by jtbridge, which undoes changes of state that it sees

    def f(w, x):
        shapes.put(len(x))
        return model(w, x)

    w, x = placed(mesh, *axes)
    run, collectives = compiled(jtbridge.wrap(f, backend="dlpack", batched=("x",)), w, x)
    assert collectives == []
    while not shapes.empty():
        shapes.get()
    out = run(w, x)
    assert out.sharding.is_equivalent_to(x.sharding, 2)
    np.testing.assert_allclose(out, expected_value_and_gradients(W, X)[0], rtol=1e-5)
    parts = {"data": 2, "model": 4}
    assert {shapes.get() for _ in range(shapes.qsize())} == {16 // int(np.prod([parts[axis] for axis in axes]))}


def test_without_batched_the_rows_are_gathered(mesh):
    """This shows that the other tests can fail: XLA does gather."""
    _, collectives = compiled(jtbridge.wrap(model, backend="dlpack"), *placed(mesh, "data"))
    assert collectives == ["all-gather"]


@pytest.mark.parametrize("residuals", ["save", "recompute"])
def test_gradients_need_no_gather_and_sum_over_shared_arguments(mesh, residuals):
    f = layer(residuals=residuals)

    def loss(w, x):
        out = f(w, x)
        return (out**2).sum(), out

    def value_and_gradients(w, x):
        (_, out), gradients = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(w, x)
        return out, *gradients

    args = placed(mesh, "data")
    run, collectives = compiled(value_and_gradients, *args)
    assert set(collectives) <= {"all-reduce"}
    assert collectives
    close(run(*args), expected_value_and_gradients(W, X))


def test_other_derivatives_need_no_gather(mesh):
    f = layer()
    w, x = placed(mesh, "data")

    def loss(w):
        return (f(w, x) ** 2).sum()

    reference = jax.jit(lambda w: (jtbridge.wrap(model)(w, X) ** 2).sum())
    for transform in (
        lambda loss: lambda w: jax.jvp(loss, (w,), (jnp.ones_like(w),)),
        lambda loss: lambda w: jax.jvp(jax.grad(loss), (w,), (jnp.ones_like(w),)),
    ):
        run, collectives = compiled(transform(loss), w)
        assert set(collectives) <= {"all-reduce"}
        close(run(w), transform(reference)(W))


def test_a_vmap_over_a_batched_function_is_divided_by_its_rows(mesh):
    f = jax.vmap(layer(), in_axes=(0, None))
    _, x = placed(mesh, "data")
    ws = jtbridge.shard(np.stack([W, 2 * W]), mesh, "replicated")
    run, collectives = compiled(f, ws, x)
    assert collectives == []
    close(run(ws, x), [expected_value_and_gradients(w, X)[0] for w in (W, 2 * W)])


def test_a_function_that_torch_cannot_trace_is_divided(mesh):
    def ranked(x):
        return torch.from_numpy(np.sort(x.numpy(), axis=-1))

    _, x = placed(mesh, "data")
    run, collectives = compiled(jtbridge.wrap(ranked, backend="dlpack", batched="x"), x)
    assert collectives == []
    np.testing.assert_array_equal(run(x), np.sort(X, axis=-1))


def test_trees_and_several_results_are_divided(mesh):
    def f(params, batch):
        return {"out": batch["x"] @ params["w"], "sum": batch["x"].sum(1) + batch["y"]}

    w, x = placed(mesh, "data")
    y = jtbridge.shard_batch(np.arange(16, dtype=np.float32), mesh)
    wrapped = jtbridge.wrap(f, backend="dlpack", batched="batch")
    run, collectives = compiled(wrapped, {"w": w}, {"x": x, "y": y})
    assert collectives == []
    found = run({"w": w}, {"x": x, "y": y})
    close((found["out"], found["sum"]), (X @ W, X.sum(1) + np.arange(16)))


def test_rows_that_are_not_distributed(mesh):
    w, x = placed(mesh)
    run, collectives = compiled(layer(), w, x)
    assert collectives == []
    np.testing.assert_allclose(run(w, x), expected_value_and_gradients(W, X)[0], rtol=1e-5)


def test_distributed_features_are_gathered_but_rows_are_not(mesh):
    w, _ = placed(mesh)
    x = jax.device_put(np.tile(X, (1, 4)), NamedSharding(w.sharding.mesh, P("data", "model")))
    run, _ = compiled(jtbridge.wrap(lambda x: x.cumsum(1), backend="dlpack", batched="x"), x)
    assert run(x).sharding.spec[0] == "data"
    np.testing.assert_allclose(run(x), np.cumsum(np.tile(X, (1, 4)), 1), rtol=1e-4, atol=1e-5)


def test_in_a_loop_and_under_checkpoint(mesh):
    f = jtbridge.wrap(lambda x: torch.sin(x), backend="dlpack", batched="x")
    _, x = placed(mesh, "data")
    run, collectives = compiled(lambda x: jax.lax.scan(lambda c, _: (f(c), None), x, length=3)[0], x)
    assert collectives == []
    np.testing.assert_allclose(run(x), np.sin(np.sin(np.sin(X))), rtol=1e-5, atol=1e-6)
    run, collectives = compiled(jax.grad(lambda x: jax.checkpoint(f)(x).sum()), x)
    assert set(collectives) <= {"all-reduce"}
    np.testing.assert_allclose(run(x), np.cos(X), rtol=1e-5, atol=1e-6)


def test_random_functions_are_not_divided(mesh):
    f = jtbridge.wrap(lambda x: torch.nn.functional.dropout(x, 0.5), backend="dlpack", batched="x")
    _, x = placed(mesh, "data")
    run, _ = compiled(lambda x, key: f(x, rng=key), x, jax.random.key(0))
    np.testing.assert_array_equal(run(x, jax.random.key(0)), jax.jit(f)(X, rng=jax.random.key(0)))


def test_a_called_module_trains_data_parallel_without_gathers(mesh):
    torch.manual_seed(0)
    torch_module = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    net = jtbridge.module(torch_module, backend="dlpack", batched=True)
    params, state = net.init(mesh=mesh, rules="replicated")
    x = jtbridge.shard_batch(X, mesh)
    step = jax.value_and_grad(lambda params, x: jnp.mean(net(params, state, x)[0] ** 2))
    run, collectives = compiled(step, params, x)
    assert set(collectives) == {"all-reduce"}
    loss = (torch_module(torch.tensor(X)) ** 2).mean()
    loss.backward()
    value, gradients = run(params, x)
    np.testing.assert_allclose(value, loss.item(), rtol=1e-5)
    for name, x in torch_module.named_parameters():
        np.testing.assert_allclose(gradients[name], x.grad, rtol=1e-4, atol=1e-6)


def test_shard_map_over_some_axes(mesh):
    _, x = placed(mesh, "data", "model")
    f = jtbridge.wrap(lambda x: x.cumsum(1), backend="dlpack", batched="x")
    specs = {"mesh": x.sharding.mesh, "in_specs": P("data"), "out_specs": P("data")}
    for axes in ({"data"}, {"data", "model"}):
        found = jax.jit(jax.shard_map(f, **specs, axis_names=axes))(x)
        np.testing.assert_allclose(found, np.cumsum(X, 1), rtol=1e-5, atol=1e-6)


def test_explicit_mesh_axes_need_no_gather():
    mesh = jax.make_mesh((8,), ("data",))
    with jax.set_mesh(mesh):
        x = jax.device_put(X, NamedSharding(mesh, P("data")))
        run, collectives = compiled(jtbridge.wrap(torch.sin, backend="dlpack", batched="argument 0"), x)
        assert collectives == []
        np.testing.assert_allclose(run(x), np.sin(X), rtol=1e-5, atol=1e-6)


def test_an_exception_on_all_devices_reaches_the_caller(mesh):
    def f(x):
        if len(x) < 16:
            raise KeyError("no such row")
        return x * 2

    _, x = placed(mesh, "data")
    run = jax.jit(jax.grad(lambda x: jtbridge.wrap(f, backend="dlpack", batched="x")(x).sum()))
    with pytest.raises(jax.errors.JaxRuntimeError, match="no such row"):
        jax.block_until_ready(run(x))
    dispatch.runtime_tokens.clear()  # those of the devices hold the error too


def test_one_device_and_eager_calls_are_unchanged():
    f = layer()
    expected = expected_value_and_gradients(W, X)[0]
    np.testing.assert_allclose(f(W, X), expected, rtol=1e-5)
    np.testing.assert_allclose(jax.jit(f)(W, X), expected, rtol=1e-5)


def test_a_sum_over_the_rows_is_refused():
    with pytest.raises(ShardingError, match=r"first axis of 16 rows like argument `x`, but result 0 has shape \(4,\)"):
        jax.jit(jtbridge.wrap(lambda w, x: (x @ w).sum(0), backend="dlpack", batched="x"))(W, X)
    with pytest.raises(ShardingError, match=r"argument `x\['b'\]` has shape \(2,\)"):
        jax.jit(jtbridge.wrap(lambda x: x["a"], batched="x"))({"a": X, "b": np.zeros(2)})


def test_unknown_argument_name_is_refused():
    with pytest.raises(ArgumentError, match=r"names `rows`, which has no arrays in this call\. Name one of `w`, `x`"):
        jax.jit(jtbridge.wrap(model, batched="rows"))(W, X)


def test_a_function_that_returns_another_number_of_rows_raises(mesh):
    f = jtbridge.wrap(lambda x: torch.cat([x, x])[:16], backend="dlpack", batched="x")
    _, x = placed(mesh, "data")
    with pytest.raises(
        (jax.errors.JaxRuntimeError, ValueError), match=r"has shape \(16, 3\) but \(8, 3\) was expected"
    ):
        jax.block_until_ready(jax.jit(f)(x))
    dispatch.runtime_tokens.clear()  # those of the devices hold the error too
