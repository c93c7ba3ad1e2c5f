"""Values, gradients and new state of `jtbridge.module` are torch's, and the torch module is not changed."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jtbridge
from jtbridge.errors import ArgumentError, ModelError
from tests.models.zoo import MODULES, make

OLD_STYLE = "ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning"
pytestmark = [pytest.mark.filterwarnings(OLD_STYLE), pytest.mark.filterwarnings("ignore:.*nested tensor.*:UserWarning")]
names = pytest.mark.parametrize("name", MODULES)
modes = pytest.mark.parametrize("mode", ["eager", "jit"])


def run(function: Callable[..., Any], mode: str) -> Callable[..., Any]:
    return jax.jit(function) if mode == "jit" else function


def close(actual: Any, expected: torch.Tensor, tolerance: float = 2e-5) -> None:
    assert actual.shape == tuple(expected.shape)
    np.testing.assert_allclose(np.asarray(actual), expected.detach().numpy(), rtol=tolerance, atol=tolerance)


def tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors of the torch module after its own calls, by the names of `init`."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def fingerprint(module: torch.nn.Module) -> Any:
    """Return everything of a module that a call could change."""
    values = {key: (id(t), t.detach().clone(), t.requires_grad, t.grad) for key, t in tensors(module).items()}
    parts = [(id(part), part.training, set(vars(part))) for part in module.modules()]
    return values, parts


def same(a: Any, b: Any) -> bool:
    (values, parts), (others, their_parts) = a, b
    equal = all(
        v[0] == o[0] and torch.equal(v[1], o[1]) and v[2:] == o[2:]
        for v, o in zip(values.values(), others.values(), strict=True)
    )
    return equal and parts == their_parts


@names
@modes
def test_evaluation_matches_torch(name: str, mode: str):
    model, args = make(name)
    net = jtbridge.module(model)
    params, state = net.init()
    inputs = jtbridge.to_jax(args)
    before = fingerprint(model)
    out, changed = run(lambda p, s, a: net(p, s, *a), mode)(params, state, inputs)
    assert same(fingerprint(model), before)
    assert changed == {}
    close(out, model.eval()(*args))


@names
@modes
def test_training_steps_match_torch(name: str, mode: str):
    model, args = make(name)
    net = jtbridge.module(model)
    params, state = net.init()
    inputs = jtbridge.to_jax(args)
    before = fingerprint(model)

    def loss(params: Any, state: Any, inputs: Any) -> Any:
        out, changed = net(params, state, *inputs, train=True)
        return (out**2).mean(), changed

    step = run(jax.value_and_grad(loss, has_aux=True), mode)
    reference = copy.deepcopy(model).train() if "hook" not in name and name != "pruned" else model.train()
    optimizer = torch.optim.SGD([p for p in reference.parameters() if p.requires_grad], 0.1)
    for number in range(2):
        (value, changed), gradients = step(params, state, inputs)
        state = state | changed
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)
        if number == 0:
            assert same(fingerprint(model), before)
        optimizer.zero_grad()
        expected = (reference(*args) ** 2).mean()
        expected.backward()
        close(value, expected)
        theirs = dict(reference.named_parameters())
        assert gradients.keys() == {key for key, p in theirs.items() if p.requires_grad}
        for key, gradient in gradients.items():
            close(gradient, theirs[key].grad)
        optimizer.step()
    for key, tensor in tensors(reference).items():
        close({**params, **state}[key], tensor)


@modes
def test_other_methods(mode: str):
    model, (ids,) = make("tied")
    net = jtbridge.module(model)
    out, _ = run(net.method("encode"), mode)(*net.init(), jtbridge.to_jax(ids))
    close(out, model.encode(ids))
    with pytest.raises(jtbridge.errors.ArgumentError, match="no method `decode`"):
        net.method("decode")


@modes
def test_only_changed_state_is_returned(mode: str):
    model = torch.nn.Sequential(torch.nn.Linear(300, 300).requires_grad_(False), torch.nn.BatchNorm1d(300))
    net = jtbridge.module(model)
    params, state = net.init()
    call = run(lambda p, s, x: net(p, s, x, train=True), mode)
    _, changed = call(params, state, jnp.ones((2, 300)))
    assert changed.keys() == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    if mode == "jit":
        assert "copy(f32[300,300]" not in call.lower(params, state, jnp.ones((2, 300))).compile().as_text()


def test_tied_weight_occurs_once():
    model, _ = make("tied")
    params, state = jtbridge.module(model).init()
    assert list(params) == ["embed.weight", "inner.weight", "inner.bias"]
    assert state == {}


def test_plain_attributes_are_state_under_their_names():
    model, _ = make("plain attributes")
    params, state = jtbridge.module(model).init()
    assert list(params) == ["linear.weight", "linear.bias"]
    plain = ["scale", "shifts.0", "shifts.1.a.b", "teacher.0.weight", "teacher.0.bias"]
    assert list(state) == ["mask", *plain]


@modes
def test_plain_attributes_are_read_from_the_state(mode: str):
    model, (x,) = make("plain attributes")
    net = jtbridge.module(model)
    params, state = net.init()
    state = {**state, "scale": state["scale"] * 3, "shifts.1.a.b": state["shifts.1.a.b"] * 0}
    out, _ = run(net, mode)(params, state, jtbridge.to_jax(x))
    model.scale *= 3
    model.shifts[1]["a.b"] *= 0
    close(out, model(x))


@modes
def test_caches_are_returned_as_state(mode: str):
    from tests.models.zoo import RunningCache

    torch.manual_seed(0)
    model = RunningCache()
    net = jtbridge.module(model)
    params, state = net.init()
    call = run(net, mode)
    reference = copy.deepcopy(model)
    for number in range(3):
        x = torch.randn(2, 3)
        out, changed = call(params, state, jtbridge.to_jax(x))
        state = state | changed
        close(out, reference(x))
        assert state["cache"].shape == (2 * number + 2, 3)
    assert state["steps"] == 3
    close(state["total"], reference.total)
    close(state["last"], reference.last)
    assert model.cache is None
    assert net.load(params, state).steps == 3
    assert torch.equal(model.cache, reference.cache) or torch.allclose(model.cache, reference.cache)


def test_modes_are_chosen_per_call():
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Dropout(0.5)).eval()
    net = jtbridge.module(model)
    params, state = net.init()
    x, key = jnp.ones((8, 3)), jax.random.key(0)
    evaluated, _ = net(params, state, x)
    trained, _ = net(params, state, x, train=True, rng=key)
    assert not (np.asarray(evaluated) == 0).any()
    assert (np.asarray(trained) == 0).any()
    own, _ = net(params, state, x, train=None)
    np.testing.assert_array_equal(own, evaluated)
    model[1].train()
    own, _ = net(params, state, x, train=None, rng=key)
    np.testing.assert_array_equal(own, trained)
    assert not model.training
    assert model[1].training


class Cached(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)

    @functools.cached_property
    def doubled(self) -> torch.Tensor:
        return 2 * self.linear.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "count"):
            self.count = torch.zeros(())
        self.count = self.count + 1
        return x @ self.doubled + self.count


@modes
def test_a_cached_property_is_computed_from_the_parameters_of_the_call(mode: str):
    model = Cached()
    x = torch.ones(1, 3)
    model(x)  # torch caches a tensor computed from its own weight
    del model.count
    net = jtbridge.module(model)
    params, _ = net.init()
    call = run(net, mode)
    for factor in (1, 3):
        scaled = jax.tree.map(lambda p, f=factor: f * p, params)
        out, changed = call(scaled, {}, jtbridge.to_jax(x))
        close(out, factor * x @ model.doubled + 1)
        assert list(changed) == ["count"]
        out, _ = call(scaled, changed, jtbridge.to_jax(x))
        close(out, factor * x @ model.doubled + 2)


@modes
def test_dropout_is_a_function_of_the_key(mode: str):
    net = jtbridge.module(torch.nn.Dropout(0.5))
    call = run(lambda x, key: net({}, {}, x, train=True, rng=key)[0], mode)
    x = jnp.ones(64)
    a, b, c = call(x, jax.random.key(0)), call(x, jax.random.key(0)), call(x, jax.random.key(1))
    np.testing.assert_array_equal(a, b)
    assert not np.array_equal(a, c)


def test_changes_of_the_module_affect_eager_calls():
    model = torch.nn.Linear(3, 3)
    net = jtbridge.module(model)
    params, state = net.init()
    x = jnp.ones((1, 3))
    before, _ = net(params, state, x)
    with model.register_forward_hook(lambda module, args, out: 2 * out):
        doubled, _ = net(params, state, x)
    np.testing.assert_allclose(doubled, 2 * before)
    np.testing.assert_array_equal(net(params, state, x)[0], before)
    with torch.no_grad():
        model.weight.zero_()
    np.testing.assert_array_equal(net(params, state, x)[0], before)


def test_entries_move_between_params_and_state():
    model, (x,) = make("linear")
    net = jtbridge.module(model)
    params, state = net.init()
    state["bias"] = params.pop("bias")
    gradients = jax.grad(lambda p: net(p, state, jtbridge.to_jax(x))[0].sum())(params)
    assert list(gradients) == ["weight"]


class Refusing(tuple):
    """A tuple that refuses most of a tuple's methods, as the representations of e3nn do."""

    def __len__(self) -> int:
        raise NotImplementedError

    __contains__ = count = index = __len__  # type: ignore[assignment]


