"""The refusals of `jtbridge.module`, and their messages."""

from __future__ import annotations

import collections
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

import jtbridge
from jtbridge.errors import ArgumentError, ModelError, MutationError, PurityWarning

X = jnp.ones((2, 3))
modes = pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])


def call(net: Any, params: Any, state: Any, *args: Any, jit: bool, **options: Any) -> Any:
    function = lambda p, s, a: net(p, s, *a, **options)  # noqa: E731
    return (jax.jit(function) if jit else function)(params, state, args)


def test_arguments():
    with pytest.raises(ArgumentError, match=r"takes a `torch.nn.Module`, but got a function"):
        jtbridge.module(lambda x: x)  # type: ignore[arg-type]
    net = jtbridge.module(nn.Linear(3, 2))
    params, state = net.init()
    with pytest.raises(ArgumentError, match="`params` of `Linear` must be a dict of arrays by name, but it is a"):
        net(X, params)
    with pytest.raises(ModelError, match=r"each of its 2 tensors once: bias missing.*state \| changed"):
        net({"weight": params["weight"]}, state, X)
    with pytest.raises(ModelError, match="bias in both"):
        net(params, {"bias": params["bias"]}, X)
    with pytest.raises(ModelError, match="`nothing` is in `params` or `state`, and `Linear` has no such tensor"):
        net(params, {"nothing": X}, X)


@modes
def test_parameters_of_other_shapes_are_refused(jit: bool):
    net = jtbridge.module(nn.Linear(3, 2))
    params, state = net.init()
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), params)
    with pytest.raises(ModelError, match=r"`weight` \(2, 2, 3\), in torch \(2, 3\), `bias` \(2, 2\), in torch \(2,\)"):
        call(net, stacked, state, X, jit=jit)
    for name, shape in (("bias", (1,)), ("bias", ()), ("weight", (1, 3)), ("weight", (5, 3))):
        with pytest.raises(ModelError, match=f"other shapes than in the torch module: `{name}`"):  # torch would run
            call(net, params | {name: jnp.ones(shape)}, state, X, jit=jit)
        with pytest.raises(ModelError, match=f"other shapes than in the torch module: `{name}`"):
            call(net, {k: v for k, v in params.items() if k != name}, {name: jnp.ones(shape)}, X, jit=jit)


