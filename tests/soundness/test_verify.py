"""`verify=True`: the first result of a traced program is compared with torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jtbridge
from jtbridge.errors import VerificationError

X = np.array([1.0, 2.0, 3.0, 4.0], np.float32)


def fakes_are_other(v):
    return v * 2 if isinstance(v, torch._subclasses.FakeTensor) else v * 3


@pytest.mark.parametrize("transform", ["jit", "vmap", "grad"])
def test_verify_finds_another_branch(transform: str):
    def run(fn: Callable[..., Any]) -> Any:
        f = jtbridge.wrap(fn, backend="xla", verify=True)
        program = {"jit": f, "vmap": jax.vmap(f), "grad": jax.grad(lambda x: f(x).sum())}[transform]
        jax.block_until_ready(jax.jit(program)(jnp.asarray(X)))
        jax.effects_barrier()

    run(torch.sin)
    with pytest.raises(Exception, match="differs from torch's by"):
        run(fakes_are_other)


def test_verify_by_config():
    with jtbridge.config(backend="xla", verify=True), pytest.raises(VerificationError, match="fakes_are_other"):
        jtbridge.wrap(fakes_are_other)(jnp.asarray(X))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e5m2"])
def test_verify_in_dtypes_that_numpy_lacks(dtype):
    f = jtbridge.wrap(lambda scale, v: scale.float() * v.float(), backend="xla", verify=True)
    jax.block_until_ready(jax.jit(f)(jnp.asarray(2.0, dtype), jnp.asarray(X, dtype)))
    jax.effects_barrier()


CANCELLING: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "odd powers": lambda x: (x**3).sum(),
    "centred": lambda x: (x**2 - (x**2).mean()).sum(),
    "total force": lambda x: ((x[:, None] - x) ** 3).sum(),
}


@pytest.mark.parametrize("name", CANCELLING)
@pytest.mark.parametrize("count", [6, 1000])
def test_rounding_errors_of_cancelling_terms_are_accepted(name: str, count: int):
    x = jnp.linspace(-2.0, 2.0, count)
    fn = CANCELLING[name]
    jax.block_until_ready(jax.jit(jtbridge.wrap(fn, backend="xla", verify=True))(x))
    jax.effects_barrier()
    values = [each for each in jtbridge.check(fn, x).comparisons if each.mode in ("value", "vmap")]
    assert values
    assert all(each.ok for each in values)


@pytest.mark.parametrize("name", CANCELLING)
def test_a_small_difference_of_terms_that_cancel_is_found(name: str):
    def differs(x: torch.Tensor) -> torch.Tensor:
        return CANCELLING[name](x) + (1e-3 if isinstance(x, torch._subclasses.FakeTensor) else 0.0)

    def run() -> None:
        jax.block_until_ready(jax.jit(jtbridge.wrap(differs, backend="xla", verify=True))(jnp.linspace(-2.0, 2.0, 6)))
        jax.effects_barrier()

    with pytest.raises(jax.errors.JaxRuntimeError, match="differs from torch's"):
        run()


def test_a_function_that_calls_a_jax_function_is_not_compared():
    f = jtbridge.wrap(lambda x: jtbridge.to_torch_function(jnp.sin)(x).sum(), verify=True)
    assert jax.jit(f)(jnp.zeros(3)) == 0
    assert jax.jit(jax.grad(f))(jnp.zeros(3)).tolist() == [1.0, 1.0, 1.0]
