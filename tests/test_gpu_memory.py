"""Memory that torch and XLA hand to each other on a GPU: waits between streams, and on a GPU no overwritten values.

Without a GPU, memory of the CPU is used instead of the GPU's.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jtbridge
from jtbridge.calls.eager import _arrays
from jtbridge.core import gpu_memory
from jtbridge.errors import DeviceError
from jtbridge.reverse import _tensors

cpu = pytest.mark.cpu


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that records the transfers, in order. Transfers of every size use the path of large ones.

    JAX's device for a tensor on the CPU is the CPU.
    """
    events: list[str] = []
    monkeypatch.setattr(gpu_memory, "_BY_HOST", 0)

    def recorded(name: str, function: Any) -> Any:
        return lambda *args: events.append(name) or function(*args)

    monkeypatch.setattr(gpu_memory, "gpu", lambda device, what: jax.devices()[0])
    monkeypatch.setattr(gpu_memory, "wait_for_torch", recorded("wait for torch", lambda device: None))
    monkeypatch.setattr(torch.cuda, "device", recorded("current device", contextlib.nullcontext))
    monkeypatch.setattr(jax.dlpack, "from_dlpack", recorded("XLA shares", jax.dlpack.from_dlpack))
    monkeypatch.setattr(gpu_memory, "shared_with_torch", recorded("torch shares", gpu_memory.shared_with_torch))
    monkeypatch.setattr(torch.Tensor, "copy_", recorded("torch copies", torch.Tensor.copy_))
    return events


X = jnp.linspace(1, 2, 6).reshape(2, 3)
INTO_XLA = ["torch shares", "torch copies", "wait for torch"]


@cpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64", "bool", "int32", "uint8"])
def test_array_has_separate_memory(events, dtype):
    tensor = torch.arange(64).reshape(8, 8).to(getattr(torch, dtype)).T
    array = gpu_memory.copied_to_xla(tensor)
    assert events == INTO_XLA
    want = jtbridge.to_jax(tensor)
    tensor.zero_()
    assert array.dtype == want.dtype
    np.testing.assert_array_equal(array, want)


@cpu
@pytest.mark.parametrize("kind", ["conj", "neg", "zero", "requires_grad"])
def test_an_array_has_the_values_of_a_lazy_tensor(events, kind):
    x = torch.complex(torch.arange(32.0), torch.ones(32))
    tensor = {
        "conj": x.conj(),
        "neg": x.conj().imag,
        "zero": torch._efficientzerotensor((32,)),
        "requires_grad": x.requires_grad_() if kind == "requires_grad" else x,
    }[kind]
    np.testing.assert_array_equal(gpu_memory.copied_to_xla(tensor), tensor.detach().resolve_conj().resolve_neg() + 0)
    assert events == INTO_XLA


@cpu
def test_no_elements(events):
    assert gpu_memory.copied_to_xla(torch.zeros(0, 3)).shape == (0, 3)
    assert events == []


@cpu
def test_tensor_has_separate_memory(events):
    array = jnp.arange(64.0)
    tensor = gpu_memory.copied_to_torch(array)
    assert events == ["torch shares"]
    tensor.zero_()
    np.testing.assert_array_equal(array, np.arange(64.0))


@cpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64", "bool", "int64", "float8_e4m3fn"])
@pytest.mark.parametrize("committed", [False, True])
def test_small_array_is_copied_through_the_host(events, monkeypatch, dtype, committed):
    monkeypatch.undo()
    monkeypatch.setattr(gpu_memory, "gpu", lambda device, what: jax.devices()[0])
    tensor = torch.arange(6).reshape(2, 3).to(getattr(torch, dtype)).T
    array = gpu_memory.copied_to_xla(tensor, committed=committed)
    assert not events
    assert array.committed == committed
    np.testing.assert_array_equal(array, jtbridge.to_jax(tensor))


@cpu
@pytest.mark.parametrize("dtype", ["float64", "int64"])
def test_an_array_has_the_dtype_that_jax_has(events, dtype):
    tensor = torch.tensor([1, 2**33 + 1], dtype=getattr(torch, dtype))
    array = gpu_memory.copied_to_xla(tensor)
    want = jtbridge.to_jax(tensor)
    assert array.dtype == want.dtype
    assert array.tolist() == want.tolist()


@cpu
@pytest.mark.parametrize("committed", [False, True])
def test_an_array_is_committed_if_asked_for(events, committed):
    array = gpu_memory.copied_to_xla(torch.ones(3), committed=committed)
    assert array.committed == committed
    assert array.tolist() == [1, 1, 1]


@cpu
def test_array_is_created_during_a_trace_or_under_debug_nans(events):
    def f(x: jax.Array) -> jax.Array:
        array = gpu_memory.copied_to_xla(torch.tensor([1.0, torch.nan]))
        assert not isinstance(array, jax.core.Tracer)
        return x + array

    np.testing.assert_array_equal(jax.jit(f)(jnp.ones(2)), [2, np.nan])
    with jax.debug_nans(True):
        np.testing.assert_array_equal(gpu_memory.copied_to_xla(torch.tensor([1.0, torch.nan])), [1, np.nan])


