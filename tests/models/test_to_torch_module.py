"""Models of Flax NNX, Flax Linen, Equinox and plain JAX as torch modules, trained by torch."""

from __future__ import annotations

import copy
import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.utils.checkpoint

import jtbridge
from jtbridge.errors import ArgumentError, ModelError

pytestmark = pytest.mark.usefixtures("standard_promotion")  # for the libraries


def _data():
    x = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
    return x, x.sin().sum(1, keepdim=True)


def _train(module, call, steps=60):
    x, y = _data()
    optimizer = torch.optim.Adam(module.parameters(), lr=3e-2)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = ((call(module, x) - y) ** 2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _check_trained(module, call):
    losses = _train(module, call)
    assert losses[-1] < 0.5 * losses[0]
    module.eval()
    x, _ = _data()
    twin = copy.deepcopy(module)
    expected = call(module, x)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert not torch.equal(call(twin, x), expected)
    twin.load_state_dict(module.state_dict())
    torch.testing.assert_close(call(twin, x), expected)
    return x, expected


def _mlp(params, x):
    return jnp.tanh(x @ params["a"] + params["b"][0]) @ params["c"]


def _mlp_params():
    keys = jax.random.split(jax.random.key(0), 2)
    weights = [jax.random.normal(keys[0], (3, 16)), jax.random.normal(keys[1], (16, 1)) / 4]
    return {"a": weights[0], "b": [jnp.zeros(16)], "c": weights[1]}


def test_plain_jax():
    module = jtbridge.to_torch_module(_mlp, _mlp_params())
    assert set(module.state_dict()) == {"a", "b.0", "c"}
    x, expected = _check_trained(module, lambda m, x: m(x))
    params = module.to_jax()
    torch.testing.assert_close(jtbridge.to_torch(_mlp(params, jtbridge.to_jax(x)), copy=True), expected)


def test_steps_match_jax():
    module = jtbridge.to_torch_module(_mlp, _mlp_params())
    x, y = _data()
    a, b = jtbridge.to_jax((x, y))
    params = _mlp_params()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    step = jax.jit(jax.grad(lambda p: jnp.mean((_mlp(p, a) - b) ** 2)))
    for _ in range(10):
        optimizer.zero_grad()
        ((module(x) - y) ** 2).mean().backward()
        optimizer.step()
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, step(params))
    for got, expected in zip(jax.tree.leaves(module.to_jax()), jax.tree.leaves(params), strict=True):
        assert jnp.allclose(got, expected, rtol=1e-4, atol=1e-5)


def test_linen():
    nn = pytest.importorskip("flax.linen", reason="flax is in the environment of make test-models")

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(1)(nn.tanh(nn.Dense(16)(x)))

    variables = Net().init(jax.random.key(0), jnp.ones((1, 3)))
    module = jtbridge.to_torch_module(Net().apply, variables)
    assert "params.Dense_0.kernel" in module.state_dict()
    x, expected = _check_trained(module, lambda m, x: m(x))
    got = Net().apply(module.to_jax(), jtbridge.to_jax(x))
    torch.testing.assert_close(jtbridge.to_torch(got, copy=True), expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(ArgumentError, match=r"to_torch_module\(model, model.init"):
        jtbridge.to_torch_module(Net())
    with pytest.raises(ArgumentError, match=r"no `state=` with a model of Flax Linen"):
        jtbridge.to_torch_module(Net(), variables, {"batch_stats": {}})


@pytest.mark.parametrize("form", ["model", "method", "partial", "function"])
def test_collections_of_linen_beside_the_parameters_are_not_trained(form: str):
    nn = pytest.importorskip("flax.linen", reason="flax is in the environment of make test-models")

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x, train=False):
            return nn.BatchNorm(use_running_average=not train)(nn.Dense(2)(x))

    net = Net()
    variables = net.init(jax.random.key(0), jnp.ones((1, 3)))
    forms = {
        "model": net,
        "method": net.apply,
        "partial": functools.partial(net.apply, train=False),
        "function": lambda variables, x: net.apply(variables, x),
    }
    module = jtbridge.to_torch_module(forms[form], variables)
    assert {name for name, _ in module.named_buffers()} == {
        "batch_stats.BatchNorm_0.mean",
        "batch_stats.BatchNorm_0.var",
    }
    x = torch.randn(5, 3)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module(x).square().sum().backward()
    optimizer.step()
    trained = module.to_jax()
    assert jax.tree.structure(trained) == jax.tree.structure(variables)
    jax.tree.map(np.testing.assert_array_equal, trained["batch_stats"], variables["batch_stats"])
    gradient = jax.grad(lambda p: (net.apply({**variables, "params": p}, x.numpy()) ** 2).sum())(variables["params"])
    expected = jax.tree.map(lambda p, g: p - 0.1 * g, variables["params"], gradient)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), trained["params"], expected)
    if form == "method":
        out, updates = module(x, train=True, mutable=["batch_stats"])
        assert out.shape == (5, 2)
        assert set(updates) == {"batch_stats"}


