"""Code that reads values only to raise an exception is translated: where torch raises, the results are NaN."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.distributions as td

import jtbridge
from jtbridge.errors import DataDependentShapeError, TranslationError

X = torch.linspace(0.1, 0.9, 6).reshape(2, 3)


def _normal(mean: float | torch.Tensor, scale: float | torch.Tensor) -> td.Normal:
    return td.Normal(mean, scale, validate_args=True)  # other code may have turned off checks, which are the default


def _of_itself(x: torch.Tensor) -> torch.Tensor:
    return _normal(x, x).log_prob(x)


FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "normal": lambda x: _normal(x, x + 1).log_prob(x * 2),
    "categorical": lambda x: td.Categorical(logits=x, validate_args=True).log_prob(torch.tensor([0, 2])),
    "entropy": lambda x: td.Categorical(probs=x, validate_args=True).entropy(),
    "beta": lambda x: td.Beta(x + 1, 2.0, validate_args=True).log_prob(x),
    "divergence": lambda x: td.kl_divergence(
        td.Normal(x, 1.0, validate_args=True), td.Normal(0.0, x, validate_args=True)
    ),
    "bernoulli": lambda x: td.Bernoulli(x, validate_args=True).log_prob((x > 0.5).float()),
    "gaussian loss": lambda x: torch.nn.functional.gaussian_nll_loss(x, x * 3, x),
    "assertion": lambda x: _asserting(x),
    "assertions by operators": lambda x: _asserting_async(x),
    "wrong if it holds": lambda x: _raising(x),
}


def _asserting(x: torch.Tensor) -> torch.Tensor:
    assert (x < 1).all(), "too large"
    return x.sin()


def _asserting_async(x: torch.Tensor) -> torch.Tensor:
    torch._assert_async((x < 1).all(), "constraint: too large")
    torch._assert_async((x > 0).all())
    return x.sin()


def _raising(x: torch.Tensor) -> torch.Tensor:
    if (x > 1).any():
        raise ValueError("too large")
    if torch.isnan(x).any() or (x < 0).any():
        raise ValueError("too small")
    return x.cos()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_and_gradients(name: str):
    fn = FUNCTIONS[name]
    f = jtbridge.wrap(fn, backend="xla")
    x = jtbridge.to_jax(X)
    np.testing.assert_allclose(jax.jit(f)(x), fn(X), rtol=1e-5, atol=1e-6)
    wanted = X.clone().requires_grad_()
    (fn(wanted) ** 2).sum().backward()
    np.testing.assert_allclose(jax.jit(jax.grad(lambda x: (f(x) ** 2).sum()))(x), wanted.grad, rtol=1e-4, atol=1e-5)
    rows = jnp.stack([x, x[::-1]])
    np.testing.assert_allclose(jax.vmap(f)(rows), [fn(X), fn(X.flip(0))], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("normal", -2.0),
        ("assertion", 2.0),
        ("assertions by operators", 2.0),
        ("assertions by operators", -2.0),
        ("wrong if it holds", -1.0),
    ],
)
def test_failed_checks_give_nan(name: str, wrong: float):
    fn = FUNCTIONS[name]
    bad = X.clone()
    bad[0, 1] = wrong
    with pytest.raises((ValueError, AssertionError, RuntimeError)):
        fn(bad)
    f = jtbridge.wrap(fn, backend="xla")
    assert np.isnan(jax.jit(f)(jtbridge.to_jax(bad))).all()
    assert np.isnan(jax.grad(lambda x: f(x).sum())(jtbridge.to_jax(bad))).all()
    got = jax.vmap(f)(jtbridge.to_jax(torch.stack([X, bad])))
    np.testing.assert_allclose(got[0], fn(X), rtol=1e-5, atol=1e-6)
    assert np.isnan(got[1]).all()


def test_checks_with_integer_and_boolean_results():
    @jtbridge.wrap(backend="xla")
    def f(x):
        assert (x > 0).all()
        return x.argmax(), x > 0.5

    index, large = jax.jit(f)(jtbridge.to_jax(X))
    assert int(index) == 5
    assert large.tolist() == (X > 0.5).tolist()
    index, large = f(-jtbridge.to_jax(X))
    assert int(index) < 0
    assert not large.any()


@pytest.mark.parametrize("backend", ["dlpack", "callback"])
def test_called_check_raises_without_a_run_on_zeros(backend: str):
    f = jtbridge.wrap(_of_itself, backend=backend)  # a scale of 0 is refused
    x = jtbridge.to_jax(X)
    np.testing.assert_allclose(jax.jit(f)(x), _of_itself(X), rtol=1e-6)
    wanted = X.clone().requires_grad_()
    _of_itself(wanted).sum().backward()
    np.testing.assert_allclose(jax.grad(lambda x: f(x).sum())(x), wanted.grad, rtol=1e-6)
    with pytest.raises(ValueError, match="constraint"):
        f(-x)
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match="constraint"):
        jax.block_until_ready(jax.jit(f)(-x))


@pytest.mark.parametrize("wrong", [2.0, -2.0])
@pytest.mark.parametrize("backend", ["dlpack", "callback"])
def test_called_assertions_by_operators_raise_in_gradients_too(backend: str, wrong: float):
    f = jtbridge.wrap(_asserting_async, backend=backend)
    gradient = jax.jit(jax.grad(lambda x: f(x).sum()))
    x = jtbridge.to_jax(X)
    np.testing.assert_allclose(gradient(x), X.cos(), rtol=1e-6)
    for run in (f, jax.jit(f), gradient):
        with pytest.raises((RuntimeError, ValueError), match=r"too large|single nonzero value"):
            jax.block_until_ready(run(x.at[0, 1].set(wrong)))


@pytest.mark.filterwarnings("error")
def test_branch_without_an_exception_is_translated():
    def fn(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.sum() > 0 else x * 3

    f = jax.jit(jtbridge.wrap(fn))
    assert "custom_call" not in f.lower(jtbridge.to_jax(X)).as_text()
    np.testing.assert_allclose(f(jtbridge.to_jax(X)), fn(X))
    np.testing.assert_allclose(f(-jtbridge.to_jax(X)), fn(-X))


def test_a_branch_to_results_of_different_shapes_is_called():
    def fn(x: torch.Tensor) -> torch.Tensor:
        return (x * 2 if x.sum() > 0 else x[:1]).sum()

    def of_different_shapes(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.sum() > 0 else x[:1]

    f = jax.jit(jtbridge.wrap(fn))  # the branches meet again before the result
    np.testing.assert_allclose(f(jtbridge.to_jax(X)), fn(X), rtol=1e-6)
    np.testing.assert_allclose(f(-jtbridge.to_jax(X)), fn(-X), rtol=1e-6)
    with pytest.raises(DataDependentShapeError):
        jax.jit(jtbridge.wrap(of_different_shapes))(jtbridge.to_jax(X))


def test_other_tracing_failures_are_not_value_checks():
    def fn(x: torch.Tensor) -> torch.Tensor:
        if (x > 0).all():
            return x + 1
        return torch.from_numpy(x.numpy() * 2)  # NumPy cannot be traced

    f = jtbridge.wrap(fn, backend="xla")
    with pytest.raises(TranslationError, match="needs the values of tensors"):
        f(jtbridge.to_jax(X))
    called = jtbridge.wrap(fn, backend="dlpack")
    np.testing.assert_allclose(called(-jtbridge.to_jax(X)), -2 * X)


INDICES = {
    "one": lambda x, i, j: x[i],
    "after all": lambda x, i, j: x[:, i],
    "two": lambda x, i, j: x[i, j],
    "with a slice, a number and a new axis": lambda x, i, j: x[None, i, 1:],
    "after an ellipsis": lambda x, i, j: x[..., j],
    "beside an array": lambda x, i, j: x[i, torch.tensor([2, 0])],
    "written": lambda x, i, j: _written(x, i, 7.0),
    "written to one": lambda x, i, j: _written(x, (i, j), x.sum()),
    "written over all": lambda x, i, j: _written(x, (slice(None), j), x[:, 0] * 2),
    "added": lambda x, i, j: _added(x, (i, slice(1, None))),
}


def _written(x, index, value):
    x = x.clone()
    x[index] = value
    return x


def _added(x, index):
    x = x * 1
    x[index] += 3 * x[index]
    return x


@pytest.mark.parametrize("name", INDICES)
@pytest.mark.parametrize("place", [0, 1, -1])
def test_index_checks_with_tensor_indices(name: str, place: int):
    fn = INDICES[name]
    i, j = torch.tensor(place), torch.tensor(place)
    f = jtbridge.wrap(fn, backend="xla")
    x, k = jtbridge.to_jax(X), jnp.array(place)
    got = jax.jit(f)(x, k, k)
    np.testing.assert_allclose(got, fn(X, i, j), rtol=1e-6)
    wanted = X.clone().requires_grad_()
    (fn(wanted, i, j) ** 2).sum().backward()
    np.testing.assert_allclose(jax.jit(jax.grad(lambda x: (f(x, k, k) ** 2).sum()))(x), wanted.grad, rtol=1e-5)
    ks = jnp.array([0, 1])
    rows = jax.vmap(f, in_axes=(None, 0, 0))(x, ks, ks)
    np.testing.assert_allclose(rows, np.stack([fn(X, t, t) for t in torch.tensor([0, 1])]), rtol=1e-6)


def test_a_table_in_a_loop():
    f = jtbridge.wrap(lambda table, i, x: table[i] * x, backend="xla")
    table = jnp.arange(5.0)
    got = jax.lax.fori_loop(1, 5, lambda i, x: f(table, i, x), jnp.array(1.0))
    assert float(got) == 24