@modes
def test_a_parameter_may_be_a_part_inside_shard_map(jit: bool):
    net = jtbridge.module(nn.Linear(3, 4))
    params, state = net.init()
    mesh = jax.make_mesh((4,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    whole, part = jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec("model")
    columns = jax.shard_map(
        lambda p, x: net(p, state, x)[0],
        mesh=mesh,
        in_specs=(part, whole),
        out_specs=jax.sharding.PartitionSpec(None, "model"),
    )
    found = (jax.jit(columns) if jit else columns)(params, X)
    np.testing.assert_allclose(found, net(params, state, X)[0], rtol=1e-6)


LAYOUTS: dict[str, Callable[[], torch.Tensor]] = {
    "sparse": lambda: torch.eye(3).to_sparse(),
    "mkldnn": lambda: torch.eye(3).to_mkldnn(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
}


@pytest.mark.parametrize("kind", ["parameter", "buffer", "attribute"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.filterwarnings("ignore::UserWarning:torch")
def test_tensor_of_an_unsupported_layout_is_named(layout: str, kind: str):
    model = nn.Sequential(nn.Linear(3, 3), nn.Module())
    tensor = LAYOUTS[layout]()
    if kind == "parameter":
        model[1].register_parameter("graph", nn.Parameter(tensor))
    elif kind == "buffer":
        model[1].register_buffer("graph", tensor)
    else:
        model[1].graph = tensor
    with pytest.raises(ModelError, match=r"`1\.graph` .* which JAX does not have. Store `\.to_"):
        jtbridge.module(model).init()


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning", "ignore:.*torch.jit.*:FutureWarning")
def test_torchscript():
    scripted = torch.jit.trace(nn.Linear(3, 2), torch.ones(1, 3))
    with pytest.raises(ArgumentError, match=r"and the module is TorchScript.*jtbridge.wrap"):
        jtbridge.module(scripted)
    with pytest.raises(ArgumentError, match="and `0` is TorchScript"):
        jtbridge.module(nn.Sequential(scripted))


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature:UserWarning")
def test_lazy_modules_need_a_call_first():
    model = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d())
    net = jtbridge.module(model)
    with pytest.raises(ModelError, match=r"`0.weight` has no shape yet.*model\(torch.zeros\(...\)\)"):
        net.init()
    params, state = net.init(X)
    assert params["0.weight"].shape == (4, 3)
    assert state["1.num_batches_tracked"] == 0
    assert model.training
    assert net(params, state, X)[0].shape == (2, 4)
    assert net.init(X)[0].keys() == params.keys()


class Remembers(nn.Linear):
    """A module whose call makes an attribute that the next call would read."""

    def __init__(self, way: str):
        super().__init__(3, 3)
        self.way = way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.way == "number":
            self.calls = getattr(self, "calls", 0) + 1
        elif self.way == "list":
            self.seen = [*getattr(self, "seen", []), 1]
        elif self.way == "hook":
            self.register_forward_hook(lambda module, args, out: out * 2)
        elif self.way == "anew":
            self.size = len(x)
            self.is_ready = getattr(self, "is_ready", False) or True
        else:
            self.extra = nn.Parameter(torch.ones(3))
        return super().forward(x)


@modes
@pytest.mark.parametrize(
    ("way", "error", "message"),
    [
        ("number", MutationError, "changed the attribute `calls` from <missing> to 1"),
        ("list", MutationError, "changed the attribute `seen.0` from <missing> to 1"),
        ("hook", MutationError, r"changed the attribute `_forward_hooks` from \[\] to \[<function"),
        ("parameter", ModelError, "made the parameter `extra`, which is not in `params`"),
    ],
)
def test_tensors_created_by_a_call_are_refused(way: str, error: type[Exception], message: str, jit: bool):
    net = jtbridge.module(Remembers(way))
    with pytest.raises(error, match=message):
        call(net, *net.init(), X, jit=jit)


@modes
def test_attributes_recreated_in_each_call(jit: bool):
    net = jtbridge.module(Remembers("anew"))
    assert call(net, *net.init(), X, jit=jit)[0].shape == (2, 3)


def test_parameters_over_the_same_memory():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight.data = model[0].weight.data
    with pytest.raises(ModelError, match=r"`0.weight` and `1.weight` are different tensors over the same memory"):
        jtbridge.module(model).init()


class SharedBuffers(nn.Module):
    def __init__(self, writes: bool):
        super().__init__()
        self.register_buffer("whole", torch.zeros(4))
        self.register_buffer("part", self.whole[:2])
        self.writes = writes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.writes:
            self.whole += 1
        return x + self.part.sum()


@modes
def test_buffers_over_the_same_memory(jit: bool):
    net = jtbridge.module(SharedBuffers(writes=False))
    params, state = net.init()
    call(net, params, state, X, jit=jit)
    net = jtbridge.module(SharedBuffers(writes=True))
    params, state = net.init()
    with pytest.raises(ModelError, match="writes to `whole`, which shares memory with another tensor"):
        call(net, params, state, X, jit=jit)


class WritesToAParameter(nn.Linear):
    def __init__(self, assign: bool, size: int):
        super().__init__(size, size)
        self.assign = assign

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            if self.assign:
                self._parameters["weight"] = self.weight * 2
            else:
                self.weight.mul_(2)
        return super().forward(x)


@modes
@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("size", [3, 300])
def test_writes_to_parameters(assign: bool, size: int, jit: bool):
    model = WritesToAParameter(assign, size)
    before = model.weight.detach().clone()
    net = jtbridge.module(model)
    params, state = net.init()
    weight = params["weight"] + 0
    with pytest.raises(
        ModelError, match=r"writes to `weight`, which is a parameter or in `params`.*call the torch module once"
    ):
        call(net, params, state, jnp.ones((2, size)), jit=jit)
    assert jnp.array_equal(params["weight"], weight)
    assert torch.equal(model.weight, before)


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen = True  # an attribute that each call makes again
        return x * self.calls


@modes
def test_python_state(jit: bool):
    model = Counts()
    with pytest.raises(
        MutationError,
        match=r"changed the attribute `0.calls` from 0 to 1.*`register_buffer`.*call the torch module once",
    ):
        call(jtbridge.module(nn.Sequential(model)), {}, {}, X, jit=jit)
    with pytest.warns(PurityWarning, match="`calls` from 0 to 1"):
        call(jtbridge.module(model, purity="warn"), {}, {}, X, jit=jit)
    net = jtbridge.module(model, purity="allow")
    assert [float(call(net, {}, {}, X, jit=jit)[0][0, 0]) for _ in range(2)] == [1.0, 1.0]
    assert model.calls == 0
    assert not hasattr(model, "seen")


class ChangesPython(nn.Module):
    def __init__(self, change: Callable[[Any], Any]):
        super().__init__()
        self.change = change
        self.lin = nn.Linear(3, 3)
        self.log: list[Any] = []
        self.table = {"a": {"b": 1}}
        self.counter: collections.Counter[str] = collections.Counter()
        self.recent = collections.deque([torch.zeros(3)], maxlen=2)
        self.pair = (1, 2)
        self.offset: Any = None
        self.holder = types.SimpleNamespace(count=0, module=self.lin)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.change(self)
        return self.lin(x)


PYTHON_CHANGES: dict[str, Callable[[Any], Any]] = {
    "log.0": lambda self: self.log.append(1),
    "table.a.b": lambda self: self.table["a"].update(b=2),
    "counter.a": lambda self: self.counter.update(a=1),
    "recent": lambda self: self.recent.append(torch.ones(3)),
    "pair.0": lambda self: setattr(self, "pair", self.pair[::-1]),
    "offset": lambda self: setattr(self, "offset", 3),
    "holder.count": lambda self: setattr(self.holder, "count", 1),
}


@modes
@pytest.mark.parametrize("name", PYTHON_CHANGES)
def test_python_state_in_containers(name: str, jit: bool):
    net = jtbridge.module(ChangesPython(PYTHON_CHANGES[name]))
    params, state = net.init()
    with pytest.raises(MutationError, match=f"changed the attribute `{name}` from"):
        call(net, params, state, X, jit=jit)


def test_a_hook_that_stores_tensors():
    stored: list[Any] = []
    model = nn.Linear(3, 3)
    model.register_forward_hook(lambda module, args, out: stored.append(out))
    net = jtbridge.module(model)
    params, state = net.init()
    net(params, state, X)
    assert len(stored) == 1
    with pytest.raises(MutationError, match="writes to `stored`"):
        jax.jit(net)(params, state, X)
    assert len(stored) == 1


@modes
def test_traced_train_argument(jit: bool):
    net = jtbridge.module(nn.Linear(3, 3))
    params, state = net.init()
    mode = jnp.array(True)
    with pytest.raises(ArgumentError, match=r"`train` of `Linear` must be True.*static_argnames=\"train\""):
        (jax.jit(net) if jit else net)(params, state, X, train=mode)


class AssignsData(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("ema", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.ema.data = x.mean(0)
        return x - self.ema


@modes
def test_an_assignment_to_data(jit: bool):
    net = jtbridge.module(AssignsData())
    params, state = net.init()
    with pytest.raises(
        MutationError, match=r"assigns to `.data` of `ema`.*`ema.copy_\(value\)`.*call the torch module once"
    ):
        call(net, params, state, X, jit=jit)


def test_a_module_of_export_has_one_mode():
    exported = torch.export.export(nn.Linear(3, 3), (torch.ones(2, 3),)).module()
    net = jtbridge.module(exported)
    params, state = net.init()
    with pytest.raises(ModelError, match="Pass `train=None`"):
        net(params, state, X)
    assert net(params, state, X, train=None)[0].shape == (2, 3)


class Forgets(nn.Module):
    def __init__(self):
        super().__init__()
        self.cache = torch.ones(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + self.cache
        self.cache = None
        return y


@modes
def test_a_tensor_that_a_call_removes(jit: bool):
    net = jtbridge.module(Forgets())
    params, state = net.init()
    with pytest.raises(ModelError, match="removed `cache` from the module"):
        call(net, params, state, X, jit=jit)


class TwoNames(nn.Module):
    def __init__(self):
        super().__init__()
        self.tables = {1: torch.ones(1), "1": torch.zeros(1)}


def test_two_tensors_with_the_same_name():
    with pytest.raises(ModelError, match=r"have the name `tables.1`"):
        jtbridge.module(TwoNames()).init()


class Teacher(nn.Linear):
    student: list[nn.Module]


def test_modules_with_a_reference_cycle():
    student, teacher = nn.Linear(3, 3), Teacher(3, 3)
    student.teacher = [teacher]  # type: ignore[assignment]
    teacher.student = [student]
    params, state = jtbridge.module(student).init()
    assert list(params) == ["weight", "bias"]
    assert list(state) == ["teacher.0.weight", "teacher.0.bias"]


GLOBAL = nn.Linear(3, 3)


def test_a_hook_that_reads_the_module_from_a_global():
    handle = GLOBAL.register_forward_hook(lambda module, args, out: out + GLOBAL.bias)
    net = jtbridge.module(GLOBAL)
    params, state = net.init()
    with pytest.raises(ModelError, match="reads the module from the global variable `GLOBAL`"):
        net(params, state, X)
    handle.remove()
    net(params, state, X)


def test_a_call_inside_a_wrapped_function():
    net = jtbridge.module(nn.Linear(3, 3))
    params, state = net.init()
    inside = jtbridge.wrap(lambda x: net(params, state, x)[0])
    with pytest.raises(ArgumentError, match="was called inside a wrapped function"):
        inside(X)


def test_draws_without_a_key_under_jit():
    net = jtbridge.module(nn.Dropout(0.5))
    with pytest.raises(jtbridge.errors.RandomnessError, match="`Dropout`"):
        call(net, {}, {}, X, jit=True, train=True)


@modes
def test_a_hook_for_the_gradient_of_a_parameter(jit: bool):
    model = nn.Linear(3, 3)
    handle = model.weight.register_hook(lambda gradient: 2 * gradient)
    net = jtbridge.module(model)
    params, state = net.init()
    with pytest.raises(ModelError, match=r"`weight` of `Linear` has a hook for its gradient.*`handle.remove\(\)`"):
        call(net, params, state, X, jit=jit)
    handle.remove()
    call(net, params, state, X, jit=jit)


class OwnArguments(nn.Module):
    def forward(self, x: torch.Tensor, train: bool = True, *, rng: Any = None) -> torch.Tensor:
        return x * train if rng is None else x * rng


@modes
def test_arguments_of_the_same_name_as_those_of_a_call(jit: bool):
    net = jtbridge.module(OwnArguments())

    def run(*args: Any, method: Any = None, **options: Any) -> Any:
        function = lambda x: (net.method(method) if method else net)({}, {}, x, *args, **options)[0]  # noqa: E731
        return (jax.jit(function) if jit else function)(X)

    assert run(train=True)[0, 0] == run(True)[0, 0] == 1
    assert run(False)[0, 0] == 0
    with pytest.raises(ArgumentError, match=r"argument `train` of its own, which would be True, its default.*position"):
        run(train=False)
    with pytest.raises(ArgumentError, match="argument `train` of its own"):
        run()
    with pytest.raises(ArgumentError, match="argument `rng` of its own, which would be None"):
        run(train=True, rng=jax.random.key(0))
    assert run(method=lambda model, x: model(x, train=False))[0, 0] == 0
    assert run(method=lambda model, x: model(x, rng=3), rng=jax.random.key(0))[0, 0] == 3
    with pytest.raises(ArgumentError, match="argument `train` of its own, which has no value"):
        run(method=lambda model, x, train: model(x, train))


def test_arguments_of_the_same_name_after_a_bound_and_an_unbound_call():
    net = jtbridge.module(OwnArguments())
    for method in ("forward", OwnArguments.forward, "forward"):
        assert net.method(method)({}, {}, X, False)[0][0, 0] == 0
        with pytest.raises(ArgumentError, match="argument `train` of its own"):
            net.method(method)({}, {}, X)
