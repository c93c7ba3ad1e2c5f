"""Random draws: the quantiles of their distribution, and the numbers that can occur."""

import math
from typing import Any

import jax
import numpy as np
import pytest
import scipy.stats
import torch

import jtbridge

COUNT = 4000


def draw(function: Any, *args: Any) -> np.ndarray:
    with jax.enable_x64(True):
        return np.asarray(jtbridge.wrap(function, backend="xla")(*args, rng=jax.random.key(3)))


def empty(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(COUNT, dtype=dtype)


@pytest.mark.parametrize(
    ("function", "distribution"),
    [
        (lambda x: torch.rand(COUNT) + 0 * x, scipy.stats.uniform()),
        (lambda x: torch.rand_like(x), scipy.stats.uniform()),
        (lambda x: torch.randn_like(x), scipy.stats.norm()),
        (lambda x: torch.empty_like(x).uniform_(-2, 3), scipy.stats.uniform(-2, 5)),
        (lambda x: torch.empty_like(x).normal_(1, 2), scipy.stats.norm(1, 2)),
        (lambda x: torch.normal(1.0, 2.0, (COUNT,)) + 0 * x, scipy.stats.norm(1, 2)),
        (lambda x: torch.normal(torch.ones_like(x), torch.full_like(x, 2)), scipy.stats.norm(1, 2)),
        (lambda x: torch.empty_like(x).exponential_(2), scipy.stats.expon(scale=0.5)),
        (lambda x: torch.empty_like(x).cauchy_(1, 3), scipy.stats.cauchy(1, 3)),
        (lambda x: torch.empty_like(x).log_normal_(0.5, 0.25), scipy.stats.lognorm(0.25, scale=math.exp(0.5))),
        (lambda x: torch._standard_gamma(torch.full_like(x, 2.5)), scipy.stats.gamma(2.5)),
        (lambda x: torch._sample_dirichlet(torch.full_like(x, 2).reshape(-1, 2))[:, 0], scipy.stats.beta(2, 2)),
    ],
)
def test_continuous(function, distribution):
    drawn = draw(function, torch.zeros(COUNT))
    assert scipy.stats.kstest(drawn.astype(float), distribution.cdf).pvalue > 1e-3


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: torch.randint(2, 5, (COUNT,)) + 0 * x.long(), {2: 1 / 3, 3: 1 / 3, 4: 1 / 3}),
        (lambda x: torch.randint_like(x, 2), {0: 1 / 2, 1: 1 / 2}),
        (lambda x: torch.empty_like(x, dtype=torch.int8).random_(2), {0: 1 / 2, 1: 1 / 2}),
        (lambda x: torch.bernoulli(torch.full_like(x, 0.25)), {0: 3 / 4, 1: 1 / 4}),
        (lambda x: torch.empty_like(x).bernoulli_(0.25), {0: 3 / 4, 1: 1 / 4}),
        (lambda x: torch.empty_like(x).geometric_(0.5).clamp(max=3), {1: 1 / 2, 2: 1 / 4, 3: 1 / 4}),
        (lambda x: torch.poisson(torch.full_like(x, 0.5)).clamp(max=1), {0: math.exp(-0.5), 1: 1 - math.exp(-0.5)}),
        (lambda x: torch.binomial(torch.full_like(x, 2), torch.full_like(x, 0.5)), {0: 1 / 4, 1: 1 / 2, 2: 1 / 4}),
        (lambda x: torch.multinomial(torch.tensor([0.0, 3, 1, 0]) + x[0], COUNT, True), {1: 3 / 4, 2: 1 / 4}),
        (lambda x: torch.nn.functional.dropout(torch.ones_like(x), 0.75), {0: 3 / 4, 4: 1 / 4}),
    ],
)
def test_discrete(function, expected):
    found, counts = np.unique(draw(function, torch.zeros(COUNT)), return_counts=True)
    assert found.tolist() == list(expected)
    assert scipy.stats.chisquare(counts, COUNT * np.array(list(expected.values()))).pvalue > 1e-3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_exponential_is_never_zero_and_uniform_never_one(dtype):
    x = torch.empty(200_000, dtype=dtype)
    assert (draw(lambda x: torch.empty_like(x).exponential_(), x) > 0).all()
    assert (draw(lambda x: torch.rand_like(x), x) < 1).all()


def test_bernoulli_with_probability_zero_and_one():
    assert draw(lambda x: torch.bernoulli(x), torch.ones(COUNT)).all()
    assert not draw(lambda x: torch.bernoulli(x), torch.zeros(COUNT)).any()


def test_draws_without_replacement_are_distinct_and_of_positive_weight():
    weights = torch.tensor([0.0, 1.0, 5.0, 0.0, 2.0]).expand(50, 5)
    drawn = draw(lambda w: torch.multinomial(w, 3), weights)
    assert (np.sort(drawn, -1) == [1, 2, 4]).all()
    first = draw(lambda w: torch.multinomial(w, 1), weights[:1].expand(COUNT, 5))[:, 0]
    assert scipy.stats.chisquare(np.bincount(first)[[1, 2, 4]], COUNT * np.array([1, 5, 2]) / 8).pvalue > 1e-3


def test_a_permutation():
    drawn = draw(lambda x: torch.randperm(100) + 0 * x.long(), torch.zeros(100))
    assert sorted(drawn) == list(range(100))
    assert drawn.tolist() != list(range(100))


def test_complex_normal_has_variance_one():
    drawn = draw(lambda x: torch.randn(COUNT, dtype=torch.complex64) + 0 * x, torch.zeros(COUNT))
    assert scipy.stats.kstest(np.imag(drawn), scipy.stats.norm(scale=math.sqrt(0.5)).cdf).pvalue > 1e-3


