"""Torch functions as bodies of `jax.lax.reduce` and similar, where a call of torch would make XLA end the process."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jtbridge

pytestmark = pytest.mark.filterwarnings("ignore::jtbridge.errors.CalledWarning")

X = jnp.arange(12.0).reshape(3, 4)
ROWS = jax.lax.ScatterDimensionNumbers((1,), (0,), (0,))
REDUCTIONS = {
    "reduce": lambda f: jax.lax.reduce(X, -jnp.inf, f, (1,)),
    "reduce_window": lambda f: jax.lax.reduce_window(X, -jnp.inf, f, (1, 2), (1, 2), "VALID"),
    "scatter_apply": lambda f: jax.lax.scatter_apply(
        X, jnp.array([[0]]), lambda x: f(x, x + 1), ROWS, update_shape=(1, 4)
    ),
}


@pytest.fixture(params=REDUCTIONS.values(), ids=REDUCTIONS)
def reduction(request: pytest.FixtureRequest) -> Callable[[Any], jax.Array]:
    return request.param


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("backend", ["auto", "xla"])
def test_translated_reduction_body(reduction: Callable[[Any], jax.Array], backend: str, jit: bool):
    f = jtbridge.wrap(torch.maximum, backend=backend)
    np.testing.assert_array_equal(reduction(jax.jit(f) if jit else f), reduction(jnp.maximum))


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("backend", ["dlpack", "callback"])
def test_body_called_by_a_chosen_backend_is_refused(reduction: Callable[[Any], jax.Array], backend: str, jit: bool):
    f = jtbridge.wrap(torch.maximum, backend=backend)
    with pytest.raises(jtbridge.errors.BackendError, match='Choose "auto" or "xla"'):
        reduction(jax.jit(f) if jit else f)


@pytest.mark.parametrize("jit", [False, True])
def test_untraceable_body_is_refused(reduction: Callable[[Any], jax.Array], jit: bool):
    f = jtbridge.wrap(lambda a, b: torch.from_numpy(np.asarray(np.maximum(a.numpy(), b.numpy()))))
    with pytest.raises(jtbridge.errors.BackendError, match="cannot be traced"):
        reduction(jax.jit(f) if jit else f)


def test_body_with_an_operator_without_lowering(reduction: Callable[[Any], jax.Array]):
    name = f"jtbridge_tests::largest_{uuid.uuid4().hex}"
    largest = torch.library.custom_op(name, torch.maximum, mutates_args=(), schema="(Tensor a, Tensor b) -> Tensor")
    largest.register_fake(lambda a, b: torch.empty_like(a))
    f = jtbridge.wrap(lambda a, b: largest(a, b) + a - a)
    with pytest.raises(jtbridge.errors.BackendError, match="has no lowering"):
        reduction(f)
