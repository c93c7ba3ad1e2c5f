"""Parameters over eight devices: rules, presets, errors, and loading part by part."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import jtbridge
from jtbridge.errors import ArgumentError, DeviceError, ModelError, ShardingError, ShardingWarning

from .zoo import Tied


class Block(torch.nn.Module):
    """Two layers with names that the preset "tensor" knows, and a buffer that is not a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.up_proj = torch.nn.Linear(16, 32)
        self.norm = torch.nn.BatchNorm1d(32)
        self.down_proj = torch.nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(torch.tanh(self.norm(self.up_proj(x))))


@pytest.fixture
def model() -> Block:
    torch.manual_seed(0)
    return Block()


def mesh_of(*sizes: int, names: tuple[str, ...] = ("data", "model")) -> Mesh:
    return jax.make_mesh(sizes, names[-len(sizes) :], devices=jax.devices()[: int(np.prod(sizes))])


def specs(tree: dict[str, Any]) -> dict[str, Any]:
    return {name: x.sharding.spec for name, x in tree.items()}


def largest_share(params: dict[str, Any]) -> float:
    """Return the bytes of parameters on the device that holds most, as a fraction of the size of all parameters."""
    on_device: Counter[Any] = Counter()
    for x in params.values():
        for part in x.addressable_shards:
            on_device[part.device] += part.data.nbytes
    return max(on_device.values()) / sum(x.nbytes for x in params.values())


def test_first_matching_pattern_chooses_the_spec(model):
    params, _ = jtbridge.module(model).init()
    rules = {"up_proj.weight": P("model", None), "*.bias": None, "*_proj.weight": P(None, "model"), "*": P()}
    found = jtbridge.shard(params, mesh_of(8), rules)
    assert specs(found) == {
        "up_proj.weight": P("model", None),
        "up_proj.bias": P(),
        "norm.weight": P(),
        "norm.bias": P(),
        "down_proj.weight": P(None, "model"),
        "down_proj.bias": P(),
    }
    assert found["up_proj.weight"].addressable_shards[0].data.shape == (4, 16)
    jax.tree.map(np.testing.assert_array_equal, found, params)


def test_star_is_the_only_wildcard():
    rules = {"w[0]": P("model"), "w?": P("model"), "*": P()}
    found = jtbridge.shard({name: np.ones(8) for name in ("w[0]", "w0", "w?")}, mesh_of(8), rules)
    assert specs(found) == {"w[0]": P("model"), "w0": P(), "w?": P("model")}


def test_presets_split_by_name_or_by_the_largest_axis(model):
    params, _ = jtbridge.module(model).init()
    assert specs(jtbridge.shard(params, mesh_of(8), "tensor")) == {
        "up_proj.weight": P("model", None),
        "up_proj.bias": P("model"),
        "norm.weight": P(),
        "norm.bias": P(),
        "down_proj.weight": P(None, "model"),
        "down_proj.bias": P(),
    }
    fully = jtbridge.shard(params, mesh_of(8, names=("data",)), "fsdp")
    assert specs(fully)["up_proj.weight"] == P("data", None)
    assert specs(fully)["down_proj.weight"] == P(None, "data")
    assert largest_share(fully) == 1 / 8
    both = jtbridge.shard(params, mesh_of(2, 4), "tensor+fsdp")
    assert specs(both)["up_proj.weight"] == P("model", "data")
    assert specs(both)["norm.bias"] == P("data")
    assert largest_share(jtbridge.shard(params, mesh_of(2, 4), "replicated")) == 1


def test_a_rule_may_be_a_preset(model):
    params, _ = jtbridge.module(model).init()
    found = specs(jtbridge.shard(params, mesh_of(8), {"up_proj.*": P(), "*": "tensor"}))
    assert found["up_proj.weight"] == P()
    assert found["down_proj.weight"] == P(None, "model")


@pytest.mark.parametrize("release", [False, True])
def test_init_distributes_parameters_and_replicates_buffers(model, release):
    expected, expected_state = jtbridge.module(model).init()
    params, state = jtbridge.module(model).init(release=release, mesh=mesh_of(8), rules="fsdp")
    assert largest_share(params) == 1 / 8
    assert {x.sharding.is_fully_replicated for x in state.values()} == {True}
    jax.tree.map(np.testing.assert_array_equal, (params, state), (expected, expected_state))


def test_a_spec_may_name_a_buffer(model):
    rules = {"norm.running_mean": P("model"), "*": "fsdp"}
    _, state = jtbridge.module(model).init(mesh=mesh_of(8), rules=rules)
    assert specs(state) == {"norm.running_mean": P("model"), "norm.running_var": P(), "norm.num_batches_tracked": P()}


