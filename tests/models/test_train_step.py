"""`jtbridge.train_step`: the training of a module with optax. `make test-models` installs optax."""

from __future__ import annotations

import copy
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import NamedSharding, PartitionSpec
from torch import nn

import jtbridge
from jtbridge.errors import ArgumentError, ModelError, RandomnessError

from .training import BATCH, KEY, Noise, X, close, loss, mlp, programs, torch_loss

optax = pytest.importorskip("optax")
pytestmark = pytest.mark.usefixtures("standard_promotion")


def test_run_with_batch_norm_matches_torch():
    model = mlp(nn.BatchNorm1d(8))
    step = jtbridge.train_step(jtbridge.module(model), loss, optax.sgd(0.1, momentum=0.9))
    train = step.init(KEY)
    reference = copy.deepcopy(model)
    optimizer = torch.optim.SGD(reference.parameters(), 0.1, momentum=0.9)
    for _ in range(5):
        train, metrics = step(train, BATCH)
        optimizer.zero_grad()
        value = torch_loss(reference)
        value.backward()
        optimizer.step()
        np.testing.assert_allclose(metrics["loss"], value.detach(), rtol=1e-5)
    close(train.params, reference)
    close(train.state, reference)
    assert int(train.step) == int(train.state["1.num_batches_tracked"]) == 5
    assert int(model[1].num_batches_tracked) == 0
    assert programs(step) == 1


def test_each_call_and_step_draws_its_own_mask():
    def two_masks(model: Any, batch: Any) -> Any:
        first, second = model(), model()
        return first.mean(), {"first": first, "second": second}

    def run(seed: int) -> list[Any]:
        step = jtbridge.train_step(jtbridge.module(Noise()), two_masks, optax.sgd(0.0))
        train = step.init(jax.random.key(seed))
        masks = []
        for _ in range(2):
            train, metrics = step(train, {})
            masks += [metrics["first"], metrics["second"]]
        return [tuple(np.asarray(mask).tolist()) for mask in masks]

    assert len(set(run(0))) == 4
    assert run(0) == run(0)
    assert not set(run(0)) & set(run(1))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_frozen_parameters_are_neither_copied_nor_donated(accumulate: int):
    model = mlp()
    model[0].requires_grad_(False)
    net = jtbridge.module(model)
    params, state = net.init()
    step = jtbridge.train_step(net, loss, optax.adam(0.1), accumulate=accumulate)
    train, _ = step(step.init(KEY, params, state), BATCH)
    assert set(train.params) == {"2.weight", "2.bias"}
    for name, value in state.items():
        assert train.state[name] is value
    assert params["2.weight"].is_deleted()
    close(train.state, model)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_state_that_a_step_does_not_change_is_passed_on(accumulate: int):
    class WithTable(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 1)
            self.register_buffer("table", torch.ones(3))
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return self.linear(x * self.table)

    step = jtbridge.train_step(jtbridge.module(WithTable()), loss, optax.sgd(0.1), accumulate=accumulate)
    first = step.init(KEY)
    second, _ = step(first, BATCH)
    assert second.state["table"] is first.state["table"]
    assert (first.state["calls"], second.state["calls"]) == (0, accumulate)


def test_without_donation_the_previous_state_can_be_used():
    step = jtbridge.train_step(jtbridge.module(mlp()), loss, optax.adam(0.1), donate=False)
    first = step.init(KEY)
    second, _ = step(first, BATCH)
    again, _ = step(first, BATCH)
    for name, value in second.params.items():
        np.testing.assert_array_equal(again.params[name], value)


def test_a_state_that_was_donated_is_refused():
    step = jtbridge.train_step(jtbridge.module(mlp()), loss, optax.adam(0.1))
    first = step.init(KEY)
    step(first, BATCH)
    with pytest.raises(ArgumentError, match=r"memory of `train\.params\['0\.bias'\]` was donated"):
        step(first, BATCH)


def test_a_batch_may_hold_the_parameters():
    def to_target(model: Any, batch: Any) -> Any:
        target = net(batch["target"], {}, batch["x"])[0]
        return jnp.mean((model(batch["x"]) - target) ** 2) + loss(model, batch)

    net = jtbridge.module(mlp())
    step = jtbridge.train_step(net, to_target, optax.sgd(0.1))
    first = step.init(KEY)
    kept = jax.tree.map(jnp.copy, first.params)
    second, metrics = step(first, {**BATCH, "target": first.params})
    undonated = jtbridge.train_step(net, to_target, optax.sgd(0.1), donate=False)
    again, same = undonated(undonated.init(KEY), {**BATCH, "target": kept})
    np.testing.assert_array_equal(metrics["loss"], same["loss"])
    for name, value in second.params.items():
        np.testing.assert_array_equal(again.params[name], value)
    with pytest.raises(ArgumentError, match=r"memory of `batch\['target'\]\['0\.bias'\]` was donated.*target network"):
        step(second, {**BATCH, "target": first.params})


