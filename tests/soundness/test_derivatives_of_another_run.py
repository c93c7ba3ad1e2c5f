"""An eager derivative that runs the function again is refused if that run may differ from the run of the values."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jtbridge
from jtbridge.errors import DifferentiationError

X = jnp.arange(1.0, 9.0)
ONES = jnp.ones(8)
Function = Callable[[jax.Array], jax.Array]


def pushed(f: Function, x: jax.Array) -> jax.Array:
    return jax.jvp(f, (x,), (ONES,))[1]


AGAIN: dict[str, Callable[[Function], jax.Array]] = {
    "grad of jvp": lambda f: jax.grad(lambda x: pushed(f, x).sum())(X),
    "jvp of jvp": lambda f: jax.jvp(lambda x: pushed(f, x), (X,), (ONES,))[1],
    "jacrev of jacfwd": lambda f: jax.jacrev(jax.jacfwd(f))(X).sum((1, 2)),
}
ONCE: dict[str, Callable[[Function], jax.Array]] = {
    "jvp of grad": lambda f: jax.jvp(jax.grad(lambda x: f(x).sum()), (X,), (ONES,))[1],
    "hessian": lambda f: jax.hessian(lambda x: f(x).sum())(X).sum(1),
    "grad of grad": lambda f: jax.grad(lambda x: jax.grad(lambda x: f(x).sum())(x).sum())(X),
}


def dropped(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.dropout(x * x, 0.5)


@pytest.mark.parametrize("name", AGAIN)
def test_function_that_counts_is_refused_and_its_count_is_restored(name: str):
    count = [0]

    def counts(x: torch.Tensor) -> torch.Tensor:
        count[0] += 1
        return x * x * count[0]

    with pytest.raises(DifferentiationError, match=r"changes .*count\[0\].*derivative of another run"):
        AGAIN[name](jtbridge.wrap(counts))
    assert count == [1]


@pytest.mark.parametrize("name", AGAIN)
def test_a_function_that_draws_is_refused_without_a_key(name: str):
    torch.manual_seed(0)
    dropped(torch.ones(8))
    want = torch.get_rng_state()
    torch.manual_seed(0)
    with pytest.raises(DifferentiationError, match="draws random numbers without `rng=`"):
        AGAIN[name](jtbridge.wrap(dropped))
    assert torch.equal(torch.get_rng_state(), want)


@pytest.mark.parametrize("name", AGAIN | ONCE)
def test_a_key_draws_the_same_in_both_runs(name: str):
    key = jax.random.key(0)
    f = jtbridge.wrap(dropped)
    values = f(X, rng=key)
    np.testing.assert_allclose((AGAIN | ONCE)[name](lambda x: f(x, rng=key)), jnp.where(values != 0, 4.0, 0.0))


@pytest.mark.parametrize("name", AGAIN | ONCE)
def test_pure_and_caching_functions_have_all_derivatives(name: str):
    table: dict[str, torch.Tensor] = {}

    def cached(x: torch.Tensor) -> torch.Tensor:
        if "two" not in table:
            table["two"] = torch.tensor(2.0)
        return x ** table["two"]

    for _ in range(2):
        np.testing.assert_allclose((AGAIN | ONCE)[name](jtbridge.wrap(cached)), 2 * ONES)


@pytest.mark.parametrize("name", ONCE)
def test_derivatives_of_one_run_may_count(name: str):
    count = [0]

    def counts(x: torch.Tensor) -> torch.Tensor:
        count[0] += 1
        return x * x * count[0]

    np.testing.assert_allclose(ONCE[name](jtbridge.wrap(counts)), 2 * ONES)
    assert count == [1]
