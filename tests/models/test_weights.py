"""Weights in and out: `state_dict`, safetensors, `load`, and the release of torch's copy."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch

import jtbridge
from jtbridge.errors import ArgumentError, ModelError
from tests.models.zoo import MODULES, make

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*nested tensor.*:UserWarning"),
]
names = pytest.mark.parametrize("name", MODULES)


class WithExtraState(torch.nn.Linear):
    """A module with a `state_dict` entry that is not a tensor."""

    def __init__(self):
        super().__init__(2, 2)
        self.note = "a"

    def get_extra_state(self) -> Any:
        return {"note": self.note}

    def set_extra_state(self, state: Any) -> None:
        self.note = state["note"]


def changed(tree: Any) -> Any:
    return jax.tree.map(lambda a: a + 1 if jnp.issubdtype(a.dtype, jnp.inexact) else a, tree)


def equal(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert list(a) == list(b)
    for key, value in a.items():
        assert value.shape == b[key].shape
        assert value.dtype == b[key].dtype
        assert torch.equal(value, b[key])


@names
def test_state_dict_matches_torch(name: str):
    model, _ = make(name)
    net = jtbridge.module(model)
    params, state = net.init()
    ours, theirs = net.state_dict(params, state), model.state_dict()
    equal(ours, theirs)
    assert ours._metadata == theirs._metadata  # type: ignore[attr-defined]


@names
def test_state_dict_round_trip(name: str):
    model, _ = make(name)
    net = jtbridge.module(model)
    params, state = net.init()
    new = changed(params)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    loaded, rest = net.from_state_dict(net.state_dict(new, state))
    jax.tree.map(np.testing.assert_array_equal, loaded, new)
    jax.tree.map(np.testing.assert_array_equal, rest, state)
    equal(before, dict(model.state_dict()))


@names
def test_safetensors_file_round_trip(name: str, tmp_path):
    model, _ = make(name)
    net = jtbridge.module(model)
    params, state = net.init()
    new = changed(params)
    net.save_safetensors(tmp_path / "model.safetensors", new, state, metadata={"step": "3"})
    loaded, rest = net.load_safetensors(tmp_path / "model.safetensors")
    jax.tree.map(np.testing.assert_array_equal, loaded, new)
    jax.tree.map(np.testing.assert_array_equal, rest, state)
    with safetensors.safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata()["format"] == "pt"
        assert file.metadata()["step"] == "3"
    safetensors.torch.load_model(model, tmp_path / "model.safetensors")
    equal(dict(model.state_dict()), net.state_dict(new, state))


def test_file_written_by_safetensors_is_read(tmp_path):
    model, _ = make("tied")
    net = jtbridge.module(model)
    params, _ = net.init()
    safetensors.torch.save_model(model, tmp_path / "model.safetensors")
    loaded, _ = net.load_safetensors(tmp_path / "model.safetensors")
    jax.tree.map(np.testing.assert_array_equal, loaded, params)


def test_tied_entries():
    model, _ = make("tied")
    net = jtbridge.module(model)
    params, state = net.init()
    full = net.state_dict(params, state)
    assert full["out.weight"] is full["embed.weight"] or torch.equal(full["out.weight"], full["embed.weight"])
    one = {key: value for key, value in full.items() if key != "embed.weight"}
    loaded, _ = net.from_state_dict(one)
    np.testing.assert_array_equal(loaded["embed.weight"], params["embed.weight"])
    with pytest.raises(ModelError, match=r"`embed.weight` and `out.weight` are one tensor"):
        net.from_state_dict({**full, "out.weight": full["out.weight"] + 1})
    ids = jnp.array([[1, 2]])
    with pytest.raises(ModelError, match=r"`out.weight` is in `params` or `state`"):
        net({**params, "out.weight": params["embed.weight"]}, state, ids)


def test_extra_state_and_dtypes():
    net = jtbridge.module(WithExtraState().double())
    params, state = net.init()
    ours = net.state_dict(params, state)
    assert ours["_extra_state"] == {"note": "a"}
    assert ours["weight"].dtype is torch.float64
    loaded, _ = net.from_state_dict(ours)
    np.testing.assert_array_equal(loaded["weight"], params["weight"])
    half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
    assert net.state_dict(half, state)["weight"].dtype is torch.bfloat16  # a dtype that the user chose


def test_extra_state_that_differs_is_refused():
    model, other = WithExtraState(), WithExtraState()
    other.note = "b"
    net = jtbridge.module(model)
    with pytest.raises(ModelError, match=r"sets the attribute `note` of `WithExtraState` from 'a' to 'b'.*first"):
        net.from_state_dict(other.state_dict())
    model.load_state_dict(other.state_dict())
    params, state = net.from_state_dict(other.state_dict())
    assert net.state_dict(params, state)["_extra_state"] == {"note": "b"}


def test_extra_state_is_refused_in_safetensors(tmp_path):
    net = jtbridge.module(WithExtraState())
    with pytest.raises(ModelError, match="`_extra_state` is a dict"):
        net.save_safetensors(tmp_path / "x", *net.init())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.pop("0.weight"), r"Missing key.*0.weight"),
        (lambda d: d.update(extra=torch.ones(1)), r"Unexpected key.*extra"),
        (lambda d: d.update({"0.weight": torch.ones(2, 2)}), r"size mismatch for 0.weight"),
        (
            lambda d: d.update({"0.weight": d["0.weight"].bfloat16()}),
            r"`0.weight` is torch.bfloat16, expected",
        ),
    ],
)
def test_a_state_dict_that_does_not_fit_is_refused(change: Any, message: str):
    model = torch.nn.Sequential(torch.nn.Linear(3, 2))
    state_dict = dict(model.state_dict())
    change(state_dict)
    with pytest.raises(ModelError, match=message):
        jtbridge.module(model).from_state_dict(state_dict)


def test_entries_may_be_missing_if_not_strict():
    model = torch.nn.Sequential(torch.nn.Linear(3, 2))
    params, _ = jtbridge.module(model).from_state_dict({"0.bias": np.zeros(2, np.float32), "x": 1}, strict=False)
    np.testing.assert_array_equal(params["0.bias"], 0)
    np.testing.assert_array_equal(params["0.weight"], model[0].weight.detach())


@names
def test_load_writes_into_the_tensors_of_the_module(name: str):
    model, _ = make(name)
    net = jtbridge.module(model)
    params, state = net.init()
    new = changed(params)
    before = {key: id(p) for key, p in model.named_parameters()}
    assert net.load(new, state) is model
    assert before == {key: id(p) for key, p in model.named_parameters()}
    equal(dict(model.state_dict()), net.state_dict(new, state))


def test_load_refuses_another_shape():
    model = torch.nn.Linear(3, 2)
    net = jtbridge.module(model)
    params, state = net.init()
    with pytest.raises(ModelError, match=r"`weight` has shape \(2, 3, 1\), and `Linear` has \(2, 3\)"):
        net.load({**params, "weight": params["weight"][..., None]}, state)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("weight", jnp.ones(2, complex)),
        ("num_batches_tracked", jnp.array(2.5)),
        ("num_batches_tracked", 1j * np.ones(())),
    ],
)
def test_load_refuses_values_out_of_range_of_the_dtype(name: str, value: Any):
    model = torch.nn.BatchNorm1d(2)
    net = jtbridge.module(model)
    params, state = net.init()
    with pytest.raises(ModelError, match=rf"`{name}` is .*has torch\.\w+ in torch, which cannot hold"):
        net.load(
            *({key: value if key == name else 7 * array for key, array in part.items()} for part in (params, state))
        )
    np.testing.assert_array_equal(model.weight.detach(), 1)


def test_integers_that_need_64_bits():
    model = torch.nn.Linear(1, 1)
    model.register_buffer("prime", torch.tensor([3, 2**40]))
    net = jtbridge.module(model)
    for start in (net.init, lambda: net.from_state_dict(model.state_dict())):
        with pytest.raises(ModelError, match=r"`prime` has the value 1099511627776.*jax_enable_x64"):
            start()
        with jax.enable_x64(True):
            assert start()[1]["prime"][1] == 2**40


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Holder:
    """A pytree with the attributes of an array, as a variable of Flax NNX is one."""

    value: jax.Array
    shape = (2,)
    dtype = np.dtype(np.float32)


@pytest.mark.parametrize("leaf", [1.0, [1.0, 2.0], None, Holder(jnp.ones(2))])
def test_leaf_that_is_not_an_array_is_refused(leaf: Any):
    net = jtbridge.module(torch.nn.Linear(1, 2))
    params, state = net.init()
    wrong = {**params, "bias": leaf}
    x = jnp.ones((1, 1))
    for use in (
        lambda: net(wrong, state, x),
        lambda: jax.jit(lambda x: net(wrong, state, x)[0])(x),
        lambda: net.load(wrong, state),
        lambda: net.state_dict(params, {"extra": leaf}),
    ):
        with pytest.raises(ArgumentError, match=r"must have arrays by name, but `\w+\['\w+'\]` is a"):
            use()


def test_weights_are_not_written_while_jax_traces():
    net = jtbridge.module(torch.nn.Linear(1, 2))
    params, state = net.init()
    for use in (net.load, net.state_dict):
        with pytest.raises(ArgumentError, match=r"inside `jax.jit`.*call the method outside"):
            jax.jit(lambda params, use=use: use(params, state) and params)(params)


@pytest.mark.parametrize("given", ["model.pt", torch.nn.Linear(1, 2)])
def test_a_state_dict_is_a_dict(given: Any):
    with pytest.raises(ArgumentError, match=r"takes a dict of tensors by name.*but got a"):
        jtbridge.module(torch.nn.Linear(1, 2)).from_state_dict(given)


@names
def test_release(name: str):
    model, args = make(name)
    expected = model.eval()(*args)
    old = list(model.parameters())
    net = jtbridge.module(model)
    params, state = net.init(release=True)
    assert all(not p.numel() for p in old)
    with pytest.raises(ModelError, match="weights of the torch module were released"):
        model(*args)
    with pytest.raises(ModelError, match="weights of the torch module were released"):
        model.state_dict()
    with pytest.raises(ModelError, match="was released by"):
        net.init()
    inputs = jtbridge.to_jax(args)
    for call in (net, jax.jit(net)):
        np.testing.assert_allclose(call(params, state, *inputs)[0], expected.detach(), rtol=1e-5, atol=1e-5)
    saved = net.state_dict(params, state)
    loaded, rest = net.from_state_dict(saved)
    jax.tree.map(np.testing.assert_array_equal, loaded, params)
    jax.tree.map(np.testing.assert_array_equal, rest, state)
    net.load(params, state)
    np.testing.assert_allclose(model(*args).detach(), expected.detach(), rtol=1e-5, atol=1e-5)
    assert all(isinstance(p, torch.nn.Parameter) for p in model.parameters())
    equal(dict(model.state_dict()), saved)


class HeldTwice(torch.nn.Module):
    """A module that also has its parameter in containers."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))
        self.row = (self.weight, "weight")
        self.table = {1: self.weight, "rows": [self.row]}
        self.outside = [torch.nn.Module()]
        self.outside[0].weight = self.weight
        self.outside[0].parent = [self]  # type: ignore[assignment]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = (self.weight, self.table[1], self.table["rows"][0][0], self.outside[0].weight)
        return x * sum(weights)