def test_a_checkpointed_call_with_dropout_needs_a_key():
    net = jtbridge.module(mlp(nn.Dropout(0.5)))

    def without_key(model: Any, batch: Any) -> Any:
        return jnp.mean(jax.checkpoint(lambda x: model(x))(batch["x"]))

    def with_key(model: Any, batch: Any) -> Any:
        key = model.key()
        return jnp.mean(jax.checkpoint(lambda x: model(x, rng=key))(batch["x"]))

    step = jtbridge.train_step(net, without_key, optax.sgd(0.1))
    with pytest.raises(RandomnessError, match="rng"):
        step(step.init(KEY), BATCH)
    step = jtbridge.train_step(net, with_key, optax.sgd(0.1))
    assert np.isfinite(step(step.init(KEY), BATCH)[1]["loss"])


def test_state_changed_in_a_checkpointed_call_is_returned():
    net = jtbridge.module(mlp(nn.BatchNorm1d(8)))

    def lost(model: Any, batch: Any) -> Any:
        return jnp.mean(jax.checkpoint(lambda x: model(x))(batch["x"]))

    def kept(model: Any, batch: Any) -> Any:
        call = jax.checkpoint(lambda params, state, x: model.net(params, state, x, train=True))
        out, changed = call(model.params, model.state, batch["x"])
        model.state |= changed
        return jnp.mean(out)

    step = jtbridge.train_step(net, lost, optax.sgd(0.1))
    with pytest.raises(ModelError, match=r"changes its state \(1.num_batches_tracked, 1.running_mean"):
        step(step.init(KEY), BATCH)
    step = jtbridge.train_step(net, kept, optax.sgd(0.1))
    train, _ = step(step.init(KEY), BATCH)
    assert int(train.state["1.num_batches_tracked"]) == 1


