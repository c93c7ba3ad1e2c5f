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
from jtbridge.errors import DataDependentShapeError, DifferentiationError

pytestmark = [
    pytest.mark.filterwarnings("ignore::jtbridge.errors.CalledWarning"),
    pytest.mark.filterwarnings("ignore::jtbridge.errors.SequentialVmapWarning"),
    pytest.mark.filterwarnings("ignore:Sparse:UserWarning"),
]

X = jnp.array([[0.0, 1.0, 2.0], [0.0, 3.0, 0.0], [1.0, 1.0, 0.0]])
PLACES = torch.tensor([[0, 0, 1], [1, 1, 0]])
A = torch.eye(3).to_sparse()
ROWS = torch.eye(3).to_sparse_csr()
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
def test_jit_matches_eager(name, transform):
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
def test_result_with_one_element_per_entry_is_refused_under_jit(f):
    assert jtbridge.wrap(f)(X).size >= 5
    with pytest.raises(DataDependentShapeError, match="depends on the values of its arguments"):
        jax.jit(jtbridge.wrap(f))(X)


# Torch has only first derivatives of these. It silently treats second derivatives of the first few as zero.
ONCE: dict[str, Callable[[torch.Tensor], Any]] = {
    "made": lambda x: places(x[0]).to_dense() ** 2,
    "product": lambda x: places(x[0]) @ x,
    "sparse product": lambda x: torch.sparse.mm(places(x[0]), x),
    "sum with a product": lambda x: torch.sparse.addmm(x, places(x[0]), x),
    "coalesced values": lambda x: places(x[0]).coalesce().values() ** 2,
    "values of rows": lambda x: (x.to_sparse_csr().values() ** 2).sum(),
    "rows": lambda x: torch.sparse_csr_tensor(ROWS.crow_indices(), ROWS.col_indices(), x[0], (3, 3)) @ x,
    "sampled": lambda x: torch.sparse.sampled_addmm(ROWS, x, x).to_dense(),
    "sum of sparse": lambda x: torch.sparse.sum(x.to_sparse(), 0).to_dense() ** 2,
}
DX = jnp.where(X != 0, jnp.cos(X), 0)


@pytest.mark.parametrize("name", ONCE)
@pytest.mark.parametrize("program", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_forward_derivatives(name, program):
    f = jtbridge.wrap(ONCE[name])
    expected = jnp.tensordot(jax.jacrev(f)(X), DX, 2)
    assert np.abs(expected).max() > 0.1
    np.testing.assert_allclose(program(lambda x: jax.jvp(f, (x,), (DX,))[1])(X), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(program(jax.jacfwd(f))(X), jax.jacrev(f)(X), rtol=1e-5, atol=1e-6)
    rows = program(jax.vmap(lambda x, dx: jax.jvp(f, (x,), (dx,))[1]))(jnp.stack([X, X]), jnp.stack([DX, DX]))
    np.testing.assert_allclose(rows, jnp.stack([expected, expected]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", [name for name in ONCE if name not in ("rows", "sampled", "sum of sparse")])
def test_second_derivatives_that_torch_treats_as_zero_are_refused(name):
    f = jtbridge.wrap(ONCE[name])
    refusal = "uses a sparse tensor whose gradient torch cannot differentiate"
    for second in (jax.hessian, lambda f: jax.jacrev(jax.jacrev(f))):
        with pytest.raises(DifferentiationError, match=refusal):
            second(lambda x: f(x).sum())(X)
        with pytest.raises(Exception, match=refusal):
            jax.block_until_ready(jax.jit(second(lambda x: f(x).sum()))(X))


def test_second_derivatives_that_torch_has():
    f = jtbridge.wrap(lambda x: (x.to_sparse().values() ** 3).sum())
    np.testing.assert_allclose(jax.hessian(f)(X).reshape(9, 9), np.diag(6 * X.ravel()), rtol=1e-5)
    np.testing.assert_allclose(jax.jacrev(jax.jacrev(f))(X).reshape(9, 9), np.diag(6 * X.ravel()), rtol=1e-5)
