"""Systems of equations and determinants."""

from typing import Any

import pytest
import torch

from .harness import check

DTYPES = [torch.float64, torch.complex128]
TOLERANCE: dict[str, Any] = {"rtol": 1e-8, "atol": 1e-8}


GENERATOR = torch.Generator().manual_seed(0)
A = torch.randn(2, 4, 4, dtype=torch.float64, generator=GENERATOR)
B = torch.randn(2, 4, 3, dtype=torch.float64, generator=GENERATOR)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.mark.parametrize(
    ("a", "b"),
    [(A, B), (A[0], B[0, :, 0]), (A, B[:, :, 0]), (A, B[0]), (A.to(torch.complex128), B.to(torch.complex128) * 1j)],
)
def test_solve(a, b):
    check(lambda a, b: torch.linalg.solve_ex(a, b), a, b)


def test_gradients():
    check(torch.linalg.solve, A, B, grad=True, **TOLERANCE)
    check(lambda a, b: torch.linalg.solve(a.mT, b, left=False), A, B.mT, grad=True, **TOLERANCE)
    check(torch.linalg.inv, A, grad=True, **TOLERANCE)


@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize("adjoint", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_lu_solve(dtype, adjoint, left):
    lu, pivots = torch.linalg.lu_factor(torch.randn(3, 4, 4, dtype=dtype))
    b = torch.randn((4, 2) if left else (2, 4), dtype=dtype)
    check(lambda *x: torch.linalg.lu_solve(*x, left=left, adjoint=adjoint), lu, pivots, b, **TOLERANCE)


@pytest.mark.parametrize("unit", [True, False])
@pytest.mark.parametrize("upper", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_triangular(dtype, upper, unit):
    a, b = torch.randn(2, 4, 4, dtype=dtype), torch.randn(4, 3, dtype=dtype)
    options = {"upper": upper, "unitriangular": unit}
    check(lambda a, b: torch.linalg.solve_triangular(a, b, **options), a, b, **TOLERANCE)
    check(lambda a, b: torch.linalg.solve_triangular(a, b, left=False, **options), a, b.mT, **TOLERANCE)
    for transpose in (True, False):
        check(lambda a, b: torch.triangular_solve(b, a, upper, transpose, unit), a, b, **TOLERANCE)  # noqa: B023


def _slogdet(x: torch.Tensor) -> torch.Tensor:
    return torch.linalg.slogdet(x)[1]


@pytest.mark.parametrize("layout", [lambda x: x, lambda x: x.mT])
def test_determinants_of_either_layout(layout):
    """Torch factors the transpose of a contiguous matrix, and its gradients rely on that."""
    for operator in (torch.ops.aten._linalg_det, torch.ops.aten._linalg_slogdet):
        check(lambda x: operator(layout(x)), A, **TOLERANCE)  # noqa: B023
        check(lambda x: operator(layout(x)), A.to(torch.complex128) * 1j, **TOLERANCE)  # noqa: B023
    for function in (torch.linalg.det, _slogdet):
        check(lambda x: function(layout(x)), A, grad=True, **TOLERANCE)  # noqa: B023


def test_determinants_of_singular_and_empty_matrices():
    for x in (torch.zeros(2, 3, 3), torch.zeros(2, 0, 0), torch.zeros(0, 3, 3)):
        check(torch.linalg.det, x)
        check(lambda x: torch.linalg.slogdet(x), x)


def test_a_singular_system_does_not_raise():
    check(lambda a: torch.linalg.solve_ex(a, torch.ones(2, 1)).info, torch.ones(2, 2))


def test_cross():
    check(torch.linalg.cross, torch.randn(2, 3), torch.randn(1, 3))
    check(lambda a, b: torch.linalg.cross(a, b, dim=0), torch.randn(3, 2), torch.randn(3, 1), grad=True)
    check(torch.linalg.cross, torch.tensor([1, 2, 3]), torch.tensor([5, 7, 9]))