def test_another_method_can_be_called():
    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 2)
            self.register_buffer("calls", torch.zeros(()))

        def encode(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return self.linear(x)

    def distance(model: Any, batch: Any) -> Any:
        encode = model.method("encode")
        return jnp.mean((encode(batch["x"]) - encode(-batch["x"])) ** 2)

    step = jtbridge.train_step(jtbridge.module(Encoder()), distance, optax.sgd(0.1))
    train, _ = step(step.init(KEY), BATCH)
    assert train.state["calls"] == 2


def test_compute_in_bfloat16_matches_autocast():
    model = mlp(nn.BatchNorm1d(8))
    dtypes = []

    def loss_and_dtype(model: Any, batch: Any) -> Any:
        dtypes.append(model(batch["x"]).dtype)
        return loss(model, batch)

    options = {"compute_dtype": jnp.bfloat16}
    step = jtbridge.train_step(jtbridge.module(model), loss_and_dtype, optax.sgd(1.0), **options)
    train, metrics = step(step.init(KEY), BATCH)
    reference = copy.deepcopy(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        reference(torch.from_numpy(X))
        out = reference(torch.from_numpy(X))
    value = ((out.float() - torch.from_numpy(BATCH["y"])) ** 2).mean()
    value.backward()
    assert dtypes == [jnp.float32]
    assert all(value.dtype == jnp.float32 for value in train.params.values())
    np.testing.assert_allclose(metrics["loss"], value.detach(), rtol=1e-2)
    for name, p in reference.named_parameters():
        gradient = dict(model.named_parameters())[name].detach().numpy() - np.asarray(train.params[name])
        assert np.abs(gradient - p.grad.numpy()).max() < 0.02 * max(np.abs(p.grad.numpy()).max(), 0.5), name
    close(train.state, reference, rtol=2e-2, atol=2e-2)
    exact, _ = (step := jtbridge.train_step(jtbridge.module(model), loss, optax.sgd(1.0)))(step.init(KEY), BATCH)
    assert any((exact.params[name] != train.params[name]).any() for name in exact.params)


OPTIMIZERS = {
    "MultiSteps": lambda: optax.MultiSteps(optax.adamw(0.01), every_k_schedule=2),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adamw(0.01), 3),
    "masked": lambda: optax.masked(optax.adamw(0.01), lambda p: {name: p[name].ndim > 1 for name in p}),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(0.01)),
    "plateau": lambda: optax.chain(optax.adamw(0.01), optax.contrib.reduce_on_plateau()),
    "schedule_free": lambda: optax.contrib.schedule_free_adamw(0.01),
    "plateau over steps": lambda: optax.MultiSteps(
        optax.chain(optax.adamw(0.01), optax.contrib.reduce_on_plateau()), every_k_schedule=2
    ),
    "lbfgs": lambda: optax.lbfgs(),
    "backtracking": lambda: optax.chain(
        optax.sgd(1.0), optax.scale_by_backtracking_linesearch(max_backtracking_steps=5)
    ),
    "sam": lambda: optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.05)),
    "injected": lambda: optax.inject_hyperparams(optax.adamw)(learning_rate=optax.linear_schedule(0.01, 0.0, 9)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optax_optimizers_match_a_manual_loop(name: str):
    net, optimizer = jtbridge.module(mlp()), OPTIMIZERS[name]()
    step = jtbridge.train_step(net, loss, optimizer)
    train = step.init(KEY)
    for _ in range(3):
        train, _ = step(train, BATCH)

    params, state = net.init()
    opt_state = optimizer.init(params)
    value_fn = lambda p: jnp.mean((net(p, state, BATCH["x"])[0] - BATCH["y"]) ** 2)  # noqa: E731

    @jax.jit
    def by_hand(params: Any, opt_state: Any) -> Any:
        value, gradients = jax.value_and_grad(value_fn)(params)
        extra = {"value": value} if name.startswith("plateau") else {}
        if name in ("lbfgs", "backtracking"):
            extra = {"value": value, "grad": gradients, "value_fn": value_fn}
        updates, opt_state = optimizer.update(gradients, opt_state, params, **extra)
        return optax.apply_updates(params, updates), opt_state

    assert programs(step) == 1
    for _ in range(3):
        params, opt_state = by_hand(params, opt_state)
    for key, p in params.items():
        np.testing.assert_allclose(train.params[key], p, rtol=1e-4, atol=1e-5)


def test_apply_if_finite_skips_steps_that_are_not_finite():
    step = jtbridge.train_step(jtbridge.module(mlp()), loss, optax.apply_if_finite(optax.sgd(0.1), 3))
    train = step.init(KEY)
    before = jax.tree.map(np.array, train.params)
    train, metrics = step(train, {**BATCH, "y": BATCH["y"] * np.nan})
    assert np.isnan(metrics["loss"])
    for name, value in before.items():
        np.testing.assert_array_equal(train.params[name], value)


def test_steps_can_be_a_loop_on_the_device():
    step = jtbridge.train_step(jtbridge.module(mlp(nn.BatchNorm1d(8))), loss, optax.adam(0.01))
    batches = jax.tree.map(lambda x: jnp.stack([x[:8], x[8:]] * 2), BATCH)
    train, metrics = jax.jit(lambda train: jax.lax.scan(step, train, batches))(step.init(KEY))
    one_by_one = step.init(KEY)
    for number in range(4):
        one_by_one, last = step(one_by_one, jax.tree.map(lambda x, number=number: x[number], batches))
    for name, value in one_by_one.params.items():
        np.testing.assert_allclose(train.params[name], value, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(metrics["loss"][-1], last["loss"], rtol=1e-5)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_sharded_run_matches_one_device_and_stays_sharded(accumulate: int):
    net = jtbridge.module(mlp(nn.BatchNorm1d(8)))
    step = jtbridge.train_step(net, loss, optax.adam(0.01), accumulate=accumulate)
    expected = step.init(KEY)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, whole = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("data",), ()))
    params, state = net.init()
    shardings = {name: rows if p.shape[0] == 8 else whole for name, p in params.items()}
    train = step.init(KEY, jax.device_put(params, shardings), jax.device_put(state, whole))
    for _ in range(3):
        expected, metrics = step(expected, BATCH)
        train, found = step(train, jax.device_put(BATCH, rows))
        np.testing.assert_allclose(found["loss"], metrics["loss"], rtol=1e-4)
    for name, sharding in shardings.items():
        assert train.params[name].sharding.is_equivalent_to(sharding, train.params[name].ndim), name
        moment = train.opt_state[0].mu[name]
        assert moment.sharding.is_equivalent_to(sharding, moment.ndim), name
    assert programs(step) == 2


