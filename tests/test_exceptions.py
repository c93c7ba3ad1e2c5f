"""Exceptions raised while a torch function runs, eagerly and inside compiled programs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch

import jtbridge
from jtbridge import errors

X = jnp.array([1.0, 2.0])
COMPILED = (jax.errors.JaxRuntimeError, ValueError)  # XLA chooses: the latter from the second call of a program on


def positive(x: torch.Tensor) -> torch.Tensor:
    """Fails for some values, which no trace can know."""
    total = x.sum().item()
    if total < 0:
        raise LookupError(f"{total:g} is negative")
    return x * 2


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (jax.ShapeDtypeStruct((3,), jnp.float32), "Result 0 of `positive` has shape (2,) but (3,) was expected"),
        (jax.ShapeDtypeStruct((2,), jnp.int32), "Result 0 of `positive` has dtype torch.float32 but torch.int"),
        ((jax.ShapeDtypeStruct((2,), jnp.float32),), "`positive` returned the tree PyTreeDef(*) but was traced with"),
    ],
)
@pytest.mark.parametrize("jit", [False, True])
def test_output_mismatch_at_run_time(wrong: Any, message: str, jit: bool, backend: str):
    f = jtbridge.wrap(positive, output_shapes=wrong)
    with pytest.raises(COMPILED if jit else errors.OutputMismatchError) as caught:
        jax.block_until_ready((jax.jit(f) if jit else f)(X))
    assert message in str(caught.value)
    assert "OutputMismatchError" in str(caught.value) or not jit


def test_exception_in_an_eager_call_is_raised_as_it_is(backend: str):
    with pytest.raises(LookupError) as caught:
        jtbridge.wrap(positive)(-X)
    assert type(caught.value) is LookupError
    assert str(caught.value) == "-3 is negative"
    assert "positive" in [entry.name for entry in caught.traceback]


@pytest.mark.parametrize(
    "make", [lambda f: f, lambda f: jax.value_and_grad(lambda x: f(x).sum())], ids=["call", "grad"]
)
def test_exception_in_a_compiled_program_carries_the_torch_traceback(make: Callable, backend: str):
    run = jax.jit(make(jtbridge.wrap(positive)))
    jax.block_until_ready(run(X))
    with pytest.raises(COMPILED) as caught:
        jax.block_until_ready(run(-X))
    message = str(caught.value)
    assert (
        "TorchCallError: `positive`, a torch function called from a JAX program with x: float32[2], raised "
        "LookupError: -3 is negative" in message
    )
    assert "Torch traceback:\nTraceback (most recent call last):" in message
    assert 'raise LookupError(f"{total:g} is negative")' in message
    jax.block_until_ready(run(X))


def test_mistake_in_the_function_is_the_callers_to_see(backend: str):
    with pytest.raises(RuntimeError, match=r"size of tensor a \(2\) must match the size of tensor b \(3\)") as caught:
        jax.jit(jtbridge.wrap(torch.add))(X, jnp.ones(3))
    assert "(raised while finding the output shapes of `add`)" in caught.value.__notes__


def test_a_mistake_is_told_once(backend: str, caplog: pytest.LogCaptureFixture):
    """The exception says it all; torch's log of what failed while its shapes were inferred is noise."""
    with pytest.raises(RuntimeError, match="must match the size"):
        jtbridge.wrap(torch.add)(X, jnp.ones(3))
    assert [record.name for record in caplog.records if record.levelname in ("WARNING", "ERROR")] == []
