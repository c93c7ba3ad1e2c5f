"""Which functions have islands, and which are called as a whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jtbridge
from jtbridge.errors import (
    ArgumentError,
    BackendError,
    CalledWarning,
    RandomnessError,
    TranslationError,
)
from tests.compare import assert_matches

from .operators import around, bent, double_, noisy, strides
from .programs import CALL, PLAIN, F, T, X, calls_in, scalar, sharded

NAMED = r"operator `jtbridge_island_tests\.bent\.default` .* has no lowering"


def called(function, x=X, **options):
    """Return the text of the program of a function that `auto` calls as a whole."""
    with pytest.warns(CalledWarning):
        return jax.jit(jtbridge.wrap(function, **options)).lower(x).as_text()


def test_islands_never_calls_the_whole_function():
    assert "stablehlo.sine" not in called(F, islands="never")
    with jtbridge.config(islands="never"):
        assert "stablehlo.sine" not in called(F, islands="needed")
    with jtbridge.config(islands="needed"):
        assert calls_in(lambda x: jtbridge.wrap(F, islands="never")(x), X) == 1


def test_explicit_backend_has_islands_only_on_request():
    with pytest.raises(TranslationError, match=r"jtbridge_island_tests\.bent\.default"):
        jax.jit(jtbridge.wrap(F, backend="xla"))(X)
    f = jtbridge.wrap(F, backend="xla", islands="needed")
    assert_matches(jax.jit(f)(X), F(T))
    assert_matches(f(X), F(T))
    assert_matches(jax.grad(scalar(f))(X), torch.func.grad(scalar(PLAIN))(T))


def test_function_with_many_unsupported_operators_is_called_by_default():
    def fn(x):
        return bent(bent(x, 2.0), 0.5) + 1

    assert called(fn).count(CALL) == 1
    assert calls_in(jtbridge.wrap(fn, islands="needed"), X) == 2
    assert_matches(jax.jit(jtbridge.wrap(fn, islands="needed"))(X), fn(T))


def test_another_value_of_the_option_is_refused():
    with pytest.raises(ArgumentError, match="`islands` must be one of 'auto', 'needed', 'never'"):
        jtbridge.wrap(F, islands="always")
    with pytest.raises(ArgumentError, match="`islands` must be"), jtbridge.config(islands="no"):
        pass


def test_operators_that_write_are_not_islands():
    def fn(x):
        y = torch.sin(x) * 2 + x
        double_(y)
        return y.cos() * 0.5 + x

    assert "stablehlo.sine" not in called(fn, islands="needed")
    with pytest.warns(CalledWarning):
        assert_matches(jax.jit(jtbridge.wrap(fn, islands="needed"))(X), fn(T))


def test_random_operators_are_not_islands():
    f = jax.jit(jtbridge.wrap(around(noisy), islands="needed"))
    key = jax.random.key(0)
    with pytest.warns(CalledWarning):
        first = f(X, rng=key)
    np.testing.assert_array_equal(first, f(X, rng=key))
    assert "stablehlo.sine" not in f.lower(X, rng=key).as_text()


@pytest.mark.filterwarnings("ignore::jtbridge.errors.CalledWarning")
def test_an_exported_program_has_no_islands():
    f = jtbridge.wrap(F, islands="needed")
    with pytest.raises(TranslationError, match=NAMED):
        jtbridge.export(f, X)
    with pytest.raises(TranslationError, match=NAMED):
        jax.export.export(jax.jit(jtbridge.wrap(F, backend="xla", islands="needed")))(X)
    with pytest.raises(BackendError, match=NAMED):
        jax.export.export(jax.jit(jtbridge.wrap(F)))(X)


def test_a_program_for_another_platform_has_no_islands():
    lower = jax.jit(jtbridge.wrap(F, backend="xla", islands="needed")).trace(X).lower
    for platforms in (("tpu",), ("cpu", "cuda")):
        with pytest.raises(TranslationError, match="has no lowering"):
            lower(lowering_platforms=platforms)


def test_a_program_of_several_devices_calls_the_whole_function():
    x = jnp.linspace(-1, 1, 32).reshape(8, 4)
    t = torch.tensor(np.asarray(x))
    f = jtbridge.wrap(F)
    with pytest.warns(CalledWarning):
        text = jax.jit(f).lower(sharded(x)).as_text()
    assert "stablehlo.sine" not in text
    assert_matches(jax.jit(f)(sharded(x)), F(t))
    assert_matches(jax.jit(jax.grad(scalar(f)))(sharded(x)), torch.func.grad(scalar(PLAIN))(t))


def saves_sines(primitive, *_, **__):
    return primitive.name == "sin"


@pytest.mark.filterwarnings("ignore::jtbridge.errors.CalledWarning")
def test_checkpoint_policy_applies_to_a_program_with_islands():
    x = jnp.linspace(-1, 1, 32).reshape(8, 4)
    gradient = torch.func.grad(scalar(PLAIN))(torch.tensor(np.asarray(x)))
    function = jax.grad(scalar(jax.checkpoint(jtbridge.wrap(F), policy=saves_sines)))
    assert "torch_part" in str(jax.make_jaxpr(function)(x)) or "torch_part" in str(jax.jit(function).trace(x).jaxpr)
    assert_matches(jax.jit(function)(x), gradient)
    assert_matches(jax.jit(function)(sharded(x)), gradient)
    with pytest.raises(BackendError, match=r"operator `jtbridge_island_tests\..*` .* has no lowering"):
        jax.export.export(jax.jit(function))(x)


def test_operator_on_self_overlapping_argument_is_not_an_island():
    def fn(x):
        return strides(x.sin().unfold(1, 2, 1)) * 2 + 1

    with pytest.warns(CalledWarning):
        assert_matches(jax.jit(jtbridge.wrap(fn, islands="needed"))(X), fn(T))


def writing_backward(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return an operator whose backward calls an operator that writes to its argument, which islands may not do."""

    @torch.library.custom_op(f"jtbridge_island_tests::{name}", mutates_args=())
    def cube(x: torch.Tensor) -> torch.Tensor:
        return x**3

    @torch.library.custom_op(f"jtbridge_island_tests::{name}_backward", mutates_args=("out",))
    def backward(grad: torch.Tensor, x: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(3 * x**2 * grad)

    def gradient(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(grad)
        backward(grad, *ctx.saved_tensors, out)
        return out

    cube.register_fake(torch.empty_like)
    cube.register_autograd(gradient, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))
    return cube


CUBE, LOWERED_CUBE = writing_backward("cube"), writing_backward("lowered_cube")
jtbridge.register_lowering(LOWERED_CUBE)(lambda x: x**3)


@pytest.mark.parametrize("operator", [F, CUBE], ids=["island in both", "island in the forward"])
@pytest.mark.parametrize("residuals", ["save", "recompute"])
@pytest.mark.parametrize("islands", ["auto", "never"])
@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.filterwarnings("ignore::jtbridge.errors.CalledWarning")
def test_random_function_has_the_gradient_of_its_mask(operator, residuals, islands, batched):
    def fn(x):
        return torch.nn.functional.dropout(operator(torch.nn.functional.dropout(x, 0.5)) * 2, 0.5).sum()

    x = jnp.linspace(-1, 1, 64).reshape(2, 8, 4)
    f = jtbridge.wrap(fn, residuals=residuals, islands=islands)
    one = lambda x: f(x, rng=jax.random.key(3))  # noqa: E731
    loss = (lambda x: jax.vmap(one)(x).sum()) if batched else one
    run = jax.jit(jax.value_and_grad(loss))
    value, gradient = run(x)
    assert value == jax.jit(loss)(x)
    length = np.linalg.norm(gradient)
    step = 1e-2 * np.asarray(gradient) / length
    np.testing.assert_allclose((run(x + step)[0] - run(x - step)[0]) / 2e-2, length, rtol=2e-2)


def test_random_function_with_only_its_derivative_called_is_refused():
    f = jtbridge.wrap(lambda x: LOWERED_CUBE(torch.nn.functional.dropout(x, 0.5)).sum(), residuals="recompute")
    loss = lambda x: f(x, rng=jax.random.key(3))  # noqa: E731
    assert np.isfinite(jax.jit(loss)(X))
    with pytest.raises(RandomnessError, match="a derivative of it cannot be"):
        jax.jit(jax.grad(loss))(X)
