"""Indices for which torch raises: a compiled program cannot, so it gives NaN."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jtbridge

X = np.array([1.0, 2.0, 3.0, 4.0], np.float32)


@pytest.mark.parametrize(
    ("fn", "count"),
    [
        (lambda x, i: x.gather(0, i), 1),
        (lambda x, i: x.scatter(0, i, 5.0), 4),
        (lambda x, i: x.index_add(0, i, torch.ones(2)), 4),
        (lambda x, i: x.index_copy(0, i, torch.ones(2)), 4),
        (lambda x, i: torch.nn.functional.embedding(i, x[:, None]), 1),
    ],
)
@pytest.mark.parametrize("index", [-1, 4, -5])
def test_refused_indices_give_no_number(fn: Callable[..., Any], count: int, index: int):
    got = jax.jit(jtbridge.wrap(fn, backend="xla"))(jnp.asarray(X), jnp.asarray([0, index]))
    with pytest.raises((IndexError, RuntimeError)):
        fn(torch.from_numpy(X.copy()), torch.tensor([0, index]))
    assert int(jnp.isnan(got).sum()) == count