def test_torch_tensors_are_accepted_in_a_batch():
    net = jtbridge.module(mlp())
    step = jtbridge.train_step(net, loss, optax.sgd(0.1))
    tensors = {name: torch.from_numpy(value) for name, value in BATCH.items()}
    np.testing.assert_array_equal(step(step.init(KEY), tensors)[1]["loss"], step(step.init(KEY), BATCH)[1]["loss"])


def test_tokenizer_result_is_accepted_as_a_batch():
    from transformers import BatchEncoding

    step = jtbridge.train_step(jtbridge.module(mlp()), loss, optax.sgd(0.1))
    tensors = {name: torch.from_numpy(value) for name, value in BATCH.items()}
    assert np.isfinite(step(step.init(KEY), BatchEncoding(tensors))[1]["loss"])


def test_optimizer_may_store_the_initial_parameters():
    keep = optax.GradientTransformation(lambda params: params, lambda g, start, p=None: (g, start))
    step = jtbridge.train_step(jtbridge.module(mlp()), loss, optax.chain(keep, optax.sgd(0.1)))
    train = step.init(KEY)
    start = jax.tree.map(np.array, train.params)
    for _ in range(2):
        train, _ = step(train, BATCH)
    for name, value in start.items():
        np.testing.assert_array_equal(train.opt_state[0][name], value)


def test_wrong_arguments_are_refused():
    net, optimizer = jtbridge.module(mlp()), optax.sgd(0.1)
    cases: list[tuple[Any, str]] = [
        (lambda: jtbridge.train_step(mlp(), loss, optimizer), r"jtbridge.module\(model\)"),  # type: ignore[arg-type]
        (lambda: jtbridge.train_step(net, None, optimizer), "`loss` must be a function"),  # type: ignore[arg-type]
        (lambda: jtbridge.train_step(net, loss, torch.optim.SGD), "must be one of optax"),
        (lambda: jtbridge.train_step(net, loss, optimizer, accumulate=0), "1 or more, but is 0"),
        (lambda: jtbridge.train_step(net, loss, optimizer, compute_dtype=jnp.float16), "float16"),
        (lambda: jtbridge.train_step(net, loss, optimizer, compute_dtype=torch.float16), "`jnp.bfloat16` or None"),
        (lambda: jtbridge.train_step(net, loss, optimizer, weight=3), "`weight` must be a function"),  # type: ignore[arg-type]
        (lambda: jtbridge.train_step(net, loss, optimizer, donate="no"), "True or False, but is 'no'"),  # type: ignore[arg-type]
        (lambda: jtbridge.train_step(net, loss, optimizer).init(KEY, {}), "both `params` and `state`"),
        (lambda: jtbridge.train_step(net, loss, optimizer)(net.init(), BATCH), "takes a `jtbridge.TrainState`"),
    ]
    for call, message in cases:
        with pytest.raises(ArgumentError, match=message):
            call()


def test_a_line_search_needs_the_whole_batch():
    step = jtbridge.train_step(jtbridge.module(mlp()), loss, optax.lbfgs(), accumulate=2)
    with pytest.raises(ArgumentError, match=r"needs the whole batch at once. Leave out `accumulate=`"):
        step(step.init(KEY), BATCH)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda value: value * jnp.ones(2), r"float32\[2\]"),
        (lambda value: None, "a NoneType"),
        (lambda value: (value, {"loss": value}), r"metrics \['loss'\]"),
        (lambda value: (value, value), "a JAX tracer"),
    ],
)
def test_a_loss_of_another_form_is_refused(result: Any, message: str):
    net = jtbridge.module(mlp())
    step = jtbridge.train_step(net, lambda model, batch: result(loss(model, batch)), optax.sgd(0.1))
    with pytest.raises(ArgumentError, match=message):
        step(step.init(KEY), BATCH)


def test_complex_parameters_are_updated_as_in_torch():
    class Distance(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.tensor([1 + 1j, -2 + 0.5j]))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            d = self.w * (2 + 1j) - x
            return (d * d.conj()).real.sum()

    model = Distance()
    step = jtbridge.train_step(jtbridge.module(model), lambda model, x: model(x), optax.sgd(0.05))
    train = step.init(KEY)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for _ in range(3):
        train, _ = step(train, jnp.float32(0.3))
        optimizer.zero_grad()
        model(torch.tensor(0.3)).backward()
        optimizer.step()
    np.testing.assert_allclose(train.params["w"], model.w.detach().numpy(), rtol=1e-5)