def test_released_weight_in_containers_is_restored():
    model = HeldTwice()
    net = jtbridge.module(model)
    params, state = net.init(release=True)
    assert state == {}
    assert net(params, state, jnp.ones(2))[0].tolist() == [4, 4]
    with pytest.raises(ModelError, match="weights of the torch module were released"):
        model(torch.ones(2))
    net.load({"weight": 2 * params["weight"]}, state)
    assert model(torch.ones(2)).tolist() == [8, 8]
    held = (model.table[1], model.table["rows"][0][0], model.row[0], model.outside[0].weight)
    assert all(weight is model.weight for weight in held)


def test_a_released_module_has_shapes_and_can_be_copied():
    model = torch.nn.Linear(3, 2)
    net = jtbridge.module(model)
    params, state = net.init(release=True)
    assert model.weight.shape == (2, 3)
    assert model.weight.requires_grad
    assert "released tensor of shape (2, 3)" in repr(model.weight)
    assert sum(p.numel() for p in model.parameters()) == 8
    x = jnp.ones((1, 3))
    expected, _ = net(params, state, x)
    for other in (copy.copy(net), copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        np.testing.assert_array_equal(other(params, state, x)[0], expected)


def test_copies_and_pickles_of_a_net():
    net = jtbridge.module(torch.nn.Linear(3, 2), backend="xla")
    params, state = net.init()
    x = jnp.ones((1, 3))
    expected, _ = net(params, state, x)
    for other in (copy.copy(net), copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        np.testing.assert_array_equal(other(params, state, x)[0], expected)


def test_to_jax_refuses_modules_and_generators():
    model = torch.nn.Linear(3, 2)
    with pytest.raises(ArgumentError, match=r"jtbridge.module\(model\).init\(\)"):
        jtbridge.to_jax(model)
    with pytest.raises(ArgumentError, match=r"jax.random.key\(generator.initial_seed\(\)\)"):
        jtbridge.to_jax(torch.Generator())
    with pytest.raises(ArgumentError, match=r"dict\(model.named_parameters\(\)\)"):
        jtbridge.to_jax(model.named_parameters())


class Remembers(torch.nn.Module):
    """A module whose call makes attributes."""

    def __init__(self):
        super().__init__()
        self.lin = torch.nn.Linear(2, 2)
        self.last: Any = None
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = x + 1
        self.made = x + 2
        self.seen.append(x + 3)
        return self.lin(x)


USES: dict[str, Any] = {
    "call": lambda net, params, state, path: net(params, state, jnp.ones(2)),
    "load": lambda net, params, state, path: net.load(params, state),
    "state_dict": lambda net, params, state, path: net.state_dict(params, state),
    "save_safetensors": lambda net, params, state, path: net.save_safetensors(path, params, state),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("name", ["nothing", "lin.nothing", "lin.weight.x", "nothing.x", "lin", "forward", "seen.5"])
def test_an_unknown_name_is_refused(use: str, name: str, tmp_path):
    net = jtbridge.module(Remembers())
    params, state = net.init()
    with pytest.raises(ModelError, match=f"`{name}` is in `params` or `state`, and `Remembers` has no such tensor"):
        USES[use](net, params, {**state, name: jnp.ones(2)}, tmp_path / "model")
    assert not hasattr(net.module, "nothing")
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("use", USES)
def test_tensors_created_by_a_call_are_accepted(use: str, tmp_path):
    net = jtbridge.module(Remembers())
    params, state = net.init()
    for _ in range(2):
        _, changed = net(params, state, jnp.ones(2))
        state |= changed
    assert sorted(state) == ["last", "made", "seen.0", "seen.1"]
    USES[use](net, params, state, tmp_path / "model")
    if use == "load":
        assert net.module.made.tolist() == [3, 3]
        assert [tensor.tolist() for tensor in net.module.seen] == [[4, 4], [4, 4]]


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(2, 2, bias=False)
        self.b = torch.nn.Linear(2, 2, bias=False)
        self.b.weight = self.a.weight


class Fused(torch.nn.Module):
    """Its `state_dict` has the rows of one parameter under three names, as layers of attention do."""

    def __init__(self):
        super().__init__()
        self.fused = torch.nn.Parameter(torch.arange(12.0).reshape(6, 2))
        self.register_state_dict_post_hook(self.split)

    @staticmethod
    def split(module, state_dict, prefix, metadata):
        for name, rows in zip("qkv", state_dict.pop(f"{prefix}fused").split(2), strict=True):
            state_dict[prefix + name] = rows

    def forward(self, x):
        return x @ self.fused.T


def test_different_parts_of_one_parameter_are_not_tied(tmp_path):
    net = jtbridge.module(Fused())
    params, state = net.init()
    net.save_safetensors(tmp_path / "m.safetensors", params, state)
    loaded = safetensors.torch.load_file(tmp_path / "m.safetensors")
    for i, name in enumerate("qkv"):
        np.testing.assert_array_equal(loaded[name], params["fused"][2 * i : 2 * i + 2])


def test_tied_entries_may_hold_nan_and_may_be_missing():
    net = jtbridge.module(Tied())
    params, state = net.init()
    params = jax.tree.map(lambda p: p * jnp.nan, params)
    found, _ = net.from_state_dict(net.state_dict(params, state))
    assert jnp.isnan(found["a.weight"]).all()
    found, _ = net.from_state_dict({}, strict=False)
    assert jnp.array_equal(found["a.weight"], net.init()[0]["a.weight"])


def test_metadata_text_is_not_a_tensor_name(tmp_path):
    net = jtbridge.module(torch.nn.Linear(2, 2))
    params, state = net.init()
    net.save_safetensors(tmp_path / "file", params, state, metadata={"base": "weight"})
    found, _ = net.load_safetensors(tmp_path / "file")
    assert found.keys() == params.keys()
    assert jnp.array_equal(found["weight"], params["weight"])


def test_load_replaces_an_expanded_buffer():
    model = torch.nn.Linear(2, 2)
    model.register_buffer("places", torch.arange(2).expand(3, 2), persistent=False)
    net = jtbridge.module(model)
    params, _ = net.init()
    places = jnp.arange(6).reshape(3, 2)
    net.load(params, {"places": places})
    assert model.places.tolist() == places.tolist()
    assert model.places.dtype == torch.int64
