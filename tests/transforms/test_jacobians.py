"""jacfwd and jacrev: all rows of a derivative at once, which is a vmap of jvp or of vjp."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtbridge
from tests import reference
from tests.compare import assert_matches

from .problem import REAL, Problem, jaxes, tensors
from .test_jvp import NO_FORWARD_MODE


@pytest.mark.parametrize("name", REAL)
def test_jacrev(name: str, x64: None):
    check(name, jax.jacrev)


@pytest.mark.parametrize("name", [name for name in REAL if name not in NO_FORWARD_MODE])
def test_jacfwd(name: str, x64: None):
    check(name, jax.jacfwd)


def check(name: str, transform) -> None:
    problem = Problem(name)
    argnums = tuple(range(len(problem.primals)))
    with problem.batching_derivatives():
        found = jax.jit(transform(problem.jax_fn, argnums))(*jaxes(problem.primals))
    assert_matches([list(row) for row in found], reference.jacobian(problem.torch_fn, tensors(problem.primals)))


@pytest.mark.parametrize("transform", [jax.jacfwd, jax.jacrev])
def test_holomorphic_jacobian(transform, backend: str, rng: np.random.Generator, x64: None):
    """The complex derivative of z -> z**3 is 3 z**2, in both modes."""
    z = jnp.asarray(rng.normal(size=3) + 1j * rng.normal(size=3))
    found = transform(jtbridge.wrap(lambda z: z**3), holomorphic=True)(z)
    np.testing.assert_allclose(found, np.diag(3 * np.asarray(z) ** 2), rtol=1e-12)
