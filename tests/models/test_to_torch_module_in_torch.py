"""Torch modules of JAX models under torch.compile, torch.export, copies, and `jtbridge.module`."""

from __future__ import annotations

import copy
import io

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.utils.checkpoint
from torch.nn.utils import prune, weight_norm

import jtbridge
from jtbridge.errors import ModelError

pytestmark = pytest.mark.usefixtures("standard_promotion")  # for the libraries


@pytest.fixture(autouse=True)
def new_compiler():
    torch.compiler.reset()


def _net(nnx):
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.WeightNorm(nnx.Linear(3, 4, rngs=rngs), rngs=rngs)  # writes to its kernel
            self.norm = nnx.BatchNorm(4, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return self.dropout(self.norm(self.linear(x)))

    return Net(nnx.Rngs(0))


@pytest.mark.parametrize("how", ["eager", "compile"])
def test_calls_that_write_to_parameters_match_nnx(how: str):
    nnx = pytest.importorskip("flax.nnx", reason="flax is in the environment of make test-models")
    optax = pytest.importorskip("optax", reason="optax is in the environment of make test-models")
    module, reference = jtbridge.to_torch_module(_net(nnx)), _net(nnx)
    call = torch.compile(module, backend="aot_eager", fullgraph=True) if how == "compile" else module
    optimizers = (
        torch.optim.SGD(module.parameters(), lr=0.01),
        nnx.Optimizer(reference, optax.sgd(0.01), wrt=nnx.Param),
    )
    generator = torch.Generator().manual_seed(0)
    first = module.linear.layer_instance.kernel.detach().clone()
    for _ in range(4):
        x = torch.randn(5, 3, generator=generator)
        optimizers[0].zero_grad()
        loss = (call(x) ** 2).sum()
        loss.backward()
        optimizers[0].step()

        def expected(model, x):
            return (model(x) ** 2).sum()

        value, gradients = nnx.value_and_grad(expected)(reference, jnp.asarray(x.numpy()))
        optimizers[1].update(reference, gradients)
        np.testing.assert_allclose(value, loss.item(), rtol=1e-4)
        kernel = module.linear.layer_instance.kernel.detach()
        np.testing.assert_allclose(reference.linear.layer_instance.kernel[...], kernel.numpy(), rtol=1e-3, atol=1e-5)
    assert (kernel - first).abs().max() > 0.1


def test_two_calls_that_write_to_a_parameter_before_one_backward():
    nnx = pytest.importorskip("flax.nnx", reason="flax is in the environment of make test-models")

    class Growing(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.ones(2))

        def __call__(self, x):
            self.w[...] = self.w[...] + 1
            return x * self.w[...] ** 2

    module = jtbridge.to_torch_module(Growing())
    x = torch.ones(2)
    (module(x) + module(x)).sum().backward()
    assert module.w.tolist() == [3.0, 3.0]
    assert module.w.grad.tolist() == [2 * 2 + 2 * 3] * 2


def test_a_parameter_of_nnx_that_changes_its_shape():
    nnx = pytest.importorskip("flax.nnx", reason="flax is in the environment of make test-models")

    class Other(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.ones(2))

        def __call__(self, x):
            self.w.set_value(jnp.ones(3))
            return x

    with pytest.raises(ModelError, match=r"`w` as float32.3., but it was given as float32.2."):
        jtbridge.to_torch_module(Other())(torch.ones(2))


def test_a_compiled_module_follows_its_mode():
    nnx = pytest.importorskip("flax.nnx", reason="flax is in the environment of make test-models")
    module, twin = jtbridge.to_torch_module(_net(nnx)), jtbridge.to_torch_module(_net(nnx))
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    for train in (True, False, True):
        x = torch.randn(5, 3)
        module.train(train)
        torch.testing.assert_close(compiled(x), twin.train(train)(x))


def test_compiled_modules_of_different_functions_have_separate_graphs():
    x = torch.linspace(0, 1, 3)
    for function in (jnp.sin, jnp.cos, jnp.tanh):
        module = jtbridge.to_torch_module(lambda p, x, f=function: f(p["w"] * x), {"w": jnp.ones(3)})
        compiled = torch.compile(module, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), module(x))