def test_rrelu_slopes_are_uniform():
    drawn = draw(lambda x: torch.nn.functional.rrelu(x, 0.25, 0.75, training=True), -torch.ones(COUNT))
    assert scipy.stats.kstest(-drawn, scipy.stats.uniform(0.25, 0.5).cdf).pvalue > 1e-3
    x = torch.linspace(-1, 1, 9)
    np.testing.assert_allclose(draw(lambda x: torch.nn.functional.rrelu(x, 0.25, 0.75), x), np.where(x > 0, x, x / 2))


def test_the_gradient_of_a_gamma_draw():
    alpha, y = torch.linspace(0.5, 5, 10, dtype=torch.float64), torch.linspace(0.3, 6, 10, dtype=torch.float64)
    found = draw(lambda a, y: torch._standard_gamma_grad(a, y), alpha, y)
    np.testing.assert_allclose(found, torch._standard_gamma_grad(alpha, y), rtol=2e-3)  # torch's is approximate


def test_the_gradient_of_a_beta_draw():
    """It is the derivative of the quantile function at the draw's probability."""
    grid = np.array([(a, b) for a in (0.03, 0.4, 1.0, 3.0, 80.0, 900.0) for b in (0.03, 0.4, 1.0, 3.0, 80.0, 900.0)])
    a, b = np.repeat(grid, 3, axis=0).T
    q = np.tile([0.1, 0.5, 0.8], len(grid))
    x = scipy.stats.beta.ppf(q, a, b)
    inside = (x > 1e-8) & (x < 1 - 1e-8)
    a, b, q, x = a[inside], b[inside], q[inside], x[inside]
    step = 1e-3 * a
    above, below = (scipy.stats.beta.ppf(q, a + sign * step, b) for sign in (1, -1))
    wide_above, wide_below = (scipy.stats.beta.ppf(q, a + 2 * sign * step, b) for sign in (1, -1))
    slope = (8 * (above - below) - (wide_above - wide_below)) / (12 * step)
    found = draw(lambda *args: torch._dirichlet_grad(*args), *(torch.tensor(v) for v in (x, a, a + b)))
    assert len(x) > 60
    np.testing.assert_allclose(found * (1 - x), slope, rtol=1e-6)
    theirs = torch._dirichlet_grad(*(torch.tensor(v) for v in (x, a, a + b)))
    np.testing.assert_allclose(found, theirs, rtol=2e-3)  # torch's is approximate


def test_beta_draw_rounded_to_zero_or_one():
    ends = torch.tensor([1.0, 1.0, 0.0], dtype=torch.float32)
    args = (ends, torch.tensor([2.0, 100.0, 2.0]), torch.tensor([5.0, 101.0, 5.0]))
    np.testing.assert_allclose(
        draw(lambda *x: torch._dirichlet_grad(*x), *args), torch._dirichlet_grad(*args), atol=1e-4
    )


@pytest.mark.parametrize("kind", ["beta", "dirichlet"])
def test_gradients_of_beta_and_dirichlet_samples_under_jit(kind):
    def sample(c: torch.Tensor) -> torch.Tensor:
        if kind == "beta":
            return torch.distributions.Beta(c[:, 0], c[:, 1]).rsample()
        return torch.distributions.Dirichlet(c).rsample()

    f = jtbridge.wrap(sample)
    c = np.random.default_rng(0).uniform(0.5, 4, (50, 2 if kind == "beta" else 3)).astype(np.float32)
    x, pull = jax.vjp(lambda c: jax.jit(f)(c, rng=jax.random.key(0)), c)
    weights = np.cos(np.arange(x.size, dtype=np.float32)).reshape(x.shape)
    (got,) = pull(weights)

    x, c, w = (torch.tensor(np.asarray(v)).double() for v in (x, c, weights))
    if kind == "beta":  # torch draws it as the first of two Dirichlet numbers
        x, w = torch.stack([x, 1 - x], 1), torch.stack([w, torch.zeros_like(w)], 1)
    want = torch._dirichlet_grad(x, c, c.sum(-1, True).expand_as(c)) * (w - (x * w).sum(-1, True))
    np.testing.assert_allclose(got, want, rtol=2e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("f", "wrong", "right"),
    [
        (torch.bernoulli, [2.0, -1.0, math.nan], 0.5),
        (lambda p: torch.empty_like(p).bernoulli_(p), [2.0, -1.0, math.nan], 0.5),
        (torch.poisson, [-1.0, math.nan], 2.0),
        (lambda std: torch.normal(0.0, std), [-1.0], 1.0),
    ],
    ids=["bernoulli", "bernoulli_", "poisson", "normal"],
)
def test_parameters_refused_by_torch_give_nan(f: Any, wrong: list[float], right: float):
    for value in wrong:
        assert np.isnan(draw(f, torch.tensor([value, right]))).tolist() == [True, False]


@pytest.mark.parametrize("replacement", [True, False])
@pytest.mark.parametrize("row", [[1.0, -1.0], [1.0, math.inf], [1.0, math.nan], [0.0, 0.0]], ids=str)
def test_weights_refused_by_torch_give_an_invalid_index(row: list[float], replacement: bool):
    drawn = draw(lambda w: torch.multinomial(w, 2, replacement), torch.tensor([row, [1.0, 2.0]]))
    assert (drawn[0] < 0).all()
    assert (drawn[1] >= 0).all()


def test_dropout_propagates_nan():
    def gradient(x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return torch.autograd.grad(torch.native_dropout(x, 0.5, True)[0], x, torch.full_like(x, torch.nan))[0]

    assert np.isnan(draw(lambda x: torch.native_dropout(x, 0.5, True)[0], empty().fill_(torch.nan))).all()
    assert np.isnan(draw(gradient, empty().fill_(1.0))).all()
