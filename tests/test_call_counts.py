"""How often torch runs, and which backend runs it."""

from __future__ import annotations

import collections
import queue
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
import torch

import jtbridge

from .counting import counted, counted_square

X = jnp.arange(3.0)


def square_sum(x: torch.Tensor) -> torch.Tensor:
    return counted_square(x).sum()


def count(fn: Callable, *args) -> collections.Counter[str]:
    """Return the counts of the second call, when everything is traced and compiled."""
    jax.block_until_ready(fn(*args))
    with counted() as counts:
        jax.block_until_ready(fn(*args))
        return collections.Counter(counts)


def test_tracing_does_not_run_the_function(backend: str):
    f = jtbridge.wrap(square_sum)
    with counted() as counts:
        jax.eval_shape(f, X)
        jax.make_jaxpr(jax.grad(f))(X)
        jax.jit(jax.value_and_grad(f)).lower(X)
        jax.jit(jax.vmap(f)).lower(jnp.ones((5, 3)))
        assert counts["forward"] == counts["backward"] == 0


@pytest.mark.parametrize("jit", [False, True])
def test_one_forward_per_call(jit: bool, backend: str):
    f = jtbridge.wrap(square_sum)
    counts = count(jax.jit(f) if jit else f, X)
    assert counts["forward"] == 1
    assert counts["backward"] == 0


def test_first_eager_call_runs_once(backend: str):
    f = jtbridge.wrap(square_sum)
    with counted() as counts:
        f(X).block_until_ready()
        assert counts["forward"] == 1


@pytest.mark.parametrize("jit", [False, True])
def test_value_and_grad_runs_the_forward_once(jit: bool, backend: str):
    f = jax.value_and_grad(jtbridge.wrap(square_sum))
    counts = count(jax.jit(f) if jit else f, X)
    assert counts["forward"] == 1
    assert counts["backward"] == 1


@pytest.mark.parametrize("jit", [False, True])
def test_grad_runs_the_forward_at_most_once(jit: bool, backend: str):
    f = jax.grad(jtbridge.wrap(square_sum))
    counts = count(jax.jit(f) if jit else f, X)
    assert counts["forward"] == (0 if jit else 1)  # a compiled program drops a forward whose results are not used
    assert counts["backward"] == 1


@pytest.mark.parametrize("jit", [False, True])
def test_recomputing_runs_the_forward_twice(jit: bool, backend: str):
    f = jax.value_and_grad(jtbridge.wrap(square_sum, residuals="recompute"))
    counts = count(jax.jit(f) if jit else f, X)
    assert counts["forward"] == (2 if jit else 1)  # an eager call keeps the graph that autograd recorded
    assert counts["backward"] == 1


@pytest.mark.parametrize("jit", [False, True])
def test_one_call_for_a_batch(jit: bool, backend: str):
    f = jax.vmap(jtbridge.wrap(square_sum))
    counts = count(jax.jit(f) if jit else f, jnp.ones((7, 3)))
    # The rule of its operator. Twice would be a plan probed again at every eager call, never a graph made with it.
    assert counts["batched"] <= 1
    assert counts["forward"] == 1


def test_one_call_for_a_nested_batch(backend: str):
    f = jax.jit(jax.vmap(jax.vmap(jtbridge.wrap(square_sum)), in_axes=1))
    assert count(f, jnp.ones((5, 7, 3)))["forward"] == 1


def test_one_forward_and_backward_for_a_batch_of_gradients(backend: str):
    f = jax.jit(jax.vmap(jax.value_and_grad(jtbridge.wrap(square_sum))))
    counts = count(f, jnp.ones((7, 3)))
    assert counts["forward"] == 1
    assert counts["backward"] == 1


def test_gradient_of_a_batch(backend: str):
    f = jtbridge.wrap(square_sum)
    counts = count(jax.jit(jax.value_and_grad(lambda xs: jax.vmap(f)(xs).sum())), jnp.ones((7, 3)))
    assert counts["forward"] == 1
    assert counts["backward"] == 1


def test_rows_one_after_another_when_every_row_has_its_key(backend: str):
    f = jtbridge.wrap(lambda x: torch.nn.functional.dropout(counted_square(x)))
    keys = jax.random.split(jax.random.key(0), 7)
    counts = count(jax.jit(jax.vmap(lambda x, key: f(x, rng=key))), jnp.ones((7, 3)), keys)
    assert counts["forward"] == 7


