"""Tensors that a trace loses track of: rows of a batch as a `Parameter`, other classes, results of other threads."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jtbridge
from jtbridge.errors import CalledWarning, TranslationError

ROWS = jnp.arange(1.0, 7.0).reshape(2, 3)


@torch.library.custom_op("jtbridge_test_rows::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


doubled.register_fake(lambda x: torch.empty_like(x))
doubled.register_vmap(lambda info, dims, x: (doubled(x), dims[0]))

FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "parameter": lambda x: torch.nn.Parameter(x) * 2,
    "without a gradient": lambda x: torch.nn.Parameter(x, requires_grad=False) * 2,
    "of a clone": lambda x: torch.nn.Parameter(x.clone()) * 2,
    "sum": lambda x: torch.nn.Parameter(x).sum(),
    "returned": lambda x: torch.nn.Parameter(x),
    "in a list": lambda x: torch.nn.ParameterList([x])[0] * 2,
    "beside a custom operator": lambda x: doubled(x) + torch.nn.Parameter(x),
    "in a custom operator": lambda x: doubled(torch.nn.Parameter(x)),
}


@pytest.mark.filterwarnings("ignore::jtbridge.errors.CalledWarning", "ignore::jtbridge.errors.SequentialVmapWarning")
@pytest.mark.parametrize("backend", ["auto", "dlpack", "callback"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_batches_match_their_rows(name: str, backend: str):
    fn = FUNCTIONS[name]
    f = jtbridge.wrap(fn, backend=backend)
    want = np.stack([fn(torch.tensor(row)).detach().numpy() for row in np.array(ROWS)])
    np.testing.assert_array_equal(jax.vmap(f)(ROWS), want)
    np.testing.assert_array_equal(jax.jit(jax.vmap(f))(ROWS), want)
    np.testing.assert_array_equal(jax.jit(jax.vmap(jax.vmap(f)))(ROWS[None])[0], want)
    np.testing.assert_array_equal(jax.lax.map(f, ROWS), want)


def on_a_thread(x: torch.Tensor) -> torch.Tensor:
    with ThreadPoolExecutor(2) as pool:
        return sum(pool.map(lambda factor: x * factor, [0.5, 1.5]))


LOST: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "as_subclass": lambda x: x.as_subclass(torch.Tensor) * 2,
    "on a thread": on_a_thread,
}


@pytest.mark.filterwarnings("ignore::jtbridge.errors.SequentialVmapWarning")
@pytest.mark.parametrize("backend", ["auto", "dlpack"])
@pytest.mark.parametrize("name", LOST)
def test_a_function_whose_trace_loses_a_tensor_is_called(name: str, backend: str):
    f = jtbridge.wrap(LOST[name], backend=backend)
    reason = "a tensor that torch did not record|cannot be traced"  # two threads may be in the way of each other first
    with pytest.warns(CalledWarning, match=reason) if backend == "auto" else contextlib.nullcontext():
        np.testing.assert_array_equal(jax.jit(f)(ROWS), ROWS * 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CalledWarning)
        np.testing.assert_array_equal(jax.jit(jax.grad(lambda x: f(x).sum()))(ROWS), jnp.full((2, 3), 2.0))
        np.testing.assert_array_equal(jax.jit(lambda x: jax.lax.map(f, x))(ROWS), ROWS * 2)


@pytest.mark.parametrize("name", LOST)
def test_function_with_lost_tensors_is_refused_by_the_xla_backend(name: str):
    with pytest.raises(TranslationError, match=r"a tensor that torch did not record|cannot be traced"):
        jax.jit(jtbridge.wrap(LOST[name], backend="xla"))(ROWS)