def test_frozen_parameters_are_distributed_too(model):
    model.requires_grad_(False)
    params, state = jtbridge.module(model).init(mesh=mesh_of(8), rules="tensor")
    assert params == {}
    assert state["up_proj.weight"].sharding.spec == P("model", None)


def test_torch_and_numpy_arrays_are_distributed_in_parts(monkeypatch):
    tree = {"a": torch.arange(64.0).reshape(8, 8).T, "b": np.arange(16.0), "c": torch.ones(8, dtype=torch.bfloat16)}
    parts = recorded_parts(monkeypatch)
    found = jtbridge.shard(tree, mesh_of(8), {"*": P("model")})
    assert sorted(parts) == [1] * 8 + [2] * 8 + [8] * 8
    np.testing.assert_array_equal(found["a"], tree["a"])
    assert [x.dtype for x in found.values()] == [jnp.float32, jnp.float32, jnp.bfloat16]


def recorded_parts(monkeypatch) -> list[int]:
    """Return a list that records the sizes of the parts that are put on devices from now on."""
    parts: list[int] = []
    make = jax.make_array_from_callback

    def recording(shape, sharding, callback):
        def part(index):
            value = callback(index)
            parts.append(value.size)
            return value

        return make(shape, sharding, part)

    monkeypatch.setattr(jax, "make_array_from_callback", recording)
    return parts


def test_the_state_of_an_optimizer_has_the_shardings_of_the_parameters(model):
    optax = pytest.importorskip("optax")
    mesh = mesh_of(8)
    params, _ = jtbridge.module(model).init(mesh=mesh, rules="tensor")
    first = optax.adamw(1e-3).init(params)
    again = jtbridge.shard(first, mesh, "tensor")
    for adam in (first[0], again[0]):
        assert specs(adam.mu) == specs(adam.nu) == specs(params)
    assert again[0].count.sharding.spec == P()
    assert len(again[0].count.sharding.device_set) == 8


def test_optimizer_groups_are_not_part_of_names():
    optax = pytest.importorskip("optax")
    mesh = mesh_of(8, names=("data",))
    rules = {"0.weight": P("data"), "1.weight": P(None, "data"), "*": P()}
    net = jtbridge.module(torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)))
    params, _ = net.init(mesh=mesh, rules=rules)
    groups = {"slow": optax.adam(1e-4), "fast": optax.adam(1e-2)}
    optimizers = {
        "multi_transform": optax.multi_transform(groups, {name: "slow" if "0" in name else "fast" for name in params}),
        "named_chain": optax.named_chain(("first", optax.adam(1e-2)), ("second", optax.scale(1.0))),
    }
    for optimizer in optimizers.values():
        state = jtbridge.shard(optimizer.init(params), mesh, rules)
        for path, leaf in jax.tree_util.tree_leaves_with_path(state):
            key = path[-1]
            if isinstance(key, jax.tree_util.DictKey):
                assert leaf.sharding.is_equivalent_to(params[key.key].sharding, leaf.ndim), path


# The shardings of an optimizer's arrays for a weight (8, 16) that is split along its first axis, and a bias (8,).
OF_OPTIMIZERS: dict[str, dict[tuple[int, ...], Any]] = {
    "adamw": {(8, 16): P("model", None), (8,): P("model")},
    "lion": {(8, 16): P("model", None), (8,): P("model")},
    "adafactor": {(16,): P(), (8,): P("model"), (1,): P()},
    "lbfgs": {
        (8, 16): P("model", None),
        (3, 8, 16): P(None, "model", None),
        (8,): P("model"),
        (3, 8): P(None, "model"),
    },
    "sm3": {(8, 16): P("model", None), (8,): P("model"), (16,): P()},
}


@pytest.mark.parametrize("name", OF_OPTIMIZERS)
def test_optimizer_state_may_have_other_shapes_than_parameters(name: str):
    optax = pytest.importorskip("optax")
    options: dict[str, Any] = {"adafactor": {"min_dim_size_to_factor": 8}, "lbfgs": {"memory_size": 3}}
    optimizer = getattr(optax, name)(0.1, **options.get(name, {}))
    mesh = mesh_of(4)
    params = {"weight": jnp.ones((8, 16)), "bias": jnp.ones(8)}
    rules = {"weight": P("model", None), "bias": P("model")}
    params = jtbridge.shard(params, mesh, rules)
    state = jtbridge.shard(optimizer.init(params), mesh, rules, params=params)
    found = {leaf.shape: leaf.sharding for leaf in jax.tree.leaves(state)}
    for shape, spec in OF_OPTIMIZERS[name].items():
        assert found[shape].is_equivalent_to(jax.NamedSharding(mesh, spec), len(shape)), shape
    shapes = jax.eval_shape(optimizer.init, params)
    assert jtbridge.shardings(shapes, mesh, rules, params=params) == jax.tree.map(lambda leaf: leaf.sharding, state)