def test_linen_with_state():
    nn = pytest.importorskip("flax.linen", reason="flax is in the environment of make test-models")

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(1)(nn.BatchNorm(use_running_average=False)(x))

    variables = Net().init(jax.random.key(0), jnp.ones((1, 3)))

    def apply(params, state, x):
        return Net().apply({"params": params, "batch_stats": state}, x, mutable=["batch_stats"])

    def run(params, state, x):
        out, updates = apply(params, state, x)
        return out, updates["batch_stats"]

    module = jtbridge.to_torch_module(run, variables["params"], variables["batch_stats"])
    before = module.get_buffer("BatchNorm_0.mean").clone()
    _train(module, lambda m, x: m(x), 2)
    assert not torch.equal(module.get_buffer("BatchNorm_0.mean"), before)
    params, state = module.to_jax()
    assert params.keys() == variables["params"].keys()
    assert state.keys() == variables["batch_stats"].keys()


def test_nnx_with_batch_norm_and_dropout():
    nnx = pytest.importorskip("flax.nnx", reason="flax is in the environment of make test-models")

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.hidden = nnx.List([nnx.Linear(3, 16, rngs=rngs)])
            self.norm = nnx.BatchNorm(16, rngs=rngs)
            self.dropout = nnx.Dropout(0.2, rngs=rngs)
            self.out = nnx.Linear(16, 1, rngs=rngs)

        def __call__(self, x):
            return self.out(self.dropout(jnp.tanh(self.norm(self.hidden[0](x)))))

    module = jtbridge.to_torch_module(Net(nnx.Rngs(0)))
    names = set(module.state_dict())
    assert {"hidden.0.kernel", "norm.mean", "dropout.rngs.key"} <= names
    assert "norm.mean" not in dict(module.named_parameters())
    x, _ = _data()
    assert not torch.equal(module(x), module(x))  # the stream of random numbers advances
    x, expected = _check_trained(module, lambda m, x: m(x))
    assert torch.equal(module(x), module(x))  # in evaluation mode nothing is dropped
    model = module.to_jax()
    assert isinstance(model, Net)
    model.eval()
    torch.testing.assert_close(jtbridge.to_torch(model(jtbridge.to_jax(x)), copy=True), expected, rtol=1e-4, atol=1e-5)


def test_equinox():
    eqx = pytest.importorskip("equinox", reason="equinox is in the environment of make test-models")
    module = jtbridge.to_torch_module(eqx.nn.MLP(3, 1, 16, 1, key=jax.random.key(0)))
    assert "layers.0.weight" in module.state_dict()
    x, expected = _check_trained(module, lambda m, x: torch.func.vmap(m)(x))
    model = module.to_jax()
    got = jax.vmap(model)(jtbridge.to_jax(x))
    torch.testing.assert_close(jtbridge.to_torch(got, copy=True), expected, rtol=1e-4, atol=1e-5)


def test_equinox_with_dropout_follows_the_mode():
    eqx = pytest.importorskip("equinox", reason="equinox is in the environment of make test-models")
    module = jtbridge.to_torch_module(eqx.nn.Dropout(0.5))
    key, x = jax.random.key(0), torch.ones(64)
    assert 0 < (module.train()(x, key=key) == 0).sum() < 64
    assert torch.equal(module.eval()(x, key=key), x)


