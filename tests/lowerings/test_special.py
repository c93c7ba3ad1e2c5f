"""Special functions: poles, branches and both precisions."""

import numpy as np
import pytest
import torch

from .harness import check

S = torch.special
ENDS = [0.0, -0.0, 1.0, -1.0, 2.0, 5.0, 8.0, torch.inf, -torch.inf, torch.nan]
LINE = torch.cat([torch.linspace(-20, 20, 400, dtype=torch.float64) + 0.013, torch.tensor(ENDS, dtype=torch.float64)])
UNARY = [
    "airy_ai",
    "bessel_j0",
    "bessel_j1",
    "bessel_y0",
    "bessel_y1",
    "digamma",
    "entr",
    "erf",
    "erfc",
    "erfcx",
    "gammaln",
    "i0",
    "i0e",
    "i1",
    "i1e",
    "log_ndtr",
    "modified_bessel_i0",
    "modified_bessel_i1",
    "modified_bessel_k0",
    "modified_bessel_k1",
    "ndtr",
    "scaled_modified_bessel_k0",
    "scaled_modified_bessel_k1",
    "sinc",
    "spherical_bessel_j0",
]


@pytest.mark.parametrize("name", UNARY)
def test_unary(name):
    check(getattr(S, name), LINE, rtol=2e-12, atol=1e-14)
    check(getattr(S, name), LINE.float(), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("name", ["digamma", "erfcx", "gammaln", "i0", "i1", "log_ndtr", "sinc", "ndtri", "erfinv"])
def test_gradient(name):
    check(getattr(S, name), torch.linspace(0.03, 0.97, 40, dtype=torch.float64), grad=True)


@pytest.mark.parametrize("name", ["erfinv", "ndtri"])
def test_inverse_functions_near_the_ends_of_their_domains(name):
    small = torch.logspace(-15, -1, 60, dtype=torch.float64)
    check(getattr(S, name), torch.cat([small, 1 - small, torch.tensor([0.0, 1.0, 2.0])]), rtol=1e-13, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64])
@pytest.mark.parametrize("name", ["digamma", "erf", "gammaln", "i0e", "entr"])
def test_other_dtypes(name, dtype):
    check(getattr(S, name), torch.tensor([1, 2, 5, 30]).to(dtype))


@pytest.mark.parametrize("n", range(5))
def test_polygamma_on_both_sides_of_its_poles(n):
    check(lambda x: torch.polygamma(n, x), LINE, rtol=1e-8, atol=1e-12)
    check(lambda x: torch.polygamma(n, x), torch.tensor([-8.478373, -3.522088, 4.9, 1e-3]), rtol=1e-5, atol=1e-5)


def test_zeta_of_negative_numbers():
    s = torch.tensor([2.0, 3.0, 3.0, 4.0, 2.5, 2.0, 1.0, 0.5, 3.0, 3.0, torch.inf], dtype=torch.float64)
    q = torch.tensor([-1.5, -8.478, -20.5, -0.25, -1.5, -2.0, 3.0, 3.0, 1e-3, 0.0, 1.0], dtype=torch.float64)
    check(S.zeta, s, q, rtol=1e-12, atol=1e-14)
    check(lambda q: S.zeta(3, q), q[:4], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("function", [torch.igamma, torch.igammac])
def test_incomplete_gamma(function):
    a = torch.tensor([0.0, 0.0, 1.0, 1.0, -1.0, torch.inf, 1.0, 0.5, 30.0])
    x = torch.tensor([0.0, 1.0, 0.0, -1.0, 1.0, 1.0, torch.inf, 2.0, 25.0])
    check(function, a, x, rtol=1e-5, atol=1e-6)
    check(function, a[-2:].reshape(2, 1), x)


@pytest.mark.parametrize("function", [torch.igamma, torch.igammac])
def test_incomplete_gamma_of_zero_infinite_and_large_arguments(function):
    ends = torch.tensor([0.0, 1e-3, 0.5, 1e4, 1e6, torch.inf, -torch.inf, torch.nan, -1.0], dtype=torch.float64)
    large = torch.tensor([1e8, 1e12, 1.01e4, 0.99e4, 1.002e6, 0.999e6, 1e8 + 3e4, 1e8 - 1e4, 1e12 + 1e6]).double()
    check(function, ends[:, None], ends[None], rtol=1e-11, atol=1e-7)
    check(function, ends.float()[:, None], ends.float()[None], rtol=1e-2, atol=1e-6)  # torch loses digits in float32
    check(function, large[:, None], large[None], rtol=1e-11, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_zeta_of_large_orders_and_outside_of_its_domain(dtype):
    order = torch.tensor([0.0, -1.0, 0.5, 1.0, 2.0, 3.0, 39.0, 60.0, 1e4], dtype=dtype)
    x = torch.tensor([0.0, -1.0, -2.0, -2.25, 0.5, 1.0, 1.5, 3.0, 128.0, 1e6, torch.inf, torch.nan], dtype=dtype)
    check(torch.special.zeta, order[:, None], x[None])


def test_xlog1py():
    check(S.xlog1py, torch.tensor([0.0, 0.0, 2.0, 0.0]), torch.tensor([-1.0, torch.nan, -1.0, torch.inf]))


@pytest.mark.parametrize("p", [1, 3])
def test_mvlgamma(p):
    check(lambda x: torch.mvlgamma(x, p), torch.linspace(1.2, 40, 30), grad=True)


POLYNOMIALS = [name for name in dir(S) if "_polynomial_" in name]


@pytest.mark.parametrize("name", POLYNOMIALS)
def test_polynomial(name):
    generator = np.random.default_rng(0)
    x = torch.tensor([*generator.uniform(-1.2, 1.2, 100), 1.0, -1.0, 0.0, 30.0], dtype=torch.float64)
    n = torch.tensor([*generator.integers(-2, 20, 100), 7, 7, 7, 25], dtype=torch.float64)
    check(getattr(S, name), x, n, rtol=1e-9, atol=1e-9)
    check(lambda x: getattr(S, name)(x, 4), x, rtol=1e-9, atol=1e-9)
    check(lambda n: getattr(S, name)(0.3, n), n, rtol=1e-9, atol=1e-9)


def test_there_are_twelve_polynomials():
    assert len(POLYNOMIALS) == 12