def test_optimizer_array_with_an_ambiguous_axis_is_not_split():
    mesh = mesh_of(4)
    params = {"weight": jnp.ones((8, 8))}
    found = jtbridge.shard([{"weight": jnp.ones(8)}], mesh, {"weight": P("model")}, params=params)
    assert found[0]["weight"].sharding.spec == P()


def test_error_explains_optimizer_state_without_matching_rules():
    with pytest.raises(ShardingError, match=r"has 2 entries.*`jtbridge.shard\(..., params=params\)`"):
        jtbridge.shard([{"weight": jnp.ones(8)}], mesh_of(4), {"weight": P("model", None)})


def test_shardings_match_shard_without_placing_arrays(model):
    params, _ = jtbridge.module(model).init()
    shapes = jax.eval_shape(lambda: params)
    found = jtbridge.shardings(shapes, mesh_of(8), "tensor")
    assert {name: x.spec for name, x in found.items()} == specs(jtbridge.shard(params, mesh_of(8), "tensor"))
    out = jax.jit(lambda p: p, out_shardings=found)(params)
    assert specs(out) == {name: x.spec for name, x in found.items()}


def test_mesh_axes_of_any_type_are_treated_as_auto(model):
    mesh = mesh_of(8)
    assert mesh.axis_types == (AxisType.Explicit,)
    params, state = jtbridge.module(model).init(mesh=mesh, rules="tensor")
    assert params["up_proj.weight"].sharding.mesh.axis_types == (AxisType.Auto,)
    batch = jtbridge.shard_batch(np.ones((8, 16), np.float32), mesh)
    out, _ = jax.jit(jtbridge.module(model))(params, state, batch)
    np.testing.assert_allclose(out, model.eval()(torch.ones(8, 16)).detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("sizes", "names"), [((8,), ("data",)), ((2, 4), ("data", "model")), ((8,), ("model",))])
def test_values_gradients_and_changed_state_match_one_device(model, sizes, names):
    net = jtbridge.module(model)
    mesh = mesh_of(*sizes, names=names)
    rules = {("data",): "fsdp", ("data", "model"): "tensor+fsdp", ("model",): "tensor"}[names]

    @jax.jit
    def run(params, state, x):
        def loss(params):
            out, changed = net(params, state, x, train=True)
            return jnp.mean(out**2), changed

        return jax.value_and_grad(loss, has_aux=True)(params)

    @jax.jit
    def constrained(params, state, x):
        value, gradients = run(params, state, x)
        return value, jtbridge.shard(gradients, mesh, rules)

    x = np.random.default_rng(0).normal(size=(16, 16)).astype(np.float32)
    expected = run(*net.init(), x)
    params, state = net.init(mesh=mesh, rules=rules)
    found = constrained(params, state, jtbridge.shard_batch(x, mesh))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, expected)
    (_, changed), gradients = found
    assert "norm.running_mean" in changed
    for name, gradient in gradients.items():
        assert gradient.sharding.is_equivalent_to(params[name].sharding, gradient.ndim), name


def test_batch_is_sharded_over_the_data_axes():
    batch = {"x": np.arange(32.0).reshape(16, 2), "y": torch.arange(16), "scale": 2.0}
    found = jtbridge.shard_batch(batch, mesh_of(2, 4))
    assert specs(found) == {"x": P("data"), "y": P("data"), "scale": P()}
    assert found["x"].addressable_shards[0].data.shape == (8, 2)
    jax.tree.map(np.testing.assert_array_equal, found, batch)
    assert jtbridge.shard_batch(batch["x"], mesh_of(8)).sharding.is_fully_replicated
    over_both = jtbridge.shard_batch(batch["x"], mesh_of(2, 4), axis=("data", "model"))
    assert over_both.sharding.spec == P(("data", "model"))
    local = jtbridge.shard_batch(batch, mesh_of(2, 4), local=True)
    jax.tree.map(np.testing.assert_array_equal, local, batch)


def test_a_batch_that_devices_cannot_share_is_refused():
    with pytest.raises(ShardingError, match=r"`batch\['x'\]` has 12 rows, which 8 devices along \"data\" cannot share"):
        jtbridge.shard_batch({"x": np.zeros((12, 2))}, mesh_of(8, names=("data",)))
    with pytest.raises(ShardingError, match="names the axis 'rows', and the mesh has \"data\""):
        jtbridge.shard_batch(np.zeros(8), mesh_of(8, names=("data",)), axis="rows")


