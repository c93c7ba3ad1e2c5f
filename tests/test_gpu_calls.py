"""Zero-copy calls on a GPU: without a GPU, the recorded CUDA calls; with a GPU, results and waits."""

from __future__ import annotations

import contextlib
import importlib
import types
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.experimental.buffer_callback import buffer_callback

import jtbridge
from jtbridge._backends import called_device
from jtbridge._backends._dlpack_gpu import gpu_callback, gpu_unavailable_reason, order_after_current_streams
from jtbridge.calls.eager._common import as_arrays
from jtbridge.capture._graph_function import GraphFunction, on_device
from jtbridge.core.gpu_errors import add_device_note
from jtbridge.errors import BackendError, TorchCallError

pytestmark = pytest.mark.cpu  # but for those with the mark `gpu`

WITHOUT_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")


@WITHOUT_CUDA
def test_unavailable_backends_give_the_reason():
    reasons = {status.name: status.reason for status in jtbridge.backends("cuda")}
    assert reasons["dlpack"] in ("this build of torch is for cpu", "torch finds no GPU")
    assert gpu_unavailable_reason("rocm") in ("this build of torch is for cpu", "this build of torch is for cuda")
    assert gpu_unavailable_reason("tpu") == 'torch has no tensors over the buffers of platform "tpu"'
    f = jtbridge.wrap(torch.sin, backend="dlpack")
    with pytest.raises(
        BackendError, match=r'`dlpack` cannot run on platform "cuda": (this build of torch|torch finds)'
    ):
        jax.jit(f).trace(jnp.ones(3)).lower(lowering_platforms=("cuda",))


@WITHOUT_CUDA
def test_a_callback_is_lowered_only_where_it_can_run():
    f = jtbridge.wrap(torch.sin, backend="callback")
    with pytest.raises(BackendError, match=r"`sin` is called by the program, not translated, and JAX lowers such"):
        jax.jit(f).trace(jnp.ones(3)).lower(lowering_platforms=("cuda",))


def test_gpu_program_is_a_call_with_the_buffers_of_xla(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        importlib.import_module("jtbridge._backends.dlpack"), "gpu_unavailable_reason", lambda platform: None
    )
    f = jtbridge.wrap(lambda x: torch.sin(x) * 2, backend="dlpack")
    traced = jax.jit(jax.value_and_grad(lambda x: f(x).sum())).trace(jnp.ones(3))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.custom_call @xla_buffer_python_gpu_callback") == 2  # forward, backward
    assert "cpu_callback" not in text
    assert "xla_buffer_python_cpu_callback" in traced.lower(lowering_platforms=("cpu",)).as_text()


class Stream:
    """A stand-in for a CUDA stream that records which stream waits for which."""

    def __init__(self, name: str, events: list[str]):
        self._name, self._events = name, events

    def wait_stream(self, other: Stream) -> None:
        self._events.append(f"{self._name} waits for {other._name}")


class Buffer:
    """A stand-in for an XLA buffer on GPU 3, over memory of the host."""

    def __init__(self, tensor: torch.Tensor):
        self._tensor = tensor

    def __dlpack__(self) -> Any:
        return self._tensor.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 3)


class Context:
    stream = 77


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    events: list[str] = []

    @contextlib.contextmanager
    def entered(what: Any) -> Iterator[None]:
        events.append(f"on {what._name if isinstance(what, Stream) else what}")
        yield

    own = Stream("torch's", events)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: own)
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda number, device: Stream(f"{number} of {device}", events))
    monkeypatch.setattr(torch.cuda, "device", entered)
    monkeypatch.setattr(torch.cuda, "stream", entered)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 0))
    return events


def planned(fn, *args, **options) -> Any:
    """Return a function that runs `fn` on tensors like some arrays."""
    return jtbridge.wrap(fn, backend="dlpack", **options).prepared(args, {})[0]


def test_torch_runs_on_the_stream_of_xla(events: list[str]):
    def fn(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        events.append(f"new tensors on {torch.get_default_device()}, grad {torch.is_grad_enabled()}")
        return x + y, (x * y).to(torch.int32)

    with torch.no_grad():
        traced = planned(fn, jnp.ones(3), jnp.ones(3), purity="allow")  # it writes to `events`
    events.clear()
    out, product = torch.zeros(3), torch.zeros(3, dtype=torch.int32)
    x, y = torch.arange(3.0), torch.full((3,), 2.0)
    gpu_callback(traced)(Context(), *map(Buffer, (x, y, out, product)))
    assert out.tolist() == [2, 3, 4]
    assert product.tolist() == [0, 2, 4]
    assert events == [
        "77 of 3 waits for torch's",
        "on 77 of 3",
        "new tensors on cuda:3, grad False",
        "torch's waits for 77 of 3",
    ]


@pytest.mark.parametrize("initialized", [True, False])
def test_an_eager_call_waits_for_the_users_current_stream(events: list[str], monkeypatch, initialized: bool):
    default = Stream("the default stream", events)
    current = [default, Stream("the user's stream", events)]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: initialized)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: current[index])
    monkeypatch.setattr(torch.cuda, "default_stream", lambda index: default)
    devices = [
        types.SimpleNamespace(platform=name, local_hardware_id=i) for name, i in (("cpu", 1), ("gpu", 0), ("gpu", 1))
    ]
    order_after_current_streams(devices)
    assert events == ["the default stream waits for the user's stream"] * initialized