@cpu
def test_xla_shares_memory_once_torch_has_written_it(events):
    tensor = torch.ones(64)
    array = gpu_memory.shared_with_xla(tensor)
    assert events == ["wait for torch", "current device", "XLA shares"]
    assert array.unsafe_buffer_pointer() == tensor.data_ptr()


@cpu
def test_a_gpu_that_jax_does_not_have():
    with pytest.raises(DeviceError, match=r"A result of `f` lies on `cuda:7`, which JAX does not have here"):
        gpu_memory.gpu(torch.device("cuda", 7), "A result of `f` lies")


@cpu
def test_the_memory_of_arguments_is_reused_once_torch_has_read_them(monkeypatch):
    waited = []
    monkeypatch.setattr(_arrays, "wait_for_torch", waited.append)
    gpu = SimpleNamespace(committed=True, device=SimpleNamespace(platform="gpu", local_hardware_id=1))
    _arrays.Placement([gpu]).release()  # type: ignore[list-item]
    assert waited == [torch.device("cuda", 1)]
    _arrays.Placement([jnp.ones(3)]).release()
    assert len(waited) == 1


@cpu
@pytest.mark.parametrize("of", ["a value", "a gradient", "a derivative", "a second derivative"])
def test_every_eager_call_releases_its_arguments(monkeypatch, of):
    released = []
    monkeypatch.setattr(_arrays.Placement, "release", lambda self: released.append(self.device))
    f = jtbridge.wrap(lambda x: (x.sin() * x).sum())
    x = jnp.ones((1 << 8, 1 << 8))  # more than the fast path takes
    if of == "a value":
        f(x)
    if of == "a gradient":
        jax.grad(f)(x)
    if of == "a derivative":
        jax.jvp(f, (x,), (x,))
    if of == "a second derivative":
        jax.grad(lambda x: jax.grad(f)(x).sum())(x)
    assert len(released) >= {"a value": 1, "a gradient": 2, "a derivative": 2, "a second derivative": 3}[of]


@cpu
@pytest.mark.parametrize(
    "transform", [lambda f: f, jax.grad, jax.hessian, lambda f: jax.vmap(jax.grad(f)), lambda f: jax.jvp(f, (X,), (X,))]
)
def test_eager_calls_whose_results_are_copied_to_xla(events, monkeypatch, transform):
    def fn(x: Any) -> Any:
        return (x**3).sum()

    want = transform(fn)
    want = want(X) if callable(want) else want
    monkeypatch.setattr(torch.Tensor, "is_cpu", property(lambda self: False))
    monkeypatch.setattr(_arrays.Placement, "_on_gpu", lambda self, tensor, name: gpu_memory.copied_to_xla(tensor))
    got = transform(jtbridge.wrap(fn))
    got = got(X) if callable(got) else got
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=2e-6), got, want)
    assert events[:3] == INTO_XLA


@cpu
def test_results_of_a_jax_function_are_copied_and_released(events, monkeypatch):
    waited = []
    monkeypatch.setattr(_tensors, "wait_for_torch", waited.append)
    arrays = [jnp.ones(3), jnp.zeros((0, 2)), jnp.arange(3)]
    device = SimpleNamespace(type="cuda")
    monkeypatch.setattr(torch, "empty", lambda shape, dtype, device: torch.zeros(shape, dtype=dtype))
    tensors = _tensors.to_tensors(arrays, device)  # type: ignore[arg-type]
    assert [t.tolist() for t in tensors] == [[1, 1, 1], [], [0, 1, 2]]
    assert [tensors[i].data_ptr() == arrays[i].unsafe_buffer_pointer() for i in (0, 2)] == [False, False]
    assert waited == [device]


@cpu
@pytest.mark.parametrize("can_replace", [False, True])
def test_an_argument_is_copied_where_its_memory_cannot_be_replaced_later(monkeypatch, can_replace):
    """In torch 2.11 the memory of a storage on a GPU stays where it is."""
    monkeypatch.setattr(_arrays, "_platform", lambda array: "cuda")
    monkeypatch.setattr(_arrays, "can_replace_memory", lambda device: device == "cpu" or can_replace)
    x = jnp.ones(1 << 17)
    assert _arrays.is_copied(x) != can_replace

    def f(x: torch.Tensor) -> torch.Tensor:
        return x.mul_(2).sum()

    assert jax.value_and_grad(jtbridge.wrap(f))(x)[0] == 2 << 17
    assert float(jtbridge.wrap(f)(x)) == 2 << 17
    assert x[:2].tolist() == [1, 1]


MANY = 1 << 24
BEHIND = 200_000_000  # cycles of a GPU, a tenth of a second