@pytest.mark.parametrize(
    ("rules", "error", "message"),
    [
        ({"up.*": P(), "*": P()}, ShardingError, r"No parameter has a name like \"up\.\*\""),
        ({"*": P(), "up_proj.*": P("model")}, ShardingError, "an earlier pattern matches it"),
        ({"up_proj.*": P("model")}, ShardingError, "No rule is for `down_proj.bias`, .* End the rules"),
        ({"*": P("tensor")}, ShardingError, "names the axis 'tensor', and the mesh has \"model\""),
        ({"*": P(None, "model")}, ShardingError, r"`down_proj.bias` has 2 entries, and the shape is \(16,\)"),
        ({"*_proj.weight": P(), "*": P(("model", "model"))}, ShardingError, "splits axis 0 into 64 parts"),
        ("megatron", ArgumentError, "no preset 'megatron'. Known: \"replicated\""),
        ({"*": 3}, ArgumentError, r"The rule for `\*` is 3"),
        (P("model"), ArgumentError, "must be a preset or a dict"),
        ("tensor+fsdp", ShardingError, 'needs a mesh axis with one of the names "fsdp", "data"'),
    ],
)
def test_rules_that_do_not_fit_are_refused(model, rules, error, message):
    params, _ = jtbridge.module(model).init()
    for place in (jtbridge.shard, jtbridge.shardings):
        with pytest.raises(error, match=message):
            place(params, mesh_of(8), rules)


def test_mesh_and_rules_are_checked(model):
    net = jtbridge.module(model)
    with pytest.raises(ArgumentError, match="are given together"):
        net.init(rules="fsdp")
    with pytest.raises(ArgumentError, match=r"must be a `jax.sharding.Mesh`, .* but it is a tuple"):
        net.init(mesh=(8,), rules="fsdp")  # type: ignore[arg-type]


def test_tensor_preset_refuses_a_model_with_unknown_names():
    params = {"0.weight": np.zeros((8, 8)), "2.weight": np.zeros((8, 8))}
    with pytest.raises(ShardingError, match=r"knows none of the names 0\.weight, 2\.weight"):
        jtbridge.shard(params, mesh_of(8), "tensor")


def test_large_unsharded_parameter_gives_a_warning():
    params = {"fc1.weight": np.zeros((16, 8)), "odd.weight": np.zeros((257, 257), np.float32)}
    for rules in ("tensor", "fsdp"):
        with pytest.warns(ShardingWarning, match=r"whole on each device: `odd.weight` \(257, 257\)\.") as told:
            jtbridge.shard(params, mesh_of(8), rules)
        assert len(told) == 1
    jtbridge.shard(params, mesh_of(8), {"odd.weight": P(), "*": "tensor"})  # no warning


def test_tensor_preset_falls_back_to_another_axis():
    params = {"wte.weight": np.zeros((257, 16)), "o_proj.weight": np.zeros((16, 12))}
    assert specs(jtbridge.shard(params, mesh_of(8), "tensor")) == {
        "wte.weight": P(None, "model"),
        "o_proj.weight": P("model", None),
    }


def test_tensor_preset_distinguishes_conv1d_weights_from_linear_weights():
    conv1d = {"c_attn.weight": (16, 48), "c_attn.bias": (48,), "c_proj.weight": (16, 16), "c_proj.bias": (16,)}
    linear = {"c_attn.weight": (48, 16), "c_attn.bias": (48,), "c_proj.weight": (16, 16), "c_proj.bias": (16,)}
    found = [jtbridge.shard(dict_of(shapes), mesh_of(8), "tensor") for shapes in (conv1d, linear)]
    assert [x["c_attn.weight"].sharding.spec for x in found] == [P(None, "model"), P("model", None)]
    assert [x["c_proj.weight"].sharding.spec for x in found] == [P("model", None), P(None, "model")]


def test_experts_and_adapters_are_split():
    shapes = {
        "mlp.experts.gate_up_proj": (8, 32, 16),
        "q_proj.base_layer.weight": (16, 8),
        "q_proj.lora_A.default.weight": (4, 8),
        "q_proj.lora_B.default.weight": (16, 4),
        "o_proj.lora_A.default.weight": (4, 16),
        "o_proj.lora_B.default.weight": (8, 4),
    }
    found = jtbridge.shard(dict_of(shapes), mesh_of(8), "tensor")
    assert [tuple(found[name].sharding.spec) for name in shapes] == [
        ("model", None, None),
        ("model", None),
        (),
        ("model", None),
        (None, "model"),
        (),
    ]