@pytest.mark.parametrize("library", ["flax.nnx", "equinox"])
@pytest.mark.parametrize("fullgraph", [False, True])
def test_torch_compile_of_modules(fullgraph: bool, library: str):
    found = pytest.importorskip(library, reason="it is in the environment of make test-models")
    if library == "equinox":
        model = found.nn.Linear(3, 2, key=jax.random.key(0))
    else:
        model = found.Linear(3, 2, rngs=found.Rngs(0))
    module, x = jtbridge.to_torch_module(model), torch.ones(3)
    torch.compiler.reset()
    for mode in (True, False):
        module.train(mode)
        torch.testing.assert_close(torch.compile(module, backend="eager", fullgraph=fullgraph)(x), module(x))


def test_parameter_names_do_not_replace_module_attributes():
    module = jtbridge.to_torch_module(
        lambda p, x: x * p["train"] + p["a.b"], {"train": jnp.ones(()), "a.b": jnp.ones(())}
    )
    assert set(module.state_dict()) == {"train_", "a_b"}
    assert module.train()(torch.ones(2)).tolist() == [2.0, 2.0]


def test_arrays_that_are_not_trained():
    params = {"w": jnp.ones(2), "steps": jnp.arange(3), "key": jax.random.key(1), "static": "text"}

    def f(params, x):
        assert params["static"] == "text"
        return params["w"] * x + params["steps"].sum() + jax.random.uniform(params["key"])

    module = jtbridge.to_torch_module(f, params)
    assert [name for name, _ in module.named_parameters()] == ["w"]
    assert {name for name, _ in module.named_buffers()} == {"key", "steps"}
    expected = f(params, jnp.ones(2))
    torch.testing.assert_close(module(torch.ones(2)), jtbridge.to_torch(expected, copy=True))
    again = module.to_jax()
    assert again["steps"].dtype == jnp.int32
    assert jax.random.key_data(again["key"]).tolist() == jax.random.key_data(params["key"]).tolist()


