"""Cholesky, LU, QR and LDL factors in LAPACK's conventions."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch

import jtbridge

from .harness import check

DTYPES = [torch.float64, torch.complex128]
TOLERANCE: dict[str, Any] = {"rtol": 1e-8, "atol": 1e-8}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def _positive(dtype: torch.dtype) -> torch.Tensor:
    a = torch.randn(2, 4, 4, dtype=dtype)
    return a @ a.mH + torch.eye(4)


@pytest.mark.parametrize("upper", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_cholesky_reads_one_triangle(dtype, upper):
    half = _positive(dtype).triu() if upper else _positive(dtype).tril()
    check(lambda x: torch.linalg.cholesky_ex(x, upper=upper), half, **TOLERANCE)
    check(lambda x: torch.cholesky_inverse(x, upper=upper), half, **TOLERANCE)
    check(lambda b, x: torch.cholesky_solve(b, x, upper=upper), torch.randn(4, 2, dtype=dtype), half[:1], **TOLERANCE)


def test_cholesky_info_is_the_first_minor_that_is_not_positive():
    rows = [torch.eye(3), torch.diag(torch.tensor([1.0, -1.0, 1.0])), torch.tensor([[1.0, 0, 2], [0, 1, 0], [2, 0, 1]])]
    rows.append(torch.full((3, 3), torch.nan))
    x = torch.stack(rows)
    check(lambda x: torch.linalg.cholesky_ex(x).info, x)
    info = jtbridge.wrap(lambda x: torch.linalg.cholesky_ex(x).info, backend="xla")
    assert jax.vmap(info)(jtbridge.to_jax(x)).tolist() == torch.linalg.cholesky_ex(x).info.tolist()


def test_failed_factorization_gives_nan_in_a_program():
    bad = jnp.diag(jnp.array([1.0, -1.0]))
    assert jnp.isnan(jtbridge.wrap(torch.linalg.cholesky, backend="xla")(bad)).any()


@pytest.mark.parametrize("shape", [(3, 5), (2, 5, 3), (0, 3)])
def test_lu(shape):
    x = torch.randn(shape, dtype=torch.complex128)
    check(lambda x: torch.linalg.lu_factor_ex(x), x, **TOLERANCE)
    check(lambda x: torch.linalg.lu(x), x, **TOLERANCE)


def test_lu_info_is_the_first_zero_pivot():
    check(lambda x: torch.linalg.lu_factor_ex(x).info, torch.stack([torch.zeros(3, 3), torch.eye(3), torch.ones(3, 3)]))


@pytest.mark.parametrize("data", [True, False])
def test_lu_unpack_in_part(data):
    packed = torch.linalg.lu_factor(torch.randn(3, 3))
    check(lambda lu, p: torch.lu_unpack(lu, p, unpack_data=data, unpack_pivots=not data), *packed)


@pytest.mark.parametrize("mode", ["reduced", "complete", "r"])
@pytest.mark.parametrize("shape", [(3, 5), (2, 5, 3), (0, 3), (3, 0)])
def test_qr(shape, mode):
    x = torch.randn(shape, dtype=torch.complex128)
    check(lambda x: torch.linalg.qr(x, mode), x, **TOLERANCE)


@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize("transpose", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_reflectors(dtype, transpose, left):
    a = torch.randn(2, 5, 3, dtype=dtype)
    check(torch.geqrf, a, **TOLERANCE)
    reflectors, scales = torch.geqrf(a)
    check(torch.linalg.householder_product, reflectors, scales, **TOLERANCE)
    other = torch.randn(2, *((5, 2) if left else (2, 5)), dtype=dtype)
    check(lambda a, t, c: torch.ormqr(a, t, c, left, transpose), reflectors, scales, other, **TOLERANCE)


@pytest.mark.parametrize("hermitian", [True, False])
@pytest.mark.parametrize("size", [1, 30])
@pytest.mark.parametrize("dtype", DTYPES)
def test_ldl(dtype, size, hermitian):
    a = torch.randn(2, size, size, dtype=dtype)
    a = a + (a.mH if hermitian else a.mT)
    a[0].diagonal().zero_()  # so that pivots have two rows
    check(lambda a: torch.linalg.ldl_factor_ex(a, hermitian=hermitian), a, **TOLERANCE)
    packed = torch.linalg.ldl_factor(a + torch.eye(size), hermitian=hermitian)
    b = torch.randn(2, size, 2, dtype=dtype)
    check(lambda *args: torch.linalg.ldl_solve(*args, hermitian=hermitian), *packed, b, rtol=1e-6, atol=1e-6)


def test_ldl_of_a_singular_matrix():
    a = torch.diag(torch.tensor([2.0, 0.0, 3.0]))
    check(lambda a: torch.linalg.ldl_factor_ex(a), a)


@pytest.mark.parametrize("function", [torch.linalg.cholesky, lambda x: torch.linalg.lu_factor(x)[0], torch.linalg.inv])
def test_gradients(function):
    check(function, _positive(torch.float64), grad=True, **TOLERANCE)


def test_gradient_of_qr():
    check(lambda x: torch.linalg.qr(x), torch.randn(5, 3, dtype=torch.float64), grad=True, **TOLERANCE)
