"""Sparse tensors inside a function: their number of entries depends on data, and fake tensors have none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jtbridge
from jtbridge.errors import DataDependentShapeError

pytestmark = [
    pytest.mark.filterwarnings("ignore::jtbridge.errors.CalledWarning"),
    pytest.mark.filterwarnings("ignore:Sparse:UserWarning"),
]

X = jnp.array([[0.0, 1.0, 2.0], [0.0, 3.0, 0.0], [1.0, 1.0, 0.0]])
PLACES = torch.tensor([[0, 0, 1], [1, 1, 0]])
A = torch.eye(3).to_sparse()
TWICE = torch.sparse_coo_tensor(PLACES, torch.ones(3), (3, 3), check_invariants=False)  # not coalesced


def places(values: torch.Tensor) -> torch.Tensor:
    return torch.sparse_coo_tensor(PLACES, values, (3, 3))


FUNCTIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "number of entries": lambda x: x * x.to_sparse()._nnz(),
    "number of values": lambda x: x * x.to_sparse_csr().values().numel(),
    "loop over values": lambda x: sum(x.to_sparse().values(), torch.zeros(())),
    "branch": lambda x: x if x.to_sparse()._nnz() > 0 else -x,
    "values of a closed-over tensor": lambda x: x * A.values().sum() + A.indices().numel(),
    "number of entries of a closed-over tensor": lambda x: x * A._nnz(),
    "sum of two": lambda x: x * (places(x[0]) + A)._nnz(),
    "coalesced or not": lambda x: x * (1 if torch.cat([x.to_sparse(), A]).is_coalesced() else 2),
    "closed-over and not coalesced": lambda x: x * (1 if TWICE.is_coalesced() else 2),
    "coalesced values": lambda x: places(x[0]).coalesce().values() ** 2,
    "sum": lambda x: torch.sparse.sum(x.to_sparse()) ** 2,
    "product": lambda x: x.to_sparse() @ x,
    "product with a closed-over tensor": lambda x: A @ x,
    "product of rows": lambda x: x.to_sparse_csr() @ x,
    "dense": lambda x: x.to_sparse().to_dense() ** 2,
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("transform", [lambda f: f, lambda f: jax.grad(lambda x: jnp.sin(f(x)).sum())])
def test_it_computes_the_same_under_jit(name, transform):
    f = transform(jtbridge.wrap(FUNCTIONS[name]))
    np.testing.assert_allclose(jax.jit(f)(X), f(X), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "f",
    [
        lambda x: x.to_sparse().values(),
        lambda x: x.to_sparse()._values(),
        lambda x: x.to_sparse().indices(),
        lambda x: x.to_sparse_csr().values(),
        lambda x: x.to_sparse_csr().col_indices(),
        lambda x: x.to_sparse_csc().row_indices(),
    ],
)
def test_a_result_of_as_many_elements_as_there_are_entries_is_refused_under_jit(f):
    assert jtbridge.wrap(f)(X).size >= 5
    with pytest.raises(DataDependentShapeError, match="depends on the values of its arguments"):
        jax.jit(jtbridge.wrap(f))(X)
