"""Wrapped functions called from several Python threads and from several devices at once."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import PartitionSpec as P

import jtbridge
from jtbridge.core.module_locks import module_locks
from jtbridge.transforms import _jvp

from .compare import assert_matches

pytestmark = pytest.mark.timeout(60)
THREADS, CALLS = 6, 10


def from_threads(work: Callable[[int], None]) -> None:
    """Run `work(0)`, `work(1)`, ... in threads that all start at once; their exceptions are raised."""
    barrier = threading.Barrier(THREADS)

    def start(i: int) -> None:
        barrier.wait()
        work(i)

    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        for future in [pool.submit(start, i) for i in range(THREADS)]:
            future.result()


def fn(x: torch.Tensor) -> torch.Tensor:
    return (torch.tanh(x) * x).sum()


TRANSFORMS: dict[str, tuple[Callable, Callable]] = {
    "value": (lambda f: f, lambda t: fn(t)),
    "grad": (jax.grad, lambda t: torch.autograd.functional.jacobian(fn, t)),
    "jvp": (lambda f: lambda x: jax.jvp(f, (x,), (x,))[1], lambda t: torch.autograd.functional.jvp(fn, t, t)[1]),
    "vmap": (lambda f: jax.vmap(lambda x: f(x[None])), lambda t: torch.tanh(t) * t),
}


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_one_function_from_many_threads(name: str, jit: bool, backend: str):
    """Nothing is traced before, so that the threads also trace and compile at the same time."""
    transform, torch_form = TRANSFORMS[name]
    wrapped = transform(jtbridge.wrap(fn, backend=backend))
    run = jax.jit(wrapped) if jit else wrapped

    def work(i: int) -> None:
        for n in range(CALLS):
            values = np.linspace(-1, 1 + i, 3 + n % 2, dtype=np.float32)
            assert_matches(run(jnp.asarray(values)), torch_form(torch.from_numpy(values)))

    from_threads(work)


def test_modes_of_one_thread_do_not_affect_another(backend: str):
    f = jtbridge.wrap(lambda x: x * (2 if torch.is_grad_enabled() else 3), backend=backend)

    def work(i: int) -> None:
        with torch.set_grad_enabled(i % 2 == 0):
            for _ in range(CALLS):
                assert f(jnp.ones(2)).tolist() == [2 + i % 2] * 2
                assert torch.is_grad_enabled() == (i % 2 == 0)

    from_threads(work)


@pytest.mark.parametrize("own", ["dlpack", "callback", "xla"])
def test_locks_of_modules_are_taken_before_the_lock_of_forward_mode(own: str, monkeypatch: pytest.MonkeyPatch):
    """In the other order, two threads, one of which traces, would wait for each other for ever."""
    module = torch.nn.Linear(2, 2)
    (lock,) = module_locks([module])
    held = []

    class Recording:
        def __enter__(self) -> None:
            held.append(lock._is_owned())

        def __exit__(self, *error: object) -> None:
            pass

    monkeypatch.setattr(_jvp, "FORWARD_MODE", Recording())
    f = jtbridge.wrap(module, backend=own)
    jax.block_until_ready(jax.jit(lambda x: jax.jvp(f, (x,), (x,)))(jnp.ones(2)))
    assert held
    assert all(held)


def test_keys_from_many_threads(backend: str):
    f = jtbridge.wrap(lambda x: torch.nn.functional.dropout(x, 0.5), backend=backend)
    expected = [f(jnp.ones(20), rng=jax.random.key(i)).tolist() for i in range(THREADS)]
    run = jax.jit(lambda x, key: f(x, rng=key))
    before = torch.get_rng_state()

    def work(i: int) -> None:
        for _ in range(CALLS):
            assert run(jnp.ones(20), jax.random.key(i)).tolist() == expected[i]
            assert f(jnp.ones(20), rng=jax.random.key(i)).tolist() == expected[i]

    from_threads(work)
    assert torch.equal(torch.get_rng_state(), before)


def test_ordered_calls_of_each_thread_keep_their_order(backend: str):
    seen: list[tuple[int, int]] = []
    f = jtbridge.wrap(lambda x: (seen.append(tuple(x.tolist())), x)[1], effects="ordered")
    f(jnp.zeros(2, jnp.int32))
    seen.clear()
    from_threads(lambda i: [f(jnp.array([i, n])) for n in range(CALLS)])
    assert sorted(seen) == [(i, n) for i in range(THREADS) for n in range(CALLS)]
    for i in range(THREADS):
        assert [n for thread, n in seen if thread == i] == list(range(CALLS))


@pytest.mark.parametrize("gradient", [False, True])
def test_four_devices_share_a_module(gradient: bool, backend: str):
    """functional_call swaps the parameters of the same module in place, with different ones on every device."""
    mesh = jax.make_mesh((4,), ("i",), devices=jax.devices()[:4], axis_types=(jax.sharding.AxisType.Auto,))
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    original = {name: p.detach().clone() for name, p in model.named_parameters()}
    scales = jnp.arange(1.0, 5.0)
    f = jtbridge.wrap(lambda p, x: torch.func.functional_call(model, p, (x,)).sum())

    def device(p: dict, scale: jax.Array, x: jax.Array) -> jax.Array:
        scaled = {name: w * scale[0] for name, w in p.items()}
        return (jax.grad(f, argnums=1)(scaled, x).sum() if gradient else f(scaled, x))[None]

    run = jax.jit(jax.shard_map(device, mesh=mesh, in_specs=(P(), P("i"), P("i")), out_specs=P("i")))
    parameters, x = jax.tree.map(lambda w: jnp.asarray(w.numpy()), original), jnp.arange(64.0).reshape(8, 8) / 64

    def expected(i: int) -> torch.Tensor:
        rows = torch.from_numpy(np.array(x[2 * i : 2 * i + 2])).requires_grad_()
        scaled = {name: w * (i + 1) for name, w in original.items()}
        y = torch.func.functional_call(model, scaled, (rows,)).sum()
        return torch.autograd.grad(y, rows)[0].sum() if gradient else y.detach()

    for _ in range(CALLS):
        found = run(parameters, scales, x).block_until_ready()  # before this thread swaps parameters itself
        assert_matches(found, torch.stack([expected(i) for i in range(4)]))
    for name, p in model.named_parameters():
        assert torch.equal(p, original[name])


def test_progress_bar_thread_is_not_state(monkeypatch: pytest.MonkeyPatch):
    tqdm = pytest.importorskip("tqdm").tqdm
    monitor = type("TMonitor", (), {"__module__": "tqdm._monitor", "woken": 0})()
    monkeypatch.setattr(tqdm, "monitor", monitor)

    def f(x: torch.Tensor) -> torch.Tensor:
        tqdm.monitor.woken += 1  # as its own thread does at any time
        return x + 1

    assert_matches(jax.jit(jtbridge.wrap(f))(np.ones(2, np.float32)), torch.full((2,), 2.0))
