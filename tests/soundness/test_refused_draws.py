"""Under jit a function refuses the draws that torch refuses for a dtype, and makes all others."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import pytest
import torch

import jtbridge
from jtbridge.errors import ShapeInferenceError

# A function of the ones of a dtype.
DRAWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "randint to 300": lambda x: torch.randint(300, (3,), dtype=x.dtype),
    "randint from -5": lambda x: torch.randint(-5, 3, (3,), dtype=x.dtype),
    "randint to 1 << 40": lambda x: torch.randint(1 << 40, (3,), dtype=x.dtype),
    "randint of many": lambda x: torch.randint(300, (300, 300), dtype=x.dtype),
    "randint_like": lambda x: torch.randint_like(x, 300),
    "random_ to 300": lambda x: x.clone().random_(300),
    "random_ to 0": lambda x: x.clone().random_(0),
    "randperm": lambda x: torch.randperm(300, dtype=x.dtype),
    "randperm of many": lambda x: torch.randperm(1 << 18, dtype=x.dtype),
    "bernoulli": lambda x: torch.bernoulli(x),
    "bernoulli_": lambda x: x.clone().bernoulli_(0.5),
    "poisson": lambda x: torch.poisson(x),
    "geometric_": lambda x: x.clone().geometric_(0.5),
    "rand": lambda x: torch.rand(3, dtype=x.dtype),
    "rand_like": lambda x: torch.rand_like(x),
    "randn_like": lambda x: torch.randn_like(x),
    "uniform_": lambda x: x.clone().uniform_(),
    "normal_": lambda x: x.clone().normal_(),
    "exponential_": lambda x: x.clone().exponential_(),
    "normal": lambda x: torch.normal(x, x),
    "dropout": lambda x: torch.nn.functional.dropout(x),
}
DTYPES = {str(dtype)[6:]: dtype for dtype in (torch.bool, torch.uint8, torch.int16, torch.float32, torch.complex64)}


@pytest.mark.filterwarnings("ignore:to - 1 is out of bounds:UserWarning")  # torch warns for float32
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", DRAWS)
def test_draws_are_refused_as_in_torch(name: str, dtype: str):
    draw = DRAWS[name]
    x = torch.ones(3, dtype=DTYPES[dtype])
    state = torch.get_rng_state()
    expected: Any = None
    with contextlib.suppress(RuntimeError, TypeError):
        expected = draw(x)
    torch.set_rng_state(state)

    translated = jax.jit(jtbridge.wrap(draw, backend="xla"))
    args, rng = jtbridge.to_jax(x), jax.random.key(0)
    if expected is None:
        with pytest.raises((ShapeInferenceError, RuntimeError, TypeError)):
            translated(args, rng=rng)
    else:
        out = translated(args, rng=rng)
        assert (out.shape, out.dtype) == (tuple(expected.shape), jtbridge.to_jax(expected).dtype)
    assert torch.equal(torch.get_rng_state(), state)