@pytest.mark.gpu
def test_deleted_argument_is_not_overwritten_before_torch_reads_it():
    def slow(x: torch.Tensor) -> torch.Tensor:
        torch.cuda._sleep(BEHIND)
        return x * 2

    f, x = jtbridge.wrap(slow), jnp.ones(MANY)
    for _ in range(4):
        y = f(x + 1)
        others = [x * i for i in range(5, 9)]  # XLA uses the memory of `x + 1` for one of them
        assert bool((y == 4).all())
        del others


@pytest.mark.gpu
def test_an_argument_of_a_call_without_results_on_the_gpu_is_not_overwritten():
    total = torch.zeros(MANY, device="cuda")

    def slow(x: torch.Tensor) -> None:
        torch.cuda._sleep(BEHIND)
        total.add_(x)

    f, x = jtbridge.wrap(slow), jnp.ones(MANY)
    for step in range(1, 5):
        f(x + 1)
        others = [x * i for i in range(5, 9)]
        assert bool((total == 2 * step).all())
        del others


@pytest.mark.gpu
def test_deleted_result_is_not_overwritten_before_xla_reads_it():
    @jax.jit
    def slow(y: jax.Array, w: jax.Array) -> jax.Array:
        w = jax.lax.fori_loop(0, 300, lambda _, w: jnp.tanh(w @ w), w)
        return jnp.where(w[0, 0] > 2, 0, y)

    f, x, w = jtbridge.wrap(lambda x: x + 1), jnp.zeros(MANY), jnp.ones((2048, 2048)) / 2048
    slow(f(x), w).block_until_ready()
    for _ in range(4):
        y = slow(f(x), w)
        others = [torch.full((MANY,), float(i), device="cuda") for i in range(5, 9)]  # they reuse the memory of `f(x)`
        assert bool((y == 1).all())
        del others


@pytest.mark.gpu
def test_jax_function_result_is_not_overwritten_before_torch_reads_it():
    double = jtbridge.to_torch_function(lambda x: x * 2)
    x, numbers = torch.ones(MANY, device="cuda"), jnp.ones(MANY)
    double(x)
    for _ in range(4):
        y = double(x)
        torch.cuda._sleep(BEHIND)
        z = y + 1
        del y
        others = [numbers * i for i in range(5, 9)]
        assert bool((z == 3).all())
        del others


@pytest.mark.gpu
def test_eager_calls_on_every_gpu():
    """Torch exports only tensors of its current GPU."""
    f = jtbridge.wrap(lambda x: (x * 2).sum())
    double = jtbridge.to_torch_function(lambda x: x * 2)
    for i, device in enumerate(jax.local_devices()):
        x = jax.device_put(jnp.ones(3), device)
        assert f(x).devices() == jax.grad(f)(x).devices() == {device}
        tensor = torch.ones(3, device=f"cuda:{i}")
        assert jtbridge.to_jax(tensor).devices() == jtbridge.to_jax(tensor, copy=False).devices() == {device}
        assert double(tensor).device == tensor.device


WRITES = {
    "operator": lambda x: x.zero_(),
    "part": lambda x: x[1:].zero_(),
    "data": lambda x: x.data.zero_(),
    "detached": lambda x: x.detach().zero_(),
    "storage": lambda x: x.untyped_storage().fill_(0),
    "dlpack": lambda x: torch.from_dlpack(x.detach()).zero_(),
    "set": lambda x: torch.empty(0, device="cuda").set_(x.untyped_storage(), 0, (4,)).zero_(),
}
CALLS = {
    "value": lambda f, x: f(x),
    "gradient": lambda f, x: jax.grad(f)(x),
    "batch": lambda f, x: jax.vmap(f)(x[None]),
    "derivative": lambda f, x: jax.jvp(f, (x,), (x,)),
}


@pytest.mark.gpu
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("write", WRITES)
def test_write_to_an_argument_does_not_change_the_array(write, call):
    def f(x: torch.Tensor) -> torch.Tensor:
        y = (x * x).sum()
        with torch.no_grad():
            WRITES[write](x)
        return y

    x = jnp.ones(1 << 18)
    # torch may refuse to differentiate or to batch such a write: that leaves the array too
    with contextlib.suppress(Exception):
        CALLS[call](jtbridge.wrap(f), x)
    assert float((x + 0).sum()) == 1 << 18


@pytest.mark.gpu
@pytest.mark.parametrize("call", ["value", "gradient", "derivative"])
@pytest.mark.parametrize("keep", [lambda x: x, lambda x: x.detach(), lambda x: x.detach()[1:]])
def test_later_write_to_a_stored_argument_leaves_the_array_unchanged(keep, call):
    kept = []

    def f(x: torch.Tensor) -> torch.Tensor:
        kept.append(keep(x))
        return (x**2).sum()

    x = jnp.ones(1 << 18)
    CALLS[call](jtbridge.wrap(f), x)
    with torch.no_grad():
        kept[0].zero_()
    assert float((x + 0).sum()) == 1 << 18