@modes
def test_containers_are_read_without_overridden_methods(mode: str):
    class Scaled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(2))
            self.parts = [Refusing((3.0, Refusing(("even", torch.full((2,), 5.0)))))]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scale, (_, shift) = self.parts[0]
            return x * self.weight * scale + shift

    net = jtbridge.module(Scaled())
    params, state = net.init()
    call = jax.jit(net) if mode == "jit" else net
    np.testing.assert_array_equal(call(params, state, jnp.ones(2))[0], [8, 8])
    assert list(state) == ["parts.0.1.1"]
    shifted = {name: 2 * value for name, value in state.items()}
    np.testing.assert_array_equal(call(params, shifted, jnp.ones(2))[0], [13, 13])


@modes
def test_hooks_run_in_the_order_of_torch(mode: str):
    model = torch.nn.Linear(2, 2)
    model.register_forward_hook(lambda module, args, out: 2 * out)
    model.register_forward_hook(lambda module, args, out: out + 1, prepend=True)
    net = jtbridge.module(model)
    params, state = net.init()
    out, _ = (jax.jit(net) if mode == "jit" else net)(params, state, jnp.ones(2))
    np.testing.assert_allclose(out, model(torch.ones(2)).detach(), rtol=1e-5)


@modes
def test_parameters_and_buffers_without_elements(mode: str):
    class Sparse(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(2))
            self.none = torch.nn.Parameter(torch.ones(0))
            self.register_buffer("rows", torch.ones(3, 0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([x * self.weight, self.none]) + self.rows.sum()

    net = jtbridge.module(Sparse())
    params, state = net.init()
    call = jax.jit(net) if mode == "jit" else net
    np.testing.assert_array_equal(call(params, state, jnp.ones(2))[0], [1, 1])
    gradients = jax.grad(lambda params: call(params, state, jnp.ones(2))[0].sum())(params)
    assert gradients["none"].shape == (0,)


def test_methods_are_explained():
    model, (ids,) = make("tied")
    net = jtbridge.module(model)
    params, state = net.init()
    explanation = jtbridge.explain(net.method("encode"), params, state, jtbridge.to_jax(ids))
    assert explanation.backend == "xla"
    assert explanation.function.startswith("encode(")


class InDouble(torch.nn.Module):
    """A module with parameters and buffers in float64, which it multiplies by a float64 constant."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 2).double()
        self.norm = torch.nn.BatchNorm1d(2).double()

    def forward(self, x):
        return self.norm(self.linear(x.double())) * torch.ones(2, dtype=torch.float64)


@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
def test_a_module_in_double_while_x64_is_off(jitted: bool, train: bool):
    module = InDouble()
    net = jtbridge.module(module)
    params, state = net.init()
    x = np.random.default_rng(0).standard_normal((5, 3)).astype(np.float32)

    def loss(params, state, x):
        out, changed = net(params, state, x, train=train)
        return (out**3).sum(), state | changed

    value_and_grad = jax.value_and_grad(loss, has_aux=True)
    (value, new), grads = (jax.jit if jitted else lambda f: f)(value_and_grad)(params, state, x)
    want = copy.deepcopy(module).train(train)
    (want(torch.from_numpy(x)) ** 3).sum().backward()
    for name, parameter in want.named_parameters():
        assert grads[name].dtype == jnp.float32
        np.testing.assert_allclose(grads[name], parameter.grad, rtol=1e-4, atol=1e-6)
    for name, buffer in want.named_buffers():
        np.testing.assert_allclose(new[name], buffer, rtol=1e-5)
    assert np.isfinite(value)


def test_a_key_for_init_is_refused():
    with pytest.raises(ArgumentError, match="`init` takes no JAX key, because the weights"):
        jtbridge.module(torch.nn.Linear(2, 2)).init(jax.random.key(0))


def test_a_recurrent_module_after_a_functional_call():
    """The functional call leaves its weights in the module's list of weights until the next call."""
    layer = torch.nn.LSTM(3, 4)
    x = torch.randn(5, 2, 3)
    torch.func.functional_call(layer, {name: 2 * p.detach() for name, p in layer.named_parameters()}, (x,))
    net = jtbridge.module(layer)
    params, state = net.init()
    got = net(params, state, jnp.asarray(x.numpy()))[0][0]
    np.testing.assert_allclose(got, layer(x)[0].detach(), rtol=1e-5, atol=1e-6)


class _Swapped(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("a", torch.zeros(2))
        self.register_buffer("b", torch.full((2,), 10.0))

    def forward(self, x):
        self.a, self.b = self.b, self.a
        self.a.add_(x)
        return self.a - self.b


class _Flushed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(2))

    def forward(self, x):
        self.total += x
        out = self.total * 1
        self.total = torch.zeros(2)
        return out


class _WrittenAfterwards(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("a", torch.ones(2))

    def forward(self, x):
        old = self.a
        self.a = old * 2
        old.add_(x)
        return old + self.a


class _Rotated(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.kept = [torch.zeros(2), torch.ones(2), torch.full((2,), 2.0)]

    def forward(self, x):
        self.kept.append(self.kept.pop(0))
        self.kept[0].add_(x)
        return sum(self.kept)


@pytest.mark.parametrize("backend", ["auto", "dlpack"])
@pytest.mark.parametrize("kind", [_Swapped, _Flushed, _WrittenAfterwards, _Rotated])
def test_tensors_written_to_and_swapped(kind, backend):
    theirs, net = kind(), jtbridge.module(kind(), backend=backend)
    for call in (net, jax.jit(net)):
        theirs = kind()
        params, state = net.init()
        for step in range(3):
            out, changed = call(params, state, jnp.full(2, step + 1.0))
            state |= changed
            np.testing.assert_allclose(out, theirs(torch.full((2,), step + 1.0)))
            after = dict(theirs.named_buffers()) or {f"kept.{i}": each for i, each in enumerate(theirs.kept)}
            assert state.keys() == after.keys()
            for name, value in after.items():
                np.testing.assert_allclose(state[name], value)


UNCOUNTED = {
    "foreach": lambda n: torch._foreach_add_([n], 1),
    "data": lambda n: n.data.add_(1),
    "detached": lambda n: torch._foreach_add_([n.detach()], 1),
}


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float64, torch.float32])
@pytest.mark.parametrize("write", UNCOUNTED)
@pytest.mark.filterwarnings("ignore::jtbridge.errors.CalledWarning")
def test_writes_without_a_version_increment(write, dtype):
    class Counting(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("n", torch.zeros(2, dtype=dtype))

        def forward(self, x):
            UNCOUNTED[write](self.n)
            return x + self.n

    net = jtbridge.module(Counting())
    for call in (net, jax.jit(net)):
        params, state = net.init()
        for _ in range(3):
            out, changed = call(params, state, jnp.zeros(2))
            state |= changed
        assert state["n"].tolist() == out.tolist() == [3, 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("write", ["data", "detached"])
@pytest.mark.filterwarnings("ignore::jtbridge.errors.CalledWarning")
def test_parameter_write_without_a_version_increment_is_refused(write, dtype):
    class Clamped(torch.nn.Linear):
        def forward(self, x):
            UNCOUNTED[write](self.weight)
            return super().forward(x.to(self.weight.dtype))

    net = jtbridge.module(Clamped(2, 1).to(dtype))
    params, state = net.init()
    for call in (net, jax.jit(net)):
        with pytest.raises(ModelError, match="writes to `weight`"):
            call(params, state, jnp.ones((1, 2)))
