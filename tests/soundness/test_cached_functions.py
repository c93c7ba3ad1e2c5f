"""A trace leaves no result of its own in the caches of ``functools``."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jtbridge
from jtbridge.errors import CalledWarning, JtbridgeError, MutationError, RandomnessError

pytestmark = pytest.mark.filterwarnings("ignore::jtbridge.errors.CalledWarning")
X = jnp.arange(1.0, 4.0)


def drawn(n: int) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(0))


def through_sparse(n: int) -> torch.Tensor:
    return (torch.eye(n) * 3).to_sparse().to_dense()[0]


def permuted(n: int) -> torch.Tensor:
    return torch.randperm(n, generator=torch.Generator().manual_seed(2)).float()


def in_sequences(module: torch.nn.Module) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Sequential(module))


RUNS: dict[str, Callable] = {
    "jit": lambda w: jax.jit(w)(X),
    "gradient": lambda w: jax.jit(jax.grad(lambda x: w(x).sum()))(X) * X,
    "scan": lambda w: jax.lax.scan(lambda x, _: (w(x), None), X, length=1)[0],
    "vmap": lambda w: jax.vmap(w)(X[None])[0],
    "explain": lambda w: (jtbridge.explain(w, X), w(X))[1],
    "check": lambda w: (jtbridge.check(w, X), w(X))[1],
    "purity": lambda w: (jtbridge.purity(w, X), w(X))[1],
    "hessian": lambda w: (jax.hessian(lambda x: w(x).sum())(X), w(X))[1],
}


@pytest.mark.parametrize("decorate", [functools.cache, functools.lru_cache(maxsize=2)], ids=["cache", "bounded"])
@pytest.mark.parametrize("compute", [drawn, through_sparse, permuted])
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.filterwarnings("ignore::jtbridge.errors.SequentialVmapWarning")
def test_a_cached_constant(decorate, compute, run):
    cached = decorate(compute)
    wrapped = jtbridge.wrap(lambda x: x * cached(3))
    for _ in range(2):
        np.testing.assert_allclose(RUNS[run](wrapped), X * jnp.asarray(compute(3).numpy()), rtol=1e-6)
        assert torch.equal(cached(3), compute(3))


@pytest.mark.parametrize("backend", ["xla", "dlpack", "callback"])
def test_other_backends(backend):
    cached = functools.cache(drawn)
    wrapped = jtbridge.wrap(lambda x: x * cached(3), backend=backend)
    if backend == "xla":
        with pytest.raises(JtbridgeError, match="generator"):
            jax.jit(wrapped)(X)
    else:
        np.testing.assert_allclose(jax.jit(wrapped)(X), X * jnp.asarray(drawn(3).numpy()), rtol=1e-6)
    assert torch.equal(cached(3), drawn(3))


@pytest.mark.parametrize(
    "make",
    [
        torch.rand,
        lambda n: in_sequences(torch.nn.Linear(n, n)),
        lambda n: {"w": [torch.rand(n)]},
    ],
    ids=["tensor", "module", "tree"],
)
def test_cache_works_after_a_refused_draw(make):
    cached = functools.cache(make)

    def f(x):
        made = cached(3)
        return x * (made if isinstance(made, torch.Tensor) else made["w"][0] if isinstance(made, dict) else made(x))

    wrapped = jtbridge.wrap(f)
    with pytest.raises(RandomnessError):
        jax.jit(wrapped)(X)
    assert cached.cache_info().currsize == 0
    # In torch, later calls would get the numbers of the first call.
    with pytest.raises(MutationError, match=r"whose cache \(of `functools`\) keeps a result of the trace"):
        jax.jit(wrapped)(X, rng=jax.random.key(0))
    assert cached.cache_info().currsize == 0
    eager = wrapped(X)
    np.testing.assert_allclose(jax.jit(wrapped)(X), eager, rtol=1e-6)
    np.testing.assert_allclose(wrapped(X), eager)


def test_cached_results_from_before_the_trace_are_kept():
    calls = []

    @functools.cache
    def cached(n):
        calls.append(n)
        return torch.full((3,), float(n)) if n < 3 else drawn(n)

    kept = [cached(n) for n in (1, 2)]
    wrapped = jtbridge.wrap(lambda x: x * cached(1) * cached(3))
    with pytest.raises(MutationError, match="calls"):  # it counts its calls
        jax.jit(wrapped)(X)
    assert [cached(n) for n in (1, 2)] == kept
    assert calls == [1, 2]
    cached(3)
    np.testing.assert_allclose(jax.jit(wrapped)(X), X * jnp.asarray(drawn(3).numpy()), rtol=1e-6)


def test_results_for_tensors_of_the_trace_are_dropped():
    doubled = functools.cache(lambda x: x * 2)
    wrapped = jtbridge.wrap(lambda x: doubled(x) + 1)
    np.testing.assert_allclose(jax.jit(wrapped)(X), 2 * X + 1)
    np.testing.assert_allclose(jax.jit(jax.grad(lambda x: wrapped(x).sum()))(X), [2.0, 2.0, 2.0])
    assert doubled.cache_info().currsize == 0


def test_a_method_with_a_cache():
    class Model:
        def __init__(self):
            self.factor = torch.tensor(2.0)

        @functools.lru_cache  # noqa: B019  (as users write it)
        def table(self, n):
            return drawn(n) * self.factor

        @jtbridge.wrap
        def __call__(self, x):
            return x * self.table(3)

    model = Model()
    np.testing.assert_allclose(jax.jit(lambda x: model(x))(X), X * jnp.asarray(2 * drawn(3).numpy()), rtol=1e-6)
    assert torch.equal(model.table(3), 2 * drawn(3))


def test_the_warning_of_a_called_function_names_the_reason():
    cached = functools.cache(drawn)
    with pytest.warns(CalledWarning, match=r"torch\.Generator"):
        jax.jit(jtbridge.wrap(lambda x: x * cached(3)))(X)