def test_unsigned_integers_are_stored_as_signed_bits():
    """The torch module holds signed integers, because torch cannot average unsigned ones or send them to processes."""
    counts = {"small": jnp.uint16(2**16 - 1), "large": np.array([2**32 - 2, 1], np.uint32)}
    counts["key"] = jax.random.key(2**32 - 3)

    def f(params, state, x):
        assert (state["small"].dtype, state["large"].dtype) == (jnp.uint16, jnp.uint32)
        number = jax.random.uniform(state["key"])
        large = (state["large"] // 2).astype(jnp.float32)  # of signed integers it would be negative
        new = {"small": state["small"] + jnp.uint16(2), "large": state["large"] + jnp.uint32(1)}
        return x + number + large, {**new, "key": jax.random.fold_in(state["key"], 1)}

    module = jtbridge.to_torch_module(f, {}, counts)
    assert {x.dtype for x in module.buffers()} == {torch.int16, torch.int32}
    averaged = torch.optim.swa_utils.AveragedModel(module, use_buffers=True)
    state = counts
    for _ in range(3):
        expected, state = f({}, state, jnp.zeros(2))
        torch.testing.assert_close(module(torch.zeros(2)), jtbridge.to_torch(expected, copy=True))
        averaged.update_parameters(module)
        _, again = module.to_jax()
        for name in ("small", "large"):
            assert again[name].dtype == counts[name].dtype
            np.testing.assert_array_equal(again[name], state[name])
        np.testing.assert_array_equal(jax.random.key_data(again["key"]), jax.random.key_data(state["key"]))


@pytest.mark.parametrize("place", ["params", "state"])
def test_torch_tensors_in_a_model_are_refused(place: str):
    trees = {"params": {}, "state": {}} | {place: {"w": [torch.ones(3)]}}
    with pytest.raises(ArgumentError, match=rf"`{place}\['w'\]\[0\]` is a torch tensor"):
        jtbridge.to_torch_module(lambda params, state, x: (x, state), **trees)


def _two_layers(params, state, x):
    return x @ params["a"]["w"] + 2 * x @ params["b"]["w"], {"sums": {"x": state["sums"]["x"] + x.sum()}}


def _layers():
    params = {name: {"w": jnp.full((3, 2), value)} for name, value in (("a", 1.0), ("b", 10.0))}
    return jtbridge.to_torch_module(_two_layers, params, {"sums": {"x": jnp.zeros(())}})


@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_replaced_submodules_are_used(how: str):
    torch.compiler.reset()
    module, other, x = _layers(), _layers(), torch.ones(3)
    call = torch.compile(module, backend="eager") if how == "compiled" else module
    assert call(x).tolist() == [63.0, 63.0]
    with torch.no_grad():
        other.a.w.fill_(2)
    module.a, module.sums = other.a, other.sums
    call(x).sum().backward()
    assert call(x).tolist() == [66.0, 66.0]
    assert other.a.w.grad is not None
    assert other.a.w.grad.tolist() == [[1.0, 1.0]] * 3
    assert other.sums.x.item() == 6
    params, state = module.to_jax()
    assert params["a"]["w"].tolist() == [[2.0, 2.0]] * 3
    assert state["sums"]["x"] == 6
    module.b = module.a  # tied
    module.a.w.grad = None
    call(x).sum().backward()
    assert module.a.w.grad.tolist() == [[3.0, 3.0]] * 3
    twin = copy.deepcopy(module)
    with torch.no_grad():
        twin.a.w.zero_()
    assert twin(x).tolist() == [0.0, 0.0]
    assert module(x).tolist() == [18.0, 18.0]
    del module.b
    with pytest.raises(ModelError, match=r"needs the tensor `b\.w`, but it was set to None or removed"):
        module(x)


def test_unsupported_module_operations_are_refused():
    module = jtbridge.to_torch_module(lambda p, x: x * p["w"], {"w": jnp.ones(2)})
    with pytest.raises(ModelError, match=r"cannot be pickled. Save `module.state_dict"):
        pickle.dumps(module)
    module.register_parameter("w", None)
    with pytest.raises(ModelError, match="needs the tensor `w`, but it was set to None"):
        module(torch.ones(2))


def test_invalid_models_are_refused():
    for wrong, text in [
        (torch.nn.Linear(1, 1), "torch module"),
        (jnp.sin, "and a function|or a function and its parameters"),
        (3, "or a function and its parameters"),
    ]:
        with pytest.raises(ArgumentError, match=text):
            jtbridge.to_torch_module(wrong)
    with pytest.raises(ArgumentError, match="without parameters"):
        jtbridge.to_torch_module(jnp.sin, state={})
    with pytest.raises(ArgumentError, match="must return"):
        jtbridge.to_torch_module(lambda p, s, x: x, {}, {"a": jnp.ones(())})(torch.ones(1))


@pytest.mark.parametrize("library", ["flax.nnx", "equinox"])
def test_mode_is_set_for_the_whole_module(library: str):
    found = pytest.importorskip(library, reason="it is in the environment of make test-models")
    if library == "equinox":
        parts = [found.nn.Linear(3, 3, key=jax.random.key(0)), found.nn.Dropout(0.5, inference=True)]
        module = jtbridge.to_torch_module(found.nn.Sequential(parts))
    else:
        module = jtbridge.to_torch_module(found.Sequential(found.BatchNorm(3, rngs=found.Rngs(0))))
    part = next(each for each in module.modules() if each is not module and list(each.parameters(recurse=False)))
    for mode in (True, False):
        torch.nn.Sequential(module).train(mode)
        assert {each.training for each in module.modules()} == {mode}
        assert part.train(mode) is part
        with pytest.raises(ModelError, match="of a part of a JAX model has no effect"):
            part.train(not mode)
        assert {each.training for each in copy.deepcopy(module).train(not mode).modules()} == {not mode}


def test_parts_of_a_model_without_modes_may_have_any():
    module = jtbridge.to_torch_module(lambda p, x: x * p["a"]["b"], {"a": {"b": jnp.ones(())}})
    assert not module.a.eval().training
    assert module.train().a.training
