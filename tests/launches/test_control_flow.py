"""Launches in the bodies of JAX's loops and branches: the program has one kernel call, and the results are right."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtbridge
from tests.kernels.harness import kernels_in, needs_compiler, needs_triton, pretending

pytestmark = [needs_triton, needs_compiler]

X = np.random.default_rng(0).standard_normal((6, 5)).astype(np.float32)
Y = np.random.default_rng(1).standard_normal((6, 5)).astype(np.float32)


def added() -> Callable[..., jax.Array]:
    from .kernels import add

    return jtbridge.wrap(add)


def accumulated() -> Callable[..., jax.Array]:
    """Autotuned, and writes in place."""
    from .alias_kernels import accumulated as fn

    return jtbridge.wrap(fn)


def in_a_scan(f: Callable, x: jax.Array, y: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda total, row: (f(total, row), total[0]), x, jnp.stack([y, 2 * y, 3 * y]))[0]


def in_a_while_loop(f: Callable, x: jax.Array, y: jax.Array) -> jax.Array:
    return jax.lax.while_loop(lambda c: c[0] < 6, lambda c: (c[0] + 1, f(c[1], y)), (0, x))[1]


def in_a_branch(f: Callable, x: jax.Array, y: jax.Array) -> jax.Array:
    return jax.lax.cond(x[0, 0] > 5, lambda x, y: x, lambda x, y: f(x, 6 * y), x, y)


each = pytest.mark.parametrize("place", [in_a_scan, in_a_while_loop, in_a_branch])
kernel = pytest.mark.parametrize("of", [added, accumulated])


@each
@kernel
def test_results(place, of):
    f, x, y = of(), jnp.asarray(X), jnp.asarray(Y)
    np.testing.assert_allclose(jax.jit(lambda x, y: place(f, x, y))(x, y), X + 6 * Y, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(x, X)  # nothing is written to the caller's array


@pytest.mark.cpu
@each
@kernel
def test_one_kernel_call_in_the_program(place, of):
    f, x, y = of(), jnp.asarray(X), jnp.asarray(Y)
    assert len(kernels_in(lambda x, y: place(f, x, y), x, y)) == 1


@pytest.mark.cpu
@each
def test_kernel_call_is_inside_the_control_flow_body(place):
    f = added()
    with pretending(90):
        text = jax.jit(lambda x, y: place(f, x, y)).trace(X, Y).lower(lowering_platforms=("cuda",)).as_text()
    control = "stablehlo.case" if place is in_a_branch else "stablehlo.while"
    assert control in text
    assert "triton_kernel_call" in text[text.index(control) :]
