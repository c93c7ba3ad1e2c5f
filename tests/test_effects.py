"""`effects="ordered"`: every call happens, once, in program order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch

import jtbridge
from jtbridge.errors import EffectsError


@pytest.fixture
def seen() -> list[torch.Tensor]:
    return []


@pytest.fixture
def log(seen: list[torch.Tensor]) -> Callable[..., Any]:
    """Record the argument, and return the argument plus one."""

    @jtbridge.wrap(effects="ordered")
    def log(x: torch.Tensor) -> torch.Tensor:
        seen.append(x.clone())
        return x + 1

    jax.eval_shape(log, jnp.array(0.0))  # run once, before any call
    seen.clear()
    return log


def finished(seen: list[torch.Tensor]) -> list[float]:
    jax.effects_barrier()
    return [x.item() for x in seen]


def test_eager(log, seen: list[torch.Tensor]):
    for i in range(3):
        assert float(log(jnp.array(float(i)))) == i + 1
    assert finished(seen) == [0, 1, 2]


def test_jit_keeps_order_and_unused_calls(log, seen: list[torch.Tensor]):
    @jax.jit
    def run(x):
        log(x)
        y = jnp.sin(x) * 0 + 10
        log(y + 1)
        log(x + 2)
        return log(x + 3)

    for _ in range(2):
        seen.clear()
        assert float(run(jnp.array(0.0))) == 4
        assert finished(seen) == [0, 11, 2, 3]


def test_equal_calls_are_not_merged(log, seen: list[torch.Tensor]):
    jax.jit(lambda x: (log(x), log(x)))(jnp.array(5.0))
    assert finished(seen) == [5, 5]


def test_eager_calls_run_after_a_running_program(log, seen: list[torch.Tensor]):
    run = jax.jit(lambda x: [log(x + i) for i in range(20)])
    run(jnp.array(0.0))
    log(jnp.array(100.0))
    assert finished(seen) == [*range(20), 100]


def test_calls_of_two_functions_keep_their_order(log, seen: list[torch.Tensor]):
    other = jtbridge.wrap(lambda x: (seen.append(-torch.ones(())), x)[1], effects="ordered")
    run = jax.jit(lambda x: (log(x), other(x), log(x + 1), other(x)))
    run.lower(jnp.array(0.0)).compile()
    seen.clear()
    run(jnp.array(0.0))
    assert finished(seen) == [0, -1, 1, -1]


def test_scan(log, seen: list[torch.Tensor]):
    last, _ = jax.jit(lambda x: jax.lax.scan(lambda x, y: (log(x) + y, None), x, jnp.arange(4.0)))(jnp.array(0.0))
    assert float(last) == 10
    assert finished(seen) == [0, 1, 3, 6]


def test_scan_with_an_unused_result(log, seen: list[torch.Tensor]):
    def body(_, x):
        log(x)
        return None, None

    jax.jit(lambda xs: jax.lax.scan(body, None, xs))(jnp.arange(4.0))
    assert finished(seen) == [0, 1, 2, 3]


def test_while_loop(log, seen: list[torch.Tensor]):
    assert float(jax.jit(lambda x: jax.lax.while_loop(lambda x: x < 3, log, x))(jnp.array(0.0))) == 3
    assert finished(seen) == [0, 1, 2]


def test_fori_loop(log, seen: list[torch.Tensor]):
    assert float(jax.jit(lambda x: jax.lax.fori_loop(0, 4, lambda i, x: log(x), x))(jnp.array(0.0))) == 4
    assert finished(seen) == [0, 1, 2, 3]


def test_cond_runs_the_branch_taken(log, seen: list[torch.Tensor]):
    run = jax.jit(lambda flag, x: jax.lax.cond(flag, log, lambda x: log(x * 10), x))
    for flag in (True, False, True):
        run(flag, jnp.array(2.0))
    assert finished(seen) == [2, 20, 2]


def test_map_runs_row_by_row(log, seen: list[torch.Tensor]):
    assert jax.jit(lambda xs: jax.lax.map(log, xs))(jnp.arange(3.0)).tolist() == [1, 2, 3]
    assert finished(seen) == [0, 1, 2]


@pytest.mark.parametrize(
    ("transform", "what"),
    [
        (jax.grad, "differentiated"),
        (jax.value_and_grad, "differentiated"),
        (jax.jacfwd, "differentiated"),
        (lambda f: jax.vmap(f), "vmapped"),
        (lambda f: jax.jit(jax.vmap(f)), "vmapped"),
        (lambda f: lambda x: jax.linearize(f, x), "differentiated"),
    ],
)
def test_unsupported_transformations_are_refused(transform: Callable, what: str, log, seen: list[torch.Tensor]):
    x = jnp.zeros(2) if what == "vmapped" else jnp.array(0.0)
    with pytest.raises(EffectsError) as caught:
        transform(log)(x)
    assert str(caught.value) == (
        f'`log` is wrapped with effects="ordered" and cannot be {what}: its calls would no longer happen once each '
        "and in order. Wrap the part with side effects on its own and keep it out of the transformation "
        "(`jax.lax.map` or `jax.lax.scan` for rows, `jax.lax.stop_gradient` on its arguments)."
    )


def test_stop_gradient_permits_differentiation(log, seen: list[torch.Tensor]):
    def loss(x):
        log(jax.lax.stop_gradient(x))
        return x**2

    assert float(jax.jit(jax.grad(loss))(jnp.array(3.0))) == 6
    assert finished(seen) == [3]


def test_integers_in_a_differentiated_function(log, seen: list[torch.Tensor]):
    """A function of integers only is not differentiated, so it is not refused."""
    note = jtbridge.wrap(lambda step: (seen.append(step.sum()), step)[1], effects="ordered")
    assert float(jax.grad(lambda x: x * note(jnp.array([2]))[0].astype(jnp.float32))(jnp.array(3.0))) == 2


def test_draws_use_the_default_generator_of_torch(seen: list[torch.Tensor]):
    f = jax.jit(jtbridge.wrap(lambda x: x * torch.randn(3), effects="ordered"))
    jax.block_until_ready(f(jnp.ones(3)))
    torch.manual_seed(3)
    first, second = f(jnp.ones(3)), f(jnp.ones(3))
    jax.effects_barrier()
    torch.manual_seed(3)
    assert [first.tolist(), second.tolist()] == [torch.randn(3).tolist(), torch.randn(3).tolist()]


def test_closed_over_state_is_updated():
    norm = torch.nn.BatchNorm1d(2)
    f = jax.jit(jtbridge.wrap(norm, effects="ordered"))
    f.lower(jnp.ones((3, 2))).compile()
    before = int(norm.num_batches_tracked)
    f(jnp.ones((3, 2)))
    f(jnp.ones((3, 2)))
    jax.effects_barrier()
    assert before == 0, "tracing counted"
    assert int(norm.num_batches_tracked) == 2


def test_exceptions_reach_the_caller(log):
    @jtbridge.wrap(effects="ordered")
    def fail(x: torch.Tensor) -> torch.Tensor:
        if x.sum().item() > 0:
            raise LookupError("positive")
        return x

    with pytest.raises(LookupError, match="positive"):
        fail(jnp.ones(2))
    assert fail(-jnp.ones(2)).tolist() == [-1, -1]


def test_declared_output_shapes_prevent_extra_runs(seen: list[torch.Tensor]):
    @jtbridge.wrap(effects="ordered", output_shapes=jax.ShapeDtypeStruct((), jnp.float32))
    def log(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch.tensor(float(x)))
        return x + 1

    f = jax.jit(lambda: jax.lax.scan(lambda x, _: (log(x), None), 0.0, length=3)[0])
    compiled = f.lower().compile()
    assert not seen
    assert float(compiled()) == 3
    assert finished(seen) == [0, 1, 2]


def test_shape_inference_does_not_change_state():
    norm = torch.nn.BatchNorm1d(2)
    f = jtbridge.wrap(lambda x: norm(x) * float(x.sum()), effects="ordered")
    jax.eval_shape(f, jnp.ones((3, 2)))
    assert int(norm.num_batches_tracked) == 0
    assert norm.running_mean.tolist() == [0, 0]
    assert norm.running_var.tolist() == [1, 1]
    f(jnp.ones((3, 2)))
    assert int(norm.num_batches_tracked) == 1