def dict_of(shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    return {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}


def test_sharded_weights_are_loaded_into_torch_and_saved(model, tmp_path):
    net = jtbridge.module(model)
    expected = {name: x.clone() for name, x in model.state_dict().items()}
    params, state = net.init(release=True, mesh=mesh_of(8), rules="fsdp")
    net.save_safetensors(tmp_path / "model.safetensors", params, state)
    again, _ = net.load_safetensors(tmp_path / "model.safetensors")
    jax.tree.map(np.testing.assert_array_equal, again, params)
    for name, x in net.load(params, state).state_dict().items():
        assert torch.equal(x, expected[name]), name


def test_a_file_is_read_part_by_part(model, tmp_path, monkeypatch):
    net = jtbridge.module(model)
    expected = net.init()
    net.save_safetensors(tmp_path / "model.safetensors", *expected)
    parts = recorded_parts(monkeypatch)
    found = net.load_safetensors(tmp_path, mesh=mesh_of(8), rules="fsdp")
    assert max(parts) == 32 * 16 // 8
    assert largest_share(found[0]) == 1 / 8
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    found = net.from_state_dict(model.state_dict(), mesh=mesh_of(8), rules="fsdp")
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_file_tensors_are_memory_mapped(tmp_path):
    psutil = pytest.importorskip("psutil")
    from safetensors.torch import save_file

    from jtbridge.models._safetensors import read_files

    save_file({"weight": torch.ones(1 << 24)}, tmp_path / "model.safetensors")  # 64 MB
    before = psutil.Process().memory_info().rss
    tensors, _ = read_files(tmp_path)
    assert tensors["weight"][-1] == 1
    assert psutil.Process().memory_info().rss - before < 16e6


def test_a_checkpoint_of_several_files_is_read_by_its_index(model, tmp_path):
    from safetensors.torch import save_file

    entries = list(model.state_dict().items())
    files = {"model-1.safetensors": dict(entries[:4]), "model-2.safetensors": dict(entries[4:])}
    for name, tensors in files.items():
        save_file(tensors, tmp_path / name)
    index = {"weight_map": {key: name for name, tensors in files.items() for key in tensors}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    net = jtbridge.module(model)
    for path in (tmp_path, tmp_path / "model.safetensors.index.json"):
        found = net.load_safetensors(path, mesh=mesh_of(8), rules="tensor")
        jax.tree.map(np.testing.assert_array_equal, found, net.init())
    with pytest.raises(ModelError, match="There is no file"):
        net.load_safetensors(tmp_path / "other.safetensors")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"has neither `model.safetensors` nor"):
        net.load_safetensors(tmp_path / "empty")


def test_a_tied_parameter_is_distributed_once(tmp_path):
    net = jtbridge.module(Tied())
    expected, state = net.init()
    net.save_safetensors(tmp_path / "model.safetensors", expected, state)
    rules = {"embed.weight": P(None, "model"), "*": P()}
    params, _ = net.load_safetensors(tmp_path, mesh=mesh_of(4), rules=rules)
    assert list(params) == list(expected)
    assert params["embed.weight"].addressable_shards[0].data.shape == (7, 1)
    ids = jnp.arange(4)
    np.testing.assert_allclose(jax.jit(net)(params, state, ids)[0], net(expected, state, ids)[0], rtol=1e-5)


def test_meta_module_gets_its_weights_from_a_file(model, tmp_path):
    expected, state = jtbridge.module(model).init()
    jtbridge.module(model).save_safetensors(tmp_path / "model.safetensors", expected, state)
    with torch.device("meta"):
        empty = jtbridge.module(Block())
    params, _ = empty.load_safetensors(tmp_path, mesh=mesh_of(8), rules="fsdp")
    jax.tree.map(np.testing.assert_array_equal, params, expected)
    x = np.ones((2, 16), np.float32)
    np.testing.assert_allclose(
        jax.jit(empty)(params, state, x)[0], model.eval()(torch.ones(2, 16)).detach(), rtol=1e-5, atol=1e-6
    )
    with pytest.raises(ModelError, match=r"`up_proj.weight` is on torch's device \"meta\""):
        empty.init(mesh=mesh_of(8), rules="fsdp")


def test_arrays_of_other_processes_are_refused_by_torch(monkeypatch):
    x = jtbridge.shard_batch(np.ones(8), mesh_of(8, names=("data",)))
    monkeypatch.setattr(type(x), "is_fully_addressable", False)
    with pytest.raises(DeviceError, match="process_allgather"):
        jtbridge.to_torch(x)