def test_every_eager_program_waits_for_current_streams(monkeypatch):
    ordered = []
    common = importlib.import_module("jtbridge.primitives._common")
    monkeypatch.setattr(common, "order_after_current_streams", ordered.append)
    x = jnp.ones(3)
    jtbridge.wrap(torch.sin, backend="xla")(x)
    assert ordered == [x.devices()]


@pytest.mark.parametrize("shape", [(2, 3), (), (5,)])
@pytest.mark.parametrize(
    "dtype",
    ["float32", "bfloat16", "float16", "complex64", "bool", "int8", "uint8", "int32", "uint16", "float8_e4m3fn"],
)
def test_calls_use_the_buffers_of_xla(events: list[str], dtype: str, shape: tuple[int, ...]):
    """Here XLA's buffers are on the CPU; reads and writes through them are the same."""
    traced = planned(lambda x, y: (y.logical_not(), x.movedim(0, -1).clone() if x.ndim else x), *arrays(dtype, shape))
    called = gpu_callback(traced)

    def on_buffers(_: Any, outs: Any, *ins: Any) -> None:
        called(Context(), *ins, *outs)

    x, y = arrays(dtype, shape)
    want = ~y, jnp.moveaxis(x, 0, -1) if x.ndim else x
    got = jax.jit(buffer_callback(on_buffers, [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in want]))(x, y)
    for g, w in zip(got, want, strict=True):
        assert (g.shape, g.dtype) == (w.shape, w.dtype)
        assert np.asarray(g).tobytes() == np.asarray(w).tobytes()
    assert "77 of 0 waits for torch's" in events


