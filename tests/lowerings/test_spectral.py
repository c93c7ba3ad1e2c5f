"""Eigenvalues, singular values and functions of matrices."""

from typing import Any

import jax
import numpy as np
import pytest
import torch

import jtbridge

from .harness import check

DTYPES = [torch.float64, torch.complex128]
TOLERANCE: dict[str, Any] = {"rtol": 1e-8, "atol": 1e-8}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("uplo", ["L", "u"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_eigh_reads_one_triangle(dtype, uplo):
    a = torch.randn(2, 4, 4, dtype=dtype)
    check(lambda x: torch.linalg.eigvalsh(x, UPLO=uplo), a, **TOLERANCE)

    def rebuilt(x):  # the sign of a vector is arbitrary
        values, vectors = torch.linalg.eigh(x, UPLO=uplo)
        return vectors * values.exp().unsqueeze(-2) @ vectors.mH

    check(rebuilt, a, grad=dtype == torch.float64, **TOLERANCE)


@pytest.mark.parametrize("dtype", DTYPES)
def test_eig(dtype):
    def rebuilt(x):
        values, vectors = torch.linalg.eig(x)
        return vectors @ torch.diag_embed(values) @ torch.linalg.inv(vectors)

    check(rebuilt, torch.randn(2, 4, 4, dtype=dtype), **TOLERANCE)
    check(lambda x: torch.linalg.eigvals(x).abs().sort().values, torch.randn(4, 4, dtype=dtype), **TOLERANCE)
    check(lambda x: torch.linalg.eig(x), torch.zeros(0, 0, dtype=dtype))


@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize("shape", [(3, 5), (2, 5, 3), (0, 3), (0, 2, 2)])
def test_svd(shape, full):
    dtype = torch.complex128

    def rebuilt(x):
        u, s, v = torch.linalg.svd(x, full_matrices=full)
        k = s.shape[-1]
        return u[..., :k] * s.unsqueeze(-2) @ v[..., :k, :], s, u.abs() if 0 in x.shape else (u @ u.mH)

    check(rebuilt, torch.randn(shape, dtype=dtype), **TOLERANCE)
    check(torch.linalg.svdvals, torch.randn(shape, dtype=dtype), **TOLERANCE)


@pytest.mark.parametrize("hermitian", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_pinv(dtype, hermitian):
    a = torch.randn(2, 4, 2, dtype=dtype)
    a = a @ a.mH if hermitian else a @ a.mH @ a  # singular, or wide
    check(lambda x: torch.linalg.pinv(x, hermitian=hermitian), a, rtol=1e-6, atol=1e-6)
    check(lambda x: torch.linalg.pinv(x, atol=0.5, hermitian=hermitian), a, rtol=1e-6, atol=1e-6)
    check(lambda x: torch.linalg.pinv(x, rtol=0.9, hermitian=hermitian), a, rtol=1e-6, atol=1e-6)


def test_pinv_of_an_empty_matrix():
    check(torch.linalg.pinv, torch.zeros(2, 0, 3))


@pytest.mark.parametrize("scale", [0.0, 1e-3, 1.0, 30.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_matrix_exp(dtype, scale):
    x = torch.randn(3, 4, 4, dtype=dtype) * scale * torch.tensor([1.0, 0.1, 2.0])[:, None, None]
    check(torch.matrix_exp, x, grad=dtype == torch.float64, **TOLERANCE)


def test_matrix_exp_overflow_does_not_affect_other_matrices():
    x = torch.stack([torch.eye(2) * 1e6, torch.eye(2), torch.full((2, 2), torch.nan)])
    check(lambda x: torch.matrix_exp(x)[1], x)
    check(lambda x: torch.matrix_exp(x)[2].isnan(), x)
    check(lambda x: torch.matrix_exp(x)[0].isfinite().all(), x)


def test_matrix_exp_of_half_precision_is_computed_in_float32():
    """Torch's own result overflows."""
    x = torch.randn(3, 3).bfloat16()
    with jax.enable_x64(True):
        found = jtbridge.to_torch(jtbridge.wrap(torch.matrix_exp, backend="xla")(jtbridge.to_jax(x)))
    torch.testing.assert_close(found, torch.matrix_exp(x.float()).bfloat16())


def test_exponential_of_blocks_of_different_size():
    """The derivative is the exponential of such a matrix; in single precision it must not cost more than torch's."""
    a = torch.randn(4, 4)
    blocks = torch.cat([torch.cat([a, 1e4 * torch.randn(4, 4)], 1), torch.cat([torch.zeros(4, 4), a], 1)])
    exact, torchs = torch.linalg.matrix_exp(blocks.double()), torch.linalg.matrix_exp(blocks)
    ours = jtbridge.to_torch(jtbridge.wrap(torch.linalg.matrix_exp, backend="xla")(blocks))
    for corner in (slice(None, 4), slice(4, None)):
        ours_error, torchs_error = ((each - exact)[:, corner].abs().max() for each in (ours, torchs))
        assert ours_error <= 3 * torchs_error


@pytest.mark.parametrize(
    "function",
    [
        torch.linalg.svdvals,
        lambda x: torch.linalg.svd(x)[0],
        lambda x: torch.linalg.pinv(x),
        lambda x: torch.linalg.eigvals(x).abs(),
        lambda x: torch.linalg.eig(x)[1].abs(),
        lambda x: torch.linalg.eigvalsh(x),
    ],
    ids=["svdvals", "svd", "pinv", "eigvals", "eig", "eigvalsh"],
)
def test_matrices_that_are_not_finite_end_in_nan(function):
    # LAPACK's computation of the singular values of this matrix does not terminate.
    matrix = torch.tensor(
        [
            [-8.478373527526855, -1.765825867652893, -4.3228044509887695, -2.400455951690674, 35.5],
            [-torch.inf, -0.5, -0.5734938383102417, 3.1285104751586914, -3.033684730529785],
            [5.106744766235352, 1.135137677192688, -128.0, 34.0, 1000.0],
            [3.270799398422241, -3.893850803375244, 0.25, -4.702395439147949, 1.8446742974197924e19],
            [-88.0, -3.522088050842285, -4.414461135864258, 2.3285136222839355, 0.0],
        ]
    )
    run = jax.jit(jtbridge.wrap(function, backend="xla"))
    found = run(jtbridge.to_jax(torch.stack([matrix, torch.eye(5)])))
    assert np.isnan(found[0]).all()
    assert np.isfinite(found[1]).all()


def test_eigh_does_not_read_the_other_triangle():
    x = torch.randn(3, 3, generator=torch.Generator().manual_seed(0))
    x[0, 2] = torch.nan
    check(torch.linalg.eigvalsh, x)