def test_an_optimizer_that_holds_an_array_twice():
    step = jtbridge.train_step(jtbridge.module(mlp()), loss, optax.lbfgs(0.1, linesearch=None))
    train = step.init(KEY)
    before = float(step(train, BATCH)[1]["loss"])
    train = step.init(KEY)
    for _ in range(4):
        train, metrics = step(train, BATCH)
    assert float(metrics["loss"]) < before


def test_a_key_inside_a_loop_is_refused():
    def with_loop(model: Any, batch: Any) -> Any:
        return jax.lax.scan(lambda c, x: (c + jax.random.uniform(model.key()), None), 0.0, batch["x"])[0]

    step = jtbridge.train_step(jtbridge.module(mlp()), with_loop, optax.sgd(0.1))
    with pytest.raises(ModelError, match="each iteration would get the same key"):
        step(step.init(KEY), BATCH)


def test_a_step_keeps_the_shardings_of_its_state():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    torch.manual_seed(0)
    net = jtbridge.module(nn.Sequential(nn.Linear(8, 24), nn.BatchNorm1d(24), nn.Linear(24, 8)))
    step = jtbridge.train_step(net, lambda model, x: (model(x) ** 2).mean(), optax.adam(0.1))
    train = step.init(KEY, *net.init(mesh=mesh, rules="fsdp"))
    x = jtbridge.shard_batch(np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32), mesh)
    placed = jax.tree.map(lambda leaf: leaf.sharding, train.state)
    for _ in range(3):
        train, _ = step(train, x)
    for name, sharding in placed.items():
        assert train.state[name].sharding.is_equivalent_to(sharding, train.state[name].ndim), name
    assert programs(step) == 1


def test_a_step_keeps_the_shardings_of_its_parameters():
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 4))
    net = jtbridge.module(model)
    rules = {"0.weight": PartitionSpec("model", None), "3.weight": PartitionSpec(None, "model"), "*": PartitionSpec()}
    params, state = net.init(mesh=mesh, rules=rules)
    step = jtbridge.train_step(net, lambda model, x: (model(x) ** 2).mean(), optax.adam(1e-2))
    train = step.init(KEY, params, {name: np.asarray(value) for name, value in state.items()})
    placed = jax.tree.map(lambda leaf: leaf.sharding, (train.params, train.opt_state))
    x = jax.device_put(np.ones((4, 8), np.float32), NamedSharding(mesh, PartitionSpec("data")))
    for _ in range(3):
        train, _ = step(train, x)
    assert jax.tree.map(lambda leaf: leaf.sharding, (train.params, train.opt_state)) == placed
    assert programs(step) == 1


@pytest.mark.parametrize("name", ["lbfgs", "adafactor", "sm3"])
def test_the_state_of_an_optimizer_is_split_as_its_parameters_are(name: str):
    mesh = jax.make_mesh((4,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    options: dict[str, Any] = {"adafactor": {"min_dim_size_to_factor": 8}, "lbfgs": {"memory_size": 3}}
    net = jtbridge.module(nn.Linear(16, 8))
    optimizer = getattr(optax, name)(0.1, **options.get(name, {}))
    step = jtbridge.train_step(net, lambda model, x: (model(x) ** 2).mean(), optimizer)
    rules = {"weight": PartitionSpec("model", None), "bias": PartitionSpec("model")}
    train, expected = step.init(KEY, *net.init(mesh=mesh, rules=rules)), step.init(KEY)
    whole = {leaf.shape for leaf in jax.tree.leaves(train.opt_state) if leaf.sharding.is_fully_replicated}
    assert not whole & {(8, 16), (8,), (3, 8, 16), (3, 8)}
    placed = jax.tree.map(lambda leaf: leaf.sharding, train)
    x = np.random.default_rng(0).normal(size=(4, 16)).astype(np.float32)
    for _ in range(3):
        train, metrics = step(train, jax.device_put(x, NamedSharding(mesh, PartitionSpec())))
        expected, alone = step(expected, x)
        np.testing.assert_allclose(metrics["loss"], alone["loss"], rtol=1e-4)
    assert jax.tree.map(lambda leaf: leaf.sharding, train) == placed
    assert programs(step) == 2


def test_keys_and_counts_of_other_types():
    net = jtbridge.module(torch.nn.Linear(2, 1))
    loss = lambda model, batch: jnp.mean(model(batch) ** 2)  # noqa: E731
    step = jtbridge.train_step(net, loss, optax.sgd(0.1), accumulate=np.int64(2))
    train, _ = step(step.init(jax.random.key(0)), jnp.ones((4, 2)))
    assert int(train.step) == 1
    with pytest.raises(ArgumentError, match="`key` must be a JAX key"):
        step.init(0)
