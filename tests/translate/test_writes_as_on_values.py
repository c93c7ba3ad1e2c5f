"""Calls for which a graph, or a run without values, would differ from torch: split memory, aliasing lists, Python."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jtbridge


def _split(x: torch.Tensor) -> torch.Tensor:
    first, _ = torch.unsafe_split(x, 2)
    first.mul_(2)
    return x * 1


def _chunk(x: torch.Tensor) -> torch.Tensor:
    view = x.unsafe_chunk(2)[0]
    x[0] = 5
    return view * 1


def _sizes(x: torch.Tensor) -> torch.Tensor:
    _, last = x.unsafe_split_with_sizes([1, 3])
    last.add_(1)
    return x * 1


def _products(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    torch._foreach_mul_([x[0], x[1]], [x[1], x[0]])
    return x


def _copies(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    torch._foreach_copy_([x[0], x[2]], [x[2], x[0]])
    torch._foreach_add_([x[0], x[1]], [x[1], x[0]], alpha=2)
    torch._foreach_addcmul_([x[0], x[1]], [x[1], x[0]], [x[2], x[0]], 3.0)
    return x


def _apart(x: torch.Tensor) -> torch.Tensor:
    parts = [x[0].clone(), x[1].clone()]
    torch._foreach_mul_(parts, [x[1], x[0]])
    return torch.stack(parts)


@pytest.mark.filterwarnings("ignore::jtbridge.errors.CalledWarning", "ignore::jtbridge.errors.SequentialVmapWarning")
@pytest.mark.parametrize("fn", [_split, _chunk, _sizes, _products, _copies, _apart])
@pytest.mark.parametrize("backend", ["auto", "dlpack"])
def test_matches_torch(fn, backend):
    x = jnp.asarray([2.0, 3.0, 4.0, 5.0])
    want = fn(torch.tensor(np.asarray(x)))
    f = jtbridge.wrap(fn, backend=backend)
    np.testing.assert_array_equal(f(x), want)
    np.testing.assert_array_equal(jax.jit(f)(x), want)
    np.testing.assert_array_equal(jax.jit(jax.vmap(f))(jnp.stack([x, x]))[1], want)


@pytest.mark.filterwarnings("ignore::jtbridge.errors.CalledWarning")
@pytest.mark.parametrize(
    "fn", [lambda x: x.clone().apply_(lambda t: 2 * t), lambda x: x.clone().map_(x, lambda a, b: a + b)]
)
def test_functions_that_call_python_for_each_element_are_called(fn):
    f = jtbridge.wrap(fn)
    assert f(jnp.ones(2)).tolist() == [2, 2]
    assert jax.jit(f)(jnp.ones(2)).tolist() == [2, 2]
    assert jax.jit(jtbridge.wrap(fn, backend="dlpack"))(jnp.ones(2)).tolist() == [2, 2]
