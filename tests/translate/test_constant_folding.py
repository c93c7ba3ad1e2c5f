"""Operations of a graph that depend on constants alone are computed once, by torch."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jtbridge


def primitives(fn, *args) -> set[str]:
    """The JAX operations that a translated function consists of, in all of its sub-programs."""
    text = jax.jit(jtbridge.wrap(fn, backend="xla")).lower(*args).as_text()
    return {word.split("stablehlo.")[1].split()[0] for word in text.splitlines() if "stablehlo." in word}


def causal(x: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(x.shape[-1])
    allowed = positions[None, :] <= positions[:, None]
    return torch.where(allowed, x, float("-inf")).softmax(-1)


def test_mask_computed_from_positions_is_a_constant():
    x = np.random.default_rng(0).standard_normal((6, 6)).astype(np.float32)
    assert not {"iota", "compare"} & primitives(causal, x)
    assert {"exponential", "select"} <= primitives(causal, x)
    got = jtbridge.wrap(causal, backend="xla")(x)
    np.testing.assert_allclose(got, causal(torch.from_numpy(x)), rtol=1e-6)


def test_large_constants_are_computed_in_the_program():
    x = jnp.zeros((1024, 1024))
    assert "compare" in primitives(causal, x)
    assert "compare" not in primitives(causal, x[:128, :128])


def test_values_that_are_all_the_same_are_broadcast():
    def shifted(x: torch.Tensor) -> torch.Tensor:
        return x + torch.full((2000,), 2.0).sqrt()

    text = jax.jit(jtbridge.wrap(shifted, backend="xla")).lower(jnp.zeros(2000)).as_text()
    assert "sqrt" not in text
    assert len(text) < 2000
    got = jtbridge.wrap(shifted, backend="xla")(jnp.zeros(2000))
    np.testing.assert_array_equal(got, shifted(torch.zeros(2000)))


def test_random_numbers_are_not_constants():
    def noise(x: torch.Tensor) -> torch.Tensor:
        return x + torch.ones(4).bernoulli(0.5) + torch.rand(4)

    f = jtbridge.wrap(noise, backend="xla")
    x = jnp.zeros(4)
    assert not np.array_equal(f(x, rng=jax.random.key(0)), f(x, rng=jax.random.key(1)))


def test_results_that_are_constants_and_gradients_through_them():
    table = torch.tensor([1.0, 2.0, 3.0])

    def f(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return x * table.exp(), table.cumsum(0), torch.arange(3) * 2

    x = np.float32([0.5, -1.0, 2.0])
    want = f(torch.from_numpy(x))
    for got, expected in zip(jax.jit(jtbridge.wrap(f, backend="xla"))(x), want, strict=True):
        np.testing.assert_array_equal(got, expected)
    gradient = jax.grad(lambda x: jtbridge.wrap(f, backend="xla")(x)[0].sum())(x)
    np.testing.assert_allclose(gradient, table.exp(), rtol=1e-6)


def test_a_closed_over_tensor_that_changes_is_read_again():
    offset = torch.zeros(3)
    f = jtbridge.wrap(lambda x: x + offset.cos(), backend="xla")
    np.testing.assert_array_equal(f(np.zeros(3, np.float32)), np.ones(3))
    offset.fill_(torch.pi)
    np.testing.assert_allclose(jax.jit(lambda x: f(x))(np.zeros(3, np.float32)), -np.ones(3), rtol=1e-6)
    f.clear_cache()
    np.testing.assert_allclose(f(np.zeros(3, np.float32)), -np.ones(3), rtol=1e-6)


@pytest.mark.parametrize("size", [3, 300], ids=["literal", "input"])
def test_write_after_the_trace_does_not_change_the_program(size: int):
    weight = torch.ones(size)
    f = jtbridge.wrap(lambda x: (x * x * weight + weight.neg()).sum(), backend="xla")
    x = np.full(size, 3.0, np.float32)
    programs = jax.jit(f).trace(x), jax.jit(jax.value_and_grad(f)).trace(x)
    weight.fill_(100.0)
    value, (same_value, gradient) = (program.lower().compile()(x) for program in programs)
    assert value == same_value == 8.0 * size
    np.testing.assert_array_equal(gradient, 6.0 * np.ones(size, np.float32))


def test_uninitialized_memory_is_not_a_constant():
    def f(x: torch.Tensor) -> torch.Tensor:
        return x + torch.empty(3).copy_(x).neg()

    np.testing.assert_array_equal(jtbridge.wrap(f, backend="xla")(np.ones(3, np.float32)), np.zeros(3))