@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")  # of torch's own code
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_gradients_of_compiled_graphs_use_the_state_before_the_call(backend: str):
    def delayed(params, before, x):
        return params["w"] * (x - before) ** 2, x

    module = jtbridge.to_torch_module(delayed, {"w": jnp.ones(3)}, jnp.zeros(3))
    compiled = torch.compile(module, backend=backend, fullgraph=True)
    compiled(torch.full((3,), 2.0)).sum().backward()
    assert module.w.grad.tolist() == [4.0] * 3
    compiled(torch.full((3,), 5.0)).sum().backward()
    assert module.w.grad.tolist() == [4.0 + 9.0] * 3


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("order", ["checkpoint of graph", "graph of checkpoint"])
def test_checkpoints_of_a_state_in_compiled_graphs(order: str, backend: str):
    def delayed(params, before, x):
        return params["w"] * (x - before) ** 2, x

    def checkpointed(function):
        return lambda x: torch.utils.checkpoint.checkpoint(function, x, use_reentrant=False)

    x = torch.full((3,), 2.0)
    module = jtbridge.to_torch_module(delayed, {"w": jnp.ones(3)}, jnp.zeros(3))
    compiled = torch.compile(module, backend=backend, fullgraph=True)
    compiled(x).sum().backward()
    assert module.w.grad.tolist() == [4.0] * 3
    if order == "checkpoint of graph":
        call, text = checkpointed(compiled), "cannot repeat its first call"
    else:  # without AOTAutograd, torch itself refuses that a state is written
        call = torch.compile(checkpointed(module), backend=backend)
        text = "cannot repeat its first call|modified by an inplace operation"
    loss = call(x + 1).sum()
    with pytest.raises((ModelError, RuntimeError), match=text):
        loss.backward()


@pytest.mark.parametrize("how", ["checkpoint of graph", "graph of checkpoint"])
def test_checkpoints_of_a_state_that_is_not_changed_in_compiled_graphs(how: str):
    module = jtbridge.to_torch_module(lambda p, s, x: (s * jnp.sin(p * x), s), jnp.ones(3), jnp.full(3, 2.0))
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    inner = compiled if how == "checkpoint of graph" else module

    def checkpointed(x):
        return torch.utils.checkpoint.checkpoint(inner, x, use_reentrant=False)

    call = checkpointed if how == "checkpoint of graph" else torch.compile(checkpointed, backend="aot_eager")
    x = torch.ones(3, requires_grad=True)
    torch.testing.assert_close(*torch.autograd.grad(call(x).sum(), x), 2 * torch.cos(x.detach()))


@pytest.mark.parametrize("strict", [False, True])
def test_a_module_with_a_state_is_exported_and_saved(strict: bool):
    module = jtbridge.to_torch_module(lambda p, s, x: (x * p + s, s + x), jnp.full(3, 2.0), jnp.zeros(3))
    program = torch.export.export(module, (torch.ones(3),), strict=strict)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    for _ in range(2):
        torch.testing.assert_close(loaded(torch.ones(3)), module(torch.ones(3)))


def test_copies_of_an_equinox_model_are_independent():
    eqx = pytest.importorskip("equinox", reason="equinox is in the environment of make test-models")
    module = jtbridge.to_torch_module(eqx.nn.MLP(3, 2, 8, 1, key=jax.random.key(0)))
    averaged = torch.optim.swa_utils.AveragedModel(module)
    averaged.update_parameters(module)
    x = torch.ones(3)
    expected = module(x)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    torch.testing.assert_close(averaged.eval()(x), expected)
    assert module.eval()(x).tolist() == [0.0, 0.0]
    model = averaged.module.to_jax()
    np.testing.assert_allclose(model(jnp.ones(3)), expected.detach().numpy(), rtol=1e-5)
    assert copy.deepcopy(module).to_jax().layers[0].weight.sum() == 0


