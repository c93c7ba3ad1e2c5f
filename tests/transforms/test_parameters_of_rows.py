"""A row of a batch as a `Parameter` or a subclass of Tensor, which torch makes without an operator."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jtbridge

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
def test_rows_are_right(name: str, backend: str):
    fn = FUNCTIONS[name]
    f = jtbridge.wrap(fn, backend=backend)
    want = np.stack([fn(torch.tensor(row)).detach().numpy() for row in np.array(ROWS)])
    np.testing.assert_array_equal(jax.vmap(f)(ROWS), want)
    np.testing.assert_array_equal(jax.jit(jax.vmap(f))(ROWS), want)
    np.testing.assert_array_equal(jax.jit(jax.vmap(jax.vmap(f)))(ROWS[None])[0], want)
    np.testing.assert_array_equal(jax.lax.map(f, ROWS), want)


@pytest.mark.parametrize(
    "fn",
    [lambda x: x.as_subclass(torch.Tensor) * 2, lambda x: torch.Tensor._make_subclass(torch.Tensor, x) * 2],
    ids=["as_subclass", "_make_subclass"],
)
def test_rows_of_another_class_are_right_where_torch_is_called(fn: Callable):
    f = jtbridge.wrap(fn, backend="dlpack")
    np.testing.assert_array_equal(jax.vmap(f)(ROWS), ROWS * 2)
    np.testing.assert_array_equal(jax.jit(jax.vmap(f))(ROWS), ROWS * 2)
