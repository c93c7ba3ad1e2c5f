"""`torch.autograd.detect_anomaly` around a trace: it asks for values, which the trace does not have."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jtbridge

X = jnp.asarray([0.5, -1.0, 2.0])
FUNCTIONS = {
    "product": (lambda x: (x * x * 2).sum(), lambda x: (x * x * 2).sum()),
    "matmul": (lambda x: torch.sin(torch.outer(x, x) @ x).sum(), lambda x: jnp.sin(jnp.outer(x, x) @ x).sum()),
}


@pytest.fixture
def anomaly_mode():
    with pytest.warns(UserWarning, match="Anomaly Detection has been enabled"), torch.autograd.detect_anomaly():
        yield


@pytest.mark.parametrize("transform", [jax.grad, jax.hessian, lambda f: lambda x: jax.jvp(f, (x,), (x,))])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_derivatives_are_translated(name: str, transform, anomaly_mode):
    function, same = FUNCTIONS[name]
    got = jax.jit(transform(jtbridge.wrap(function, backend="xla")))(X)
    want = transform(same)(X)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, want)


def test_an_eager_gradient_with_a_nan_raises(anomaly_mode):
    f = jtbridge.wrap(lambda x: torch.sqrt(x * 0).sum())
    with pytest.warns(UserWarning, match="Error detected"), pytest.raises(RuntimeError, match="returned nan values"):
        jax.grad(f)(X)


def test_a_branch_on_data_has_both_paths(anomaly_mode):
    def f(x: torch.Tensor) -> torch.Tensor:
        return (x * 2).sum() if torch.equal(x, x.abs()) else (x * 3).sum()

    gradient = jax.jit(jax.grad(jtbridge.wrap(f, backend="xla")))
    assert gradient(X).tolist() == [3, 3, 3]
    assert gradient(abs(X)).tolist() == [2, 2, 2]