def arrays(dtype: str, shape: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    x = np.random.default_rng(0).integers(0, 2 if dtype == "bool" else 9, shape)
    return jnp.asarray(x).astype(dtype), jnp.asarray(x % 2 == 0)


def test_streams_are_restored_after_an_exception(events: list[str]):
    def fn(x: torch.Tensor) -> torch.Tensor:
        if (x < 0).any():
            raise LookupError("not there")
        return x

    traced = planned(fn, jnp.ones(3))
    with pytest.raises(TorchCallError, match="raised LookupError: not there"):
        gpu_callback(traced)(Context(), Buffer(-torch.ones(3)), Buffer(torch.ones(3)))
    assert events[-1] == "torch's waits for 77 of 3"


def test_out_of_memory_error(events: list[str]):
    def fn(x: torch.Tensor) -> torch.Tensor:
        if (x < 0).any():
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return x

    traced = planned(fn, jnp.ones(3))
    with pytest.raises(jtbridge.errors.DeviceError, match="XLA_PYTHON_CLIENT_MEM_FRACTION"):
        gpu_callback(traced)(Context(), Buffer(-torch.ones(3)), Buffer(torch.ones(3)))


def test_written_arguments_are_copied_first(events: list[str]):
    traced = planned(lambda x: x.add_(1), jnp.ones(3))
    x, out = torch.ones(3), torch.zeros(3)
    gpu_callback(traced)(Context(), Buffer(x), Buffer(out))
    assert out.tolist() == [2, 2, 2]
    assert x.tolist() == [1, 1, 1]


def test_a_graph_on_another_device():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    weight = graph.get_attr("weight")
    ones = graph.call_function(torch.ops.aten.ones.default, ([2],), {"device": torch.device("cpu")})
    graph.output((graph.call_function(torch.ops.aten.add.Tensor, (x, weight)), ones))
    module = torch.fx.GraphModule({"weight": torch.ones(2)}, graph)
    total, made = on_device(module, torch.device("meta")).forward(torch.ones(2, device="meta"))
    assert (total.device.type, made.device.type) == ("meta", "meta")
    assert module.forward(torch.ones(2))[0].tolist() == [2, 2]


def test_a_graph_that_was_captured_for_a_gpu_runs_on_the_cpu():
    """An example is the graph of a gradient whose arguments are on the CPU."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    ones = graph.call_function(torch.ops.aten.ones.default, ([3],), {"device": torch.device("cuda")})
    graph.output((graph.call_function(torch.ops.aten.add.Tensor, (x, ones)),))
    traced = planned(lambda x: x + 1, jnp.ones(3))
    function = GraphFunction(traced, torch.fx.GraphModule({}, graph), traced.in_types, traced.out_types)
    (total,) = function(torch.ones(3))
    assert total.tolist() == [2, 2, 2]


def test_functions_that_are_called_on_the_host_are_captured_for_the_cpu(monkeypatch: pytest.MonkeyPatch):
    assert called_device("dlpack") == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert [called_device(name) for name in ("auto", "xla", "dlpack", "callback")] == ["cuda", "cuda", "cuda", "cpu"]
    with jax.default_device(jax.devices("cpu")[1]):
        assert called_device("dlpack") == "cpu"


def test_constants_of_another_device_are_read_in_every_run():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(torch.ops.aten.mul.Tensor, (graph.get_attr("weight"), x)),))
    weight = torch.ones(2, dtype=torch.float64)
    moved = on_device(torch.fx.GraphModule({"weight": weight}, graph), torch.device("meta"))
    copies = moved.graph.find_nodes(op="call_function", target=torch.ops.aten._to_copy.default)
    assert [node.kwargs for node in copies] == [{"device": torch.device("meta")}]
    assert moved.weight is weight
    assert moved.forward(torch.ones(2, device="meta"))[0].device.type == "meta"


def test_dtype_error_is_not_a_device_error():
    both = "Input type ({}) and weight type ({}) should be the same"
    for names, is_mixed in (
        (("torch.cuda.FloatTensor", "torch.cuda.HalfTensor"), False),
        (("torch.cuda.FloatTensor", "torch.FloatTensor"), True),
        (("torch.FloatTensor", "torch.cuda.FloatTensor"), True),
    ):
        error = RuntimeError(both.format(*names))
        add_device_note(error, [torch.ones(2, device="meta")])
        assert hasattr(error, "__notes__") == is_mixed


def test_device_error_suggests_a_fix():
    error = RuntimeError("Expected all tensors to be on the same device, but found at least two devices")
    add_device_note(error, [torch.ones(2), torch.ones(2)])
    add_device_note(RuntimeError("something else"), [torch.ones(2, device="meta")])
    assert not hasattr(error, "__notes__")
    add_device_note(error, [torch.ones(2), torch.ones(2, device="meta")])
    (note,) = error.__notes__
    assert note.startswith("The arguments are on `meta`, as JAX placed them")
    assert '`module.to("meta")`' in note


def test_arrays_that_are_not_committed_follow_the_committed_one():
    cpus = jax.devices("cpu")
    there, here = jax.device_put(jnp.ones(3), cpus[2]), jnp.arange(3.0)
    assert [x.devices() for x in as_arrays([here, there])] == [{cpus[2]}] * 2
    assert as_arrays([here, here])[0] is here
    token = jnp.zeros(0, jnp.uint8)
    assert as_arrays([there, token])[1] is token
    assert jtbridge.wrap(torch.add)(here, there).devices() == {cpus[2]}
    f = jtbridge.wrap(lambda x, y: (torch.sin(x) * y).sum())
    for gradient in jax.grad(f, (0, 1))(there, here):
        assert gradient.devices() == {cpus[2]}
    assert jax.grad(jax.grad(lambda x: f(x, here)))(there[0]).devices() == {cpus[2]}
    with jax.default_device(cpus[1]):
        made_there = jnp.ones(3)
    moved = as_arrays([made_there, here])
    assert [(x.devices(), x.committed) for x in moved] == [({cpus[1]}, False)] * 2


def dropout_of_products(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.dropout(torch.tanh(x @ w), 0.5) + torch.arange(w.shape[1], device=x.device)


def test_device_error_in_a_host_callback_suggests_a_fix():
    def f(x: torch.Tensor) -> torch.Tensor:
        if jtbridge_runs:
            raise RuntimeError("Expected all tensors to be on the same device, but got mat1 is on cpu")
        return x * 1

    jtbridge_runs = False
    compiled = jax.jit(jtbridge.wrap(f, backend="callback")).lower(jnp.ones(2)).compile()
    jtbridge_runs = True
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"`model\(x\.to\(\"cuda\"\)\)\.cpu\(\)`"):
        compiled(jnp.ones(2)).block_until_ready()


def test_ordered_call_runs_on_the_device_of_closed_over_tensors(monkeypatch):
    """The test has no GPU, and uses the meta device in its place."""
    monkeypatch.setattr(importlib.import_module("jtbridge.calls.traced._call"), "device_closed_over", lambda fn: "meta")
    seen = []

    @jtbridge.wrap(effects="ordered", output_shapes=jax.ShapeDtypeStruct((2,), jnp.float32))
    def f(x: torch.Tensor) -> torch.Tensor:
        seen.append(x.device.type)
        return x

    with pytest.raises(Exception, match="Cannot copy out of meta tensor"):
        jax.jit(f)(jnp.ones(2)).block_until_ready()
    assert seen == ["meta"]


@pytest.mark.gpu
def test_an_ordered_training_step_on_a_gpu():
    model = torch.nn.Linear(3, 1).to("cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)  # each step takes 0.6 of the model's result

    @jtbridge.wrap(effects="ordered")
    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    for run in (step, jax.jit(step)):
        losses = [float(run(jnp.ones((4, 3)))) for _ in range(3)]
        assert losses == sorted(losses, reverse=True)


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_check_runs_on_the_device_of_closed_over_tensors(device):
    model = torch.nn.Linear(3, 2).to(device)
    report = jtbridge.check(lambda x: model(x).square().sum(), jnp.ones((4, 3)))
    assert {each.backend for each in report.comparisons if each.ok} >= {"xla"}, report


@pytest.mark.gpu
def test_values_and_gradients_on_a_gpu():
    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.layer_norm(torch.tanh(x @ w), (5,)) + torch.arange(5, device=x.device)

    f = jtbridge.wrap(fn, backend="dlpack")
    x, w = jnp.linspace(-1, 1, 12).reshape(3, 4), jnp.linspace(-1, 2, 20).reshape(4, 5)
    here = [torch.tensor(np.asarray(a)).requires_grad_() for a in (x, w)]
    want = fn(*here)
    np.testing.assert_allclose(jax.jit(f)(x, w), want.detach(), rtol=1e-4, atol=1e-5)
    (want**2).sum().backward()
    got = jax.jit(jax.grad(lambda x, w: (f(x, w) ** 2).sum(), argnums=(0, 1)))(x, w)
    for g, t in zip(got, here, strict=True):
        np.testing.assert_allclose(g, t.grad, rtol=1e-3, atol=1e-4)
    rows = jax.vmap(f, in_axes=(0, None))(x, w)
    np.testing.assert_allclose(rows, want.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
def test_the_same_key_gives_the_same_mask_on_a_gpu():
    f = jtbridge.wrap(dropout_of_products, backend="dlpack")
    x, w, key = jnp.ones((3, 4)), jnp.ones((4, 500)), jax.random.key(0)
    before = torch.cuda.get_rng_state()
    first, second = jax.jit(f)(x, w, rng=key), f(x, w, rng=key)
    np.testing.assert_array_equal(first, second)
    assert torch.equal(before, torch.cuda.get_rng_state())
    assert 0.3 < float((first - jnp.arange(500.0) == 0).mean()) < 0.7


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")
def test_calls_do_not_synchronize_or_copy_to_the_host():
    f = jax.jit(jtbridge.wrap(lambda x: torch.sin(x) * 2, backend="dlpack"))
    x = jnp.ones(1 << 24)
    f(x).block_until_ready()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype feature")
        torch.cuda.set_sync_debug_mode("error")  # torch raises where it would wait
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            f(x).block_until_ready()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    copies = [event.key for event in profile.key_averages() if "DtoH" in event.key or "HtoD" in event.key]
    assert not copies


@pytest.mark.gpu
def test_call_reads_weights_just_written_by_torch():
    weight = torch.zeros(1 << 24, device="cuda")
    f = jax.jit(jtbridge.wrap(lambda x: (x + weight).sum(), backend="dlpack"))
    x = jnp.zeros(1 << 24)
    f(x).block_until_ready()
    for step in range(1, 6):
        torch.cuda._sleep(10_000_000)  # torch's stream is late
        weight.fill_(step)
        assert float(f(x)) == step * (1 << 24)


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["auto", "dlpack", "jit"])
def test_weights_being_written_on_a_user_stream(way: str):
    """An eager call waits for the current stream. A program compiled by the user waits for the default stream alone."""
    weight, stream = torch.zeros(1 << 24, device="cuda"), torch.cuda.Stream()
    eager = jtbridge.wrap(lambda x: (x + weight).sum(), backend="dlpack" if way == "jit" else way)
    f = jax.jit(eager) if way == "jit" else eager
    x = jnp.zeros(1 << 24)
    f(x).block_until_ready()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for step in range(1, 6):
            torch.cuda._sleep(10_000_000)
            weight.fill_(step)
            if way == "jit":
                torch.cuda.default_stream().wait_stream(stream)
            assert float(f(x)) == step * (1 << 24)


@pytest.mark.gpu
def test_every_gpu_runs_its_own_calls():
    f = jax.jit(jtbridge.wrap(lambda x: x * 2 + torch.ones(3), backend="dlpack"))
    for device in jax.devices():
        out = f(jax.device_put(jnp.arange(3.0), device))
        assert out.devices() == {device}
        np.testing.assert_array_equal(out, [1, 3, 5])
