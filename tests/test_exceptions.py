"""Exceptions raised while a torch function runs, eagerly and inside compiled programs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch

import jtbridge
from jtbridge import errors

from .compare import assert_matches

X = jnp.array([1.0, 2.0])
COMPILED = (jax.errors.JaxRuntimeError, ValueError)  # XLA raises a ValueError from the second call of a program on


def positive(x: torch.Tensor) -> torch.Tensor:
    """Raise for some values, which no trace can know."""
    total = x.sum().item()
    if total < 0:
        raise LookupError(f"{total:g} is negative")
    return x * 2


def by_numpy(x: torch.Tensor) -> torch.Tensor:
    """Compute with NumPy, so that the result is known only when the function runs."""
    return torch.from_numpy(x.numpy() * 2)


def chosen(x: torch.Tensor) -> torch.Tensor:
    """Return a result whose size depends on the values."""
    return x[x > 1.5]


@pytest.mark.parametrize(
    ("fn", "wrong", "message"),
    [
        (by_numpy, jax.ShapeDtypeStruct((3,), jnp.float32), "Result 0 of `by_numpy` has shape (2,) but (3,) was exp"),
        (by_numpy, jax.ShapeDtypeStruct((2,), jnp.int32), "Result 0 of `by_numpy` has dtype torch.float32 but torch"),
        (by_numpy, (jax.ShapeDtypeStruct((2,), jnp.float32),), "`by_numpy` returned the tree PyTreeDef(*) but was tra"),
        (chosen, jax.ShapeDtypeStruct((2,), jnp.float32), "Result 0 of `chosen` has shape (1,) but (2,) was expected"),
    ],
)
def test_output_mismatch_at_run_time(fn: Callable, wrong: Any, message: str, backend: str):
    f = jtbridge.wrap(fn, output_shapes=wrong)
    with pytest.raises(COMPILED) as caught:
        jax.block_until_ready(jax.jit(f)(X))
    assert message in str(caught.value)
    assert "OutputMismatchError" in str(caught.value)


@pytest.mark.parametrize(
    ("fn", "right"),
    [(by_numpy, jax.ShapeDtypeStruct((2,), jnp.float32)), (chosen, jax.ShapeDtypeStruct((1,), jnp.float32))],
)
def test_a_right_declaration_at_run_time(fn: Callable, right: Any, backend: str):
    assert_matches(jax.jit(jtbridge.wrap(fn, output_shapes=right))(X), fn(torch.tensor([1.0, 2.0])))


@pytest.mark.parametrize("wrong", [jax.ShapeDtypeStruct((3,), jnp.float32), jax.ShapeDtypeStruct((2,), jnp.int32)])
@pytest.mark.parametrize("transform", [lambda f: f, lambda f: jax.grad(lambda x: f(x).sum()), jax.vmap])
def test_output_mismatch_when_traced(wrong: Any, transform: Callable, backend: str):
    """A function that reads values, but whose result is known without them, is refused before it runs."""
    f = jax.jit(transform(jtbridge.wrap(positive, output_shapes=wrong)))
    x = X if transform is not jax.vmap else jnp.stack([X, X])
    with pytest.raises(errors.OutputMismatchError, match=r"`output_shapes` of `positive` declares .* it returns"):
        f.trace(x)


@pytest.mark.parametrize("wrong", [jax.ShapeDtypeStruct((3,), jnp.float32), jax.ShapeDtypeStruct((2,), jnp.int32)])
def test_output_mismatch_in_an_eager_call(wrong: Any, backend: str):
    with pytest.raises(errors.OutputMismatchError, match=r"`output_shapes` of `positive` declares .* it returns"):
        jtbridge.wrap(positive, output_shapes=wrong)(X)


def test_exception_in_an_eager_call_is_raised_unchanged(backend: str):
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


def test_mistake_in_the_function_raises_the_error_of_torch(backend: str):
    with pytest.raises(RuntimeError, match=r"size of tensor a \(2\) must match the size of tensor b \(3\)") as caught:
        jax.jit(jtbridge.wrap(torch.add))(X, jnp.ones(3))
    assert "(raised while finding the output shapes of `add`)" in caught.value.__notes__


def test_mistake_is_reported_once(backend: str, log_records: list[logging.LogRecord]):
    """The user gets only the exception, without torch's log of the failed inference of shapes."""
    with pytest.raises(RuntimeError, match="must match the size"):
        jtbridge.wrap(torch.add)(X, jnp.ones(3))
    assert not log_records