def test_gradient_of_a_scan_runs_the_forward_once_per_step(backend: str):
    f = jtbridge.wrap(lambda c, x: counted_square(c) * x)

    @jax.jit
    def run(c, xs):
        return jax.value_and_grad(lambda c: jax.lax.scan(lambda c, x: (f(c, x), None), c, xs)[0].sum())(c)

    counts = count(run, X, jnp.ones(6))
    assert counts["forward"] == 6
    assert counts["backward"] == 6


def test_checkpoint_runs_the_forward_again(backend: str):
    f = jax.checkpoint(jtbridge.wrap(square_sum))
    counts = count(jax.jit(jax.value_and_grad(lambda x: jnp.sin(f(x)))), X)
    assert counts["forward"] == 2
    assert counts["backward"] == 1


def test_cond_runs_one_branch(backend: str):
    f = jtbridge.wrap(square_sum)
    run = jax.jit(lambda flag, x: jax.lax.cond(flag, f, lambda x: x.sum(), x))
    assert count(run, True, X)["forward"] == 1
    assert count(run, False, X)["forward"] == 0


def test_unused_result_is_not_computed(backend: str):
    """A wrapped function without effects is pure, so XLA may drop it."""
    f = jtbridge.wrap(square_sum)
    assert count(jax.jit(lambda x: (f(x), x)[1]), X)["forward"] == 0


@pytest.mark.parametrize("backend", ["dlpack", "callback"], indirect=True)
def test_requested_backend_is_used(backend: str):
    text = jax.jit(jtbridge.wrap(square_sum)).lower(X).as_text()
    targets = {"dlpack": "xla_buffer_python_cpu_callback", "callback": "xla_ffi_python_cpu_callback"}
    other = targets[{"dlpack": "callback", "callback": "dlpack"}[backend]]
    assert targets[backend] in text
    assert other not in text


def test_backend_of_the_decorator_and_of_the_block():
    f = jtbridge.wrap(square_sum, backend="callback")
    assert "xla_ffi_python_cpu_callback" in jax.jit(f).lower(X).as_text()
    with jtbridge.config(backend="dlpack"):
        assert "xla_buffer_python_cpu_callback" in jax.jit(lambda x: f(x)).lower(X).as_text()
    assert "xla_ffi_python_cpu_callback" in jax.jit(lambda x: f(x)).lower(X).as_text()


def test_untranslatable_function_is_called_without_a_copy():
    with pytest.warns(jtbridge.errors.CalledWarning, match="has no lowering"):
        text = jax.jit(jtbridge.wrap(square_sum)).lower(X).as_text()
    assert "xla_buffer_python_cpu_callback" in text


def _plain(x: torch.Tensor) -> torch.Tensor:
    return (x.sin() * x).sum()


def _writing(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[0] = 1.0
    y.mul_(2.0)
    return y.sum()


def _differentiating(x: torch.Tensor) -> torch.Tensor:
    x = x.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(x.sin().sum(), x, create_graph=True)
    return gradient.sum()


_LINEAR = torch.nn.Linear(3, 1)


def _module(x: torch.Tensor) -> torch.Tensor:
    return _LINEAR(x).sum()


@pytest.mark.parametrize(
    ("fn", "jit", "grad"),
    [
        # Two runs: one to find the types of its results, and one to capture it. Its gradient needs another capture.
        (_plain, 2, 3),
        (_writing, 2, 3),
        # Its result would belong to a graph, so another run tests whether it does the same without recording one.
        (_differentiating, 3, 4),
        (_module, 3, 4),
    ],
)
def test_tracing_runs_the_function_no_more_than_needed(fn: Callable, jit: int, grad: int):
    runs: queue.SimpleQueue[None] = (
        queue.SimpleQueue()
    )  # the state of an object of the standard library is not compared

    def f(x: torch.Tensor) -> torch.Tensor:
        runs.put(None)
        return fn(x)

    jax.jit(jtbridge.wrap(f)).lower(X).compile()
    assert runs.qsize() == jit
    jax.jit(jax.grad(jtbridge.wrap(f))).lower(X).compile()
    assert runs.qsize() == jit + grad