def test_weakly_typed_parameter_follows_jax_promotion():
    params = {"scale": jnp.asarray(2.0)}
    module = jtbridge.to_torch_module(lambda p, x: x * p["scale"], params)
    x = torch.ones(2, dtype=torch.bfloat16)
    assert module(x).dtype is torch.bfloat16
    module(x).sum().backward()
    assert module.scale.grad.item() == 2
    assert module.to_jax()["scale"].weak_type


def test_arbitrary_parameter_names():
    names = ["_calls", "_trees", "_call", "_model", "_written", "", "forward"]
    module = jtbridge.to_torch_module(
        lambda p, x: x * sum(p[name] for name in names), {name: jnp.full((), float(i)) for i, name in enumerate(names)}
    )
    assert len(module.state_dict()) == len(names)
    assert module(torch.ones(())).item() == sum(range(len(names)))
    assert module.to_jax() == {name: float(i) for i, name in enumerate(names)}


def test_a_module_of_a_jax_model_inside_jtbridge_module():
    traces = []

    def apply(params, state, x):
        traces.append(1)
        return x * params["w"], state + x.sum()

    module = jtbridge.to_torch_module(apply, {"w": jnp.full(3, 2.0)}, {"total": jnp.zeros(())}["total"])
    net = jtbridge.module(module)
    params, state = net.init()
    for total in (3.0, 6.0, 9.0):
        out, state = net(params, state, jnp.ones(3))
        assert out.tolist() == [2.0] * 3
        assert [float(value) for value in state.values()] == [total]
    assert len(traces) == 1


@pytest.mark.parametrize("train", [True, False])
def test_an_equinox_model_inside_jtbridge_module_follows_its_mode(train: bool):
    eqx = pytest.importorskip("equinox", reason="equinox is in the environment of make test-models")

    class Scaled(eqx.Module):
        weight: jax.Array
        dropout: eqx.nn.Dropout

        def __call__(self, x, key):
            return self.dropout(x * self.weight, key=key)

    model = Scaled(jnp.full(64, 2.0), eqx.nn.Dropout(0.5))
    net = jtbridge.module(jtbridge.to_torch_module(model))
    params, state = net.init()
    bits = jax.random.key_data(jax.random.key(0))

    def loss(params):
        return net(params, state, jnp.ones(64), bits, train=train)[0].sum()

    zeros = (jax.jit(jax.grad(loss))(params)["weight"] == 0).sum()
    assert 0 < zeros < 64 if train else zeros == 0


@pytest.mark.parametrize("derive", [lambda part: prune.identity(part, "w"), lambda part: weight_norm(part, "w")])
@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
def test_weights_derived_by_parametrizations_of_a_submodule(derive):
    module = jtbridge.to_torch_module(lambda params, x: x @ params["a"]["w"], {"a": {"w": jnp.ones((3, 2))}})
    derive(module.a)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    values = []
    for _ in range(3):
        optimizer.zero_grad()
        value = module(torch.ones(3)).sum()
        value.backward()
        optimizer.step()
        values.append(value.item())
    np.testing.assert_allclose(values, [6.0, 5.4, 4.8], rtol=1e-5)
    np.testing.assert_allclose(module.to_jax()["a"]["w"], np.full((3, 2), 0.7), rtol=1e-5)


def test_to_jax_has_the_dtypes_of_the_module():
    module = jtbridge.to_torch_module(lambda params, x: x * params["w"], {"w": jnp.ones(1, jnp.float16)}).float()
    with torch.no_grad():
        module.w.fill_(1e6)
    assert module.to_jax()["w"].dtype == jnp.float32
    assert module.to_jax()["w"].tolist() == [1e6]
    with jax.enable_x64(True):
        module = module.double()
        with torch.no_grad():
            module.w.fill_(1 + 1e-10)
        assert module.to_jax()["w"].tolist() == [1 + 1e-10]
