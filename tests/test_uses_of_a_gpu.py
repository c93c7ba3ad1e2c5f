"""Uses of a GPU: modules on it, called in every way, compared with torch on the same device."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import jtbridge

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::jtbridge.errors.CalledWarning"),
]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = np.random.default_rng(0).standard_normal((6, 8)).astype(np.float32)
LARGE = np.random.default_rng(1).standard_normal((600, 256)).astype(np.float32)  # its memory is shared
WAYS: dict[str, Callable[[Any], Any]] = {"eager": lambda f: f, "jit": jax.jit}
sizes = pytest.mark.parametrize("x", [SMALL, LARGE], ids=["small", "large"])
ways = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
exact_products = jax.default_matmul_precision("highest")


def on_device(array: np.ndarray) -> torch.Tensor:
    return torch.tensor(array, device=DEVICE)


def on_host(value: Any) -> np.ndarray:
    return value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)


def assert_near(got: Any, want: Any, tolerance: float = 2e-3) -> None:
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        if isinstance(g, jax.Array):
            assert {device.platform for device in g.devices()} == {jax.default_backend()}
        np.testing.assert_allclose(on_host(g), on_host(w), rtol=tolerance, atol=tolerance)


def model(width: int = 8) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(width, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4)).to(DEVICE)


def torch_gradient(fn: Callable[[torch.Tensor], torch.Tensor], x: np.ndarray) -> torch.Tensor:
    tensor = on_device(x).requires_grad_()
    return torch.autograd.grad(fn(tensor), tensor)[0]


@pytest.mark.parametrize("backend", ["auto", "xla", "dlpack"])
@sizes
@ways
def test_a_module(way, x, backend):
    net = model(x.shape[1])
    f = jtbridge.wrap(net, backend=backend)
    array = jnp.asarray(x)
    assert_near(way(f)(array), net(on_device(x)))
    gradient = way(jax.grad(lambda v: (f(v) ** 2).sum()))(array)
    assert_near(gradient, torch_gradient(lambda v: (net(v) ** 2).sum(), x))
    pair = way(lambda v: jax.jvp(f, (v,), (v,)))(array)
    assert_near(pair, torch.func.jvp(net, (on_device(x),), (on_device(x),)))
    assert_near(way(jax.vmap(f))(array), net(on_device(x)))
    with torch.no_grad():
        net[0].weight.mul_(2)  # type: ignore[index]
    f.clear_cache()
    assert_near(way(lambda v: f(v))(array), net(on_device(x)))


@ways
def test_second_derivatives_and_gradients_of_rows(way):
    net = model()
    f = jtbridge.wrap(lambda v: (net(v) ** 2).sum())
    assert_near(way(jax.hessian(f))(jnp.asarray(SMALL[0])), torch.func.hessian(f.function)(on_device(SMALL[0])))
    rows = torch.func.vmap(torch.func.grad(f.function))(on_device(SMALL))
    assert_near(way(jax.vmap(jax.grad(f)))(jnp.asarray(SMALL)), rows)


@sizes
@ways
def test_an_argument_that_is_written_to(way, x):
    def f(v: torch.Tensor) -> torch.Tensor:
        v.mul_(3)
        return v.sum(0)

    array = jnp.asarray(x)
    assert_near(way(jtbridge.wrap(f))(array), on_device(x).mul(3).sum(0))
    _, mutated = way(jtbridge.wrap(f, return_mutated=True))(array)
    assert_near(list(mutated.values()), [3 * x])
    np.testing.assert_array_equal(array, x)


@sizes
def test_arguments_stored_by_ordered_calls(x):
    kept = []

    @jtbridge.wrap(effects="ordered")
    def f(v: torch.Tensor) -> torch.Tensor:
        kept.append(v.detach())
        return v * 2

    g = jax.jit(lambda v: f(v + 1))
    for i in range(5):
        g(jnp.asarray(x) * i).block_until_ready()
    jax.effects_barrier()
    jax.block_until_ready([jnp.asarray(x) * i for i in range(20)])  # takes memory that was free
    assert_near(kept, [x * i + 1 for i in range(5)], 1e-5)


def test_results_and_arguments_stored_by_an_eager_call():
    kept = []

    def f(v: torch.Tensor) -> torch.Tensor:
        y = v * 2
        kept.extend([v, y])
        return y

    array = jnp.asarray(LARGE)
    y = jtbridge.wrap(f)(array)
    for tensor in kept:
        tensor.zero_()
    assert_near([array, y], [LARGE, 2 * LARGE], 1e-6)


@ways
def test_a_module_in_training(way):
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU()).to(DEVICE).train()
    images = np.random.default_rng(3).standard_normal((2, 3, 9, 9)).astype(np.float32)
    functional = jtbridge.module(net)
    params, state = functional.init()
    out, new = way(lambda p, s, v: functional(p, s, v, train=True))(params, state, jnp.asarray(images))
    assert_near(out, net(on_device(images)), 1e-2)
    assert_near(new["1.running_mean"], net[1].running_mean, 1e-2)


@sizes
@ways
def test_random_numbers(way, x):
    f = jtbridge.wrap(lambda v: F.dropout(v.exp(), 0.5, True) + 0 * torch.rand_like(v))
    before = torch.cuda.get_rng_state() if DEVICE == "cuda" else torch.get_rng_state()
    array, key = jnp.asarray(x), jax.random.key(0)
    y = way(f)(array, rng=key)
    np.testing.assert_array_equal(y, way(f)(array, rng=key))
    value, tangent = way(lambda v: jax.jvp(lambda u: f(u, rng=key), (v,), (jnp.ones_like(v),)))(array)
    np.testing.assert_array_equal(np.asarray(value) == 0, np.asarray(tangent) == 0)
    value, pull = jax.vjp(lambda v: way(f)(v, rng=key), array)
    np.testing.assert_array_equal(np.asarray(value) == 0, np.asarray(pull(jnp.ones_like(value))[0]) == 0)
    assert torch.equal(before, torch.cuda.get_rng_state() if DEVICE == "cuda" else torch.get_rng_state())


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("backend", ["auto", "dlpack"])
@ways
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
def test_a_checkpoint_draws_the_mask_of_its_forward_again(way, backend, reentrant):
    f = jtbridge.wrap(
        lambda v: checkpoint(lambda u: F.dropout(u, 0.5, True), v, use_reentrant=reentrant), backend=backend
    )
    key, ones = jax.random.key(0), jnp.ones((6, 8))
    with_key = way(lambda v: f(v, rng=key))
    for call in (with_key, with_key if way is jax.jit else f):  # outside of jit a key is optional
        value, pull = jax.vjp(call, ones)
        assert 0 < int((value == 0).sum()) < value.size
        np.testing.assert_array_equal(pull(ones)[0], value)


def test_seed_set_inside_a_call_does_not_affect_other_calls():
    def fn(v):
        torch.cuda.manual_seed(3)
        return torch.rand_like(v)

    f = jtbridge.wrap(fn, backend="dlpack")
    before = torch.cuda.get_rng_state()
    first, second = (f(jnp.ones(8), rng=jax.random.key(seed)) for seed in (0, 1))
    np.testing.assert_array_equal(first, second)
    with pytest.raises(jtbridge.errors.RandomnessError, match="seeds torch's generator"):
        jax.jit(lambda v: f(v, rng=jax.random.key(0)))(jnp.ones(8))
    assert torch.equal(before, torch.cuda.get_rng_state())


@pytest.mark.parametrize("backend", ["auto", "dlpack"])
@ways
def test_dropout_between_layers_of_an_lstm_follows_from_the_key(way, backend):
    net = torch.nn.LSTM(8, 16, num_layers=2, dropout=0.5).to(DEVICE).train()
    f = jtbridge.wrap(lambda v: net(v)[0], backend=backend)
    call = way(lambda v, seed: f(v, rng=jax.random.key(seed)))
    x = jnp.asarray(SMALL)
    np.testing.assert_allclose(call(x, 0), call(x, 0), rtol=1e-5, atol=1e-6)
    assert np.abs(np.asarray(call(x, 0)) - np.asarray(call(x, 1))).max() > 1e-3
    value, pull = jax.vjp(lambda v: call(v, 0).sum(), x)
    slope = (float(call(1.01 * x, 0).sum()) - float(call(0.99 * x, 0).sum())) / 0.02
    np.testing.assert_allclose(value, call(x, 0).sum(), rtol=1e-4)
    np.testing.assert_allclose(jnp.vdot(x, pull(jnp.ones(()))[0]), slope, rtol=0, atol=5e-2)


def test_one_key_gives_two_draws_two_results():
    f = jtbridge.wrap(lambda v: (torch.rand(8, device=DEVICE), torch.rand_like(v)))
    a, b = f(jnp.ones(8), rng=jax.random.key(0))
    assert (np.asarray(a) != np.asarray(b)).any()


OPERATORS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "max_pool1d": lambda v: F.max_pool1d(v[None], 2),
    "cummax": lambda v: v.cummax(1).values,
    "topk": lambda v: v.topk(3).values,
    "sort": lambda v: v.sort(dim=1, stable=True).values,
    "svdvals": torch.linalg.svdvals,
    "qr": lambda v: torch.linalg.qr(v[:, :6]).R.abs(),
    "solve": lambda v: torch.linalg.solve(v @ v.T + 9 * torch.eye(6, device=v.device), v),
    "eigvalsh": lambda v: torch.linalg.eigvalsh(v @ v.T),
    "cumsum": lambda v: v.cumsum(0),
    "logsumexp": lambda v: v.logsumexp(1),
    "rfft": lambda v: torch.fft.rfft(v).abs(),
    "index_add": lambda v: v.new_zeros(3, 8).index_add(0, torch.tensor([0, 1, 2, 0, 1, 2], device=v.device), v),
    "scatter_add": lambda v: torch.zeros_like(v).scatter_add(1, (v > 0).long(), v),
    "embedding": lambda v: F.embedding(torch.tensor([0, 3, 3], device=v.device), v),
    "attention": lambda v: F.scaled_dot_product_attention(v[None, None], v[None, None], v[None, None], is_causal=True),
    "layer_norm": lambda v: F.layer_norm(v, (8,)),
    "group_norm": lambda v: F.group_norm(v[None], 2),
    "bce": lambda v: F.binary_cross_entropy_with_logits(v, torch.ones_like(v)),
    "ctc": lambda v: F.ctc_loss(v[:, None].log_softmax(2), torch.tensor([[1, 2]], device=v.device), (6,), (2,)),
    "cdist": lambda v: torch.cdist(v, v + 1),
    "pdist": F.pdist,
    "bicubic": lambda v: F.interpolate(v[None, None], scale_factor=2, mode="bicubic"),
    "pinv": torch.linalg.pinv,
    "det": lambda v: torch.linalg.det(v[:, :6]),
    "lu": lambda v: torch.linalg.lu_factor(v[:, :6]).LU,
    "median": lambda v: v.median(1).values,
    "kthvalue": lambda v: v.kthvalue(2).values,
    "unfold": lambda v: v.unfold(1, 3, 2),
    "renorm": lambda v: v.renorm(2, 0, 1.0),
    "gammaln": lambda v: torch.special.gammaln(v.abs() + 1),
    "erfinv": lambda v: torch.erfinv(v.tanh()),
    "prod": lambda v: v.prod(1),
    "var": lambda v: v.var(0),
    "amax": lambda v: v.amax(1),
    "logcumsumexp": lambda v: v.logcumsumexp(1),
    "bfloat16": lambda v: v.to(torch.bfloat16).sin().float(),
    "float16": lambda v: (v.half() @ v.half().T).float(),
}


@pytest.mark.parametrize("backend", ["auto", "dlpack"])
@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator(name, backend):
    fn = OPERATORS[name]
    f, x = jtbridge.wrap(fn, backend=backend), jnp.asarray(SMALL)
    want = fn(on_device(SMALL))
    weights = np.cos(np.arange(want.numel(), dtype=np.float32)).reshape(want.shape)
    gradient = torch_gradient(lambda v: (fn(v) * on_device(weights)).sum(), SMALL)
    tolerance = 3e-2 if name in ("bfloat16", "float16") else 2e-3
    with exact_products:
        for way in WAYS.values():
            assert_near(way(f)(x), want, tolerance)
            assert_near(way(jax.grad(lambda v: (f(v) * weights).sum()))(x), gradient, tolerance)


@ways
def test_an_operator_without_a_lowering(way):
    @torch.library.custom_op("uses_of_a_gpu::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    twice.register_fake(torch.empty_like)
    twice.register_autograd(lambda ctx, gradient: 2 * gradient)
    net = model()

    def fn(v: torch.Tensor) -> torch.Tensor:
        return net(twice(v.sin())).cos().sum()

    got = way(jax.value_and_grad(jtbridge.wrap(fn)))(jnp.asarray(SMALL))
    assert_near(got, (fn(on_device(SMALL)), torch_gradient(fn, SMALL)))


def test_sizes_that_depend_on_data():
    f = jtbridge.wrap(lambda v: v[v > 0] * 2)
    assert_near(f(jnp.asarray(LARGE)), 2 * LARGE[LARGE > 0], 1e-6)
    g = jtbridge.wrap(lambda v: (v[v > 0] ** 2).sum())
    assert_near(jax.jit(jax.grad(g))(jnp.asarray(SMALL)), np.where(SMALL > 0, 2 * SMALL, 0), 1e-5)


@sizes
def test_a_jax_function_in_torch(x):
    f = jtbridge.to_torch_function(lambda a: (jnp.sin(a) ** 2).sum())
    tensor = on_device(x).requires_grad_()
    y = f(tensor)
    assert y.device.type == DEVICE
    y.backward()
    assert_near(tensor.grad, (2 * tensor.sin() * tensor.cos()), 1e-4)
    rows = torch.func.vmap(torch.func.grad(f))(on_device(x))
    assert_near(rows, 2 * np.sin(x) * np.cos(x), 1e-4)


def test_conversions():
    assert jtbridge.to_torch(jnp.asarray(LARGE)).device.type == DEVICE
    tensor = on_device(LARGE)
    array = jtbridge.to_jax(tensor)
    tensor.zero_()
    assert_near(array, LARGE, 1e-6)
    jtbridge.to_torch(array, copy=True).zero_()
    assert_near(array, LARGE, 1e-6)


@pytest.mark.parametrize("backend", ["auto", "dlpack"])
def test_loops(backend):
    net = torch.nn.Sequential(model(), torch.nn.Linear(4, 8).to(DEVICE))
    f = jtbridge.wrap(net, backend=backend)
    want = on_device(SMALL)
    for _ in range(5):
        want = net(want)
    x = jnp.asarray(SMALL)
    assert_near(jax.jit(lambda x: jax.lax.scan(lambda c, _: (f(c), None), x, None, length=5)[0])(x), want)
    assert_near(jax.jit(lambda x: jax.lax.fori_loop(0, 5, lambda _, c: f(c), x))(x), want)


def test_threads():
    net = model(256)
    eager, called = jtbridge.wrap(net), jax.jit(jtbridge.wrap(net, backend="dlpack"))
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for step in range(1, 6):
                x = LARGE * number / step
                want = net(on_device(x))
                assert_near([eager(jnp.asarray(x)), called(jnp.asarray(x))], [want, want])
        except BaseException as error:  # noqa: BLE001 - a thread's error belongs to the test
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(1, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]


@ways
def test_the_default_device_of_torch(way):
    with torch.device(DEVICE):
        net = torch.nn.Linear(8, 4)
        f = jtbridge.wrap(lambda v: net(v) + torch.arange(4.0))
        assert_near(way(f)(jnp.asarray(SMALL)), net(on_device(SMALL)) + torch.arange(4.0))


def test_a_module_on_the_cpu():
    net = torch.nn.Linear(8, 4)
    f = jtbridge.wrap(net)
    assert_near(jax.jit(f)(jnp.asarray(SMALL)), net(torch.tensor(SMALL)))
    if DEVICE == "cuda":
        with pytest.raises(RuntimeError) as caught:
            f(jnp.asarray(SMALL))
        assert 'module.to("cuda")' in "".join(caught.value.__notes__)
    cpu = jax.devices("cpu")[0]
    assert f(jax.device_put(jnp.asarray(SMALL), cpu)).devices() == {cpu}


def test_a_donated_argument():
    net = model(256)
    f = jax.jit(jtbridge.wrap(lambda v: net(v).sum() + v * 2, backend="dlpack"), donate_argnums=0)
    want = net(on_device(LARGE)).sum() + 2 * on_device(LARGE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # JAX says where it cannot use a donated array
        assert_near(f(jnp.asarray(LARGE)), want, 1e-2)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int32", "int8", "uint8", "bool", "complex64"])
def test_a_dtype(dtype):
    x = jnp.abs(jnp.asarray(LARGE)).astype(dtype)
    want = np.concatenate([x, x])
    for backend in ("auto", "dlpack", "xla"):
        f = jtbridge.wrap(lambda v: torch.cat([v, v]), backend=backend)
        for way in WAYS.values():
            got = way(f)(x)
            assert got.dtype == x.dtype
            np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("backend", ["auto", "dlpack", "xla"])
@ways
def test_other_layouts(way, backend):
    def fn(v: torch.Tensor) -> torch.Tensor:
        return v.T.contiguous()[::2].T

    assert_near(way(jtbridge.wrap(fn, backend=backend))(jnp.asarray(LARGE).T), fn(on_device(LARGE).T), 1e-6)
    net = torch.nn.Conv2d(16, 8, 3).to(DEVICE).to(memory_format=torch.channels_last)
    images = np.random.default_rng(0).standard_normal((2, 16, 64, 64)).astype(np.float32)
    assert_near(way(jtbridge.wrap(net, backend=backend))(jnp.asarray(images)), net(on_device(images)), 2e-2)


@ways
def test_error_does_not_affect_the_next_call(way):
    with pytest.raises(Exception, match=r"shapes|mat1|size"):
        way(jtbridge.wrap(lambda v: v @ v))(jnp.asarray(SMALL))
    assert_near(way(jtbridge.wrap(torch.sin))(jnp.asarray(SMALL)), np.sin(SMALL), 1e-4)
