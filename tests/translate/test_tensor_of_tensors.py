"""``torch.tensor`` of a list of tensors."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import pytest
import torch

import jtbridge


def sums(x: torch.Tensor) -> torch.Tensor:
    return torch.tensor([x.sum(), x.max()]) * x[:2]


def mixed(x: torch.Tensor) -> torch.Tensor:
    return torch.tensor((x.sum(), x.argmax()), dtype=torch.float64).sum()


@pytest.mark.parametrize("f", [sums, mixed])
def test_a_tensor_of_a_list_of_tensors_is_translated(f):
    x = jnp.array([1.5, -2.0, 4.0])
    with warnings.catch_warnings():
        warnings.simplefilter("error", jtbridge.errors.CalledWarning)
        got = jax.jit(jtbridge.wrap(f))(x)
        gradient = jax.jit(jax.grad(lambda x: jtbridge.wrap(sums)(x).sum()))(x)
    torch.testing.assert_close(jtbridge.to_torch(got), f(torch.tensor([1.5, -2.0, 4.0])), check_dtype=False)
    assert gradient.tolist() == [3.5, 4.0, 0.0]  # `torch.tensor` detaches
