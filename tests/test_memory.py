"""Functions, arrays, weights and traced functions are released when nothing uses them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch

import jtbridge
from jtbridge.calls.traced import _call

X = jnp.arange(3.0)

USES: dict[str, Callable[[Callable], Any]] = {
    "eager": lambda f: f(X),
    "jit": lambda f: jax.jit(f)(X),
    "grad": lambda f: jax.grad(f)(X),
    "jit_of_grad": lambda f: jax.jit(jax.value_and_grad(f))(X),
    "vmap": lambda f: jax.vmap(f)(jnp.ones((2, 3))),
    "jit_of_vmap_of_grad": lambda f: jax.jit(jax.vmap(jax.grad(f)))(jnp.ones((2, 3))),
    "hessian": lambda f: jax.jit(jax.hessian(f))(X),
    "jvp": lambda f: jax.jvp(f, (X,), (X,)),
    "scan": lambda f: jax.jit(lambda x: jax.lax.scan(lambda c, _: (f(x) + c, None), 0.0, None, length=2))(X),
    "make_jaxpr": lambda f: jax.make_jaxpr(jax.grad(f))(X),
}


def is_freed(ref: weakref.ref) -> bool:
    for _ in range(4):  # a compiled program is a chain of objects that free one another
        if ref() is not None:
            gc.collect()
    return ref() is None


@pytest.mark.parametrize("use", USES)
def test_function_is_freed_after_use(use: str, backend: str):
    def fn(x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x).sum()

    wrapped = jtbridge.wrap(fn)
    jax.block_until_ready(jax.tree.leaves(USES[use](wrapped)))
    ref = weakref.ref(fn)
    del fn, wrapped
    assert is_freed(ref)


@pytest.mark.parametrize("use", ["jit_of_grad", "vmap"])
def test_weights_are_freed_with_the_module(use: str, backend: str):
    def weight_of_a_used_module() -> weakref.ref:
        module = torch.nn.Linear(3, 1)
        wrapped = jtbridge.wrap(module)
        jax.block_until_ready(jax.tree.leaves(USES[use](lambda x: jnp.sin(wrapped(x)).sum())))
        return weakref.ref(module.weight)

    ref = weight_of_a_used_module()
    assert is_freed(ref)


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit, jax.grad, lambda f: jax.jit(jax.grad(f))])
def test_arguments_and_tensors_are_freed_after_the_call(transform: Callable, backend: str):
    tensors = []

    def fn(x: torch.Tensor) -> torch.Tensor:
        tensors.append(weakref.ref(x))
        return torch.sin(x).sum()

    run = transform(jtbridge.wrap(fn, purity="allow"))  # it writes to `tensors`
    run(X).block_until_ready()
    tensors.clear()
    x = X + 1
    ref = weakref.ref(x)
    run(x).block_until_ready()
    del x
    assert is_freed(ref)
    assert [tensor() for tensor in tensors] == [None] * len(tensors)


def test_result_does_not_keep_its_function_alive(backend: str):
    def fn(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    y, pullback = jax.vjp(jtbridge.wrap(fn), X)
    ref = weakref.ref(fn)
    del fn, pullback
    assert is_freed(ref)
    assert y.tolist() == [0, 2, 4]


@pytest.mark.filterwarnings("ignore::jtbridge.errors.RetracingWarning")
def test_traced_functions_are_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_call, "_MAX_TRACED", 4)
    f = jtbridge.wrap(lambda x, n: x * n, backend="xla")
    compiled = jax.jit(lambda x: f(x, 0))
    compiled(X)
    for n in range(10):
        assert f(X, n).tolist() == (X * n).tolist()
        assert len(f._traced_calls.outside_traces) <= 4
    kept = [signature.statics[1] for signature, *_ in f._traced_calls.outside_traces]
    assert kept == [6, 7, 8, 9]
    f(X, 6)
    f(X, 10)
    assert [signature.statics[1] for signature, *_ in f._traced_calls.outside_traces] == [8, 9, 6, 10]
    assert compiled(X).tolist() == [0, 0, 0]  # a program outlives its traced function


def test_equal_calls_reuse_one_trace():
    f = jtbridge.wrap(lambda x, n: (x**n).sum(), backend="xla")
    sizes = []
    for _ in range(3):
        for n in (2, 3):
            jax.grad(f)(jnp.ones(3), n)
            jax.jit(jax.vmap(jax.grad(f), in_axes=(0, None)), static_argnums=1)(jnp.ones((2, 3)), n)
        traced = f._traced_calls.outside_traces.values()
        sizes.append(
            [
                (len(p.cache.splits), len(p.cache.sequential), len(p.cache.double_reverse), len(p.cache.compiled))
                for p in traced
            ]
        )
    assert len(f._traced_calls.outside_traces) == 2
    assert sizes[0] == sizes[1] == sizes[2]


@pytest.mark.parametrize("use", ["eager", "grad", "vmap", "jvp"])
def test_translated_functions_called_eagerly_are_freed(use: str):
    def fn(x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x).sum()

    wrapped = jtbridge.wrap(fn, backend="xla")
    jax.block_until_ready(jax.tree.leaves(USES[use](wrapped)))
    ref = weakref.ref(fn)
    del fn, wrapped
    assert is_freed(ref)


@pytest.mark.filterwarnings("ignore::jtbridge.errors.CalledWarning", "ignore::jtbridge.errors.SequentialVmapWarning")
@pytest.mark.parametrize("transform", [jax.grad, jax.hessian, lambda f: lambda x: jax.jvp(f, (x,), (x,))])
def test_constants_beside_a_called_function_are_freed(transform):
    """If the error of a failed translation were kept, it would keep the tracers of its trace alive."""

    def once() -> weakref.ref:
        f = jtbridge.wrap(lambda x: torch.sin(x[x > -100]).reshape(x.shape) * x)
        constant = jnp.ones(10_000)
        jax.jit(transform(lambda x: (f(x) * constant[:3]).sum()))(jnp.ones(3))
        return weakref.ref(constant)

    found = once()
    jax.clear_caches()
    gc.collect()
    assert found() is None
    f = jtbridge.wrap(lambda x: torch.sin(x[x > -100]).reshape(x.shape) * x)
    with jax.checking_leaks():
        jax.jit(transform(lambda x: f(x).sum()))(jnp.ones(3))


@pytest.mark.parametrize("size", [4, 1 << 18])
def test_a_cache_of_storages_does_not_find_the_memory_of_a_result(size: int):
    """Torch keeps the object of a storage as long as its memory is used, for example by an array that took it over."""
    cache: weakref.WeakValueDictionary[str, torch.UntypedStorage] = weakref.WeakValueDictionary()

    @jtbridge.wrap
    def f(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        cache["y"] = y.untyped_storage()
        return y

    y = f(jnp.ones(size))
    gc.collect()
    for storage in cache.values():
        storage.fill_(0)
    assert (y == 2).all()
