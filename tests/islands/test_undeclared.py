"""Properties that torch's operators and fake tensors do not declare: random numbers, quantized results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jtbridge

pytestmark = [
    pytest.mark.filterwarnings("ignore::jtbridge.errors.CalledWarning"),
    pytest.mark.filterwarnings("ignore::jtbridge.errors.SequentialVmapWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of torch, about quantized tensors
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
OPTIONS: dict[str, dict[str, Any]] = {
    "auto": {},
    "dlpack": {"backend": "dlpack"},
    "needed": {"islands": "needed"},
    "never": {"islands": "never"},
}


def dropping(name: str, tags: tuple[torch.Tag, ...]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a custom operator that drops elements and draws its mask inside."""

    @torch.library.custom_op(f"jtbridge_tests::{name}", mutates_args=(), tags=tags)
    def dropped(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mask = (torch.rand_like(x) > 0.5).to(x.dtype)
        return x * mask, mask

    dropped.register_fake(lambda x: (torch.empty_like(x), torch.empty_like(x)))
    dropped.register_autograd(
        lambda ctx, grad, _: grad * ctx.saved_tensors[0],
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output[1]),
    )
    return lambda x: dropped(x)[0]


UNDECLARED = dropping("dropped_undeclared", ())
DECLARED = dropping("dropped", (torch.Tag.nondeterministic_seeded,))
X = jnp.ones(64)


def of(operator: Callable[[torch.Tensor], torch.Tensor], long: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function with the operator; a long function becomes a program with an island."""

    def f(x: torch.Tensor) -> torch.Tensor:
        for _ in range(10 if long else 1):
            x = x.sin() * 1.2
        return operator(x)

    return f


@pytest.mark.parametrize("long", [False, True])
@pytest.mark.parametrize("options", OPTIONS)
def test_random_operator_must_declare_its_draws(options: str, long: bool):
    state = torch.get_rng_state()
    f = jtbridge.wrap(of(UNDECLARED, long), **OPTIONS[options])
    for use in (f, lambda x, rng: jax.grad(lambda x: f(x, rng=rng).sum())(x)):
        assert (use(X, rng=jax.random.key(0)) == use(X, rng=jax.random.key(0))).all()
        with pytest.raises(Exception, match="its definition does not say so"):
            jax.block_until_ready(jax.jit(lambda x, use=use: use(x, rng=jax.random.key(0)))(X))
    with pytest.raises(Exception, match="its definition does not say so"):
        jax.block_until_ready(jax.jit(f)(X))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("long", [False, True])
@pytest.mark.parametrize("options", OPTIONS)
def test_an_operator_that_declares_its_draws_follows_the_key(options: str, long: bool):
    f = jax.jit(jtbridge.wrap(of(DECLARED, long), **OPTIONS[options]))
    first, second, other = (f(X, rng=jax.random.key(seed)) for seed in (0, 0, 1))
    assert (first == second).all()
    assert (first != other).any()


SCALES, ZEROS = torch.full((3,), 0.1), torch.zeros(3, dtype=torch.int64)
QUANTIZED = {
    "per tensor": lambda x: torch.quantize_per_tensor(x, 0.1, 10, torch.quint8).dequantize(),
    "by tensors": lambda x: torch.quantize_per_tensor(x, SCALES[0], ZEROS[0], torch.quint8).dequantize(),
    "per channel": lambda x: torch.quantize_per_channel(x, SCALES, ZEROS, 0, torch.qint8).dequantize(),
    "dynamic": lambda x: torch.quantize_per_tensor_dynamic(x, torch.qint8, False).dequantize(),
    "relu": lambda x: torch.relu(torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)).dequantize(),
    "integers": lambda x: torch.quantize_per_tensor(x, 0.1, 10, torch.quint8).int_repr().float(),
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_tensors_inside_of_a_program(name: str, options: str):
    quantized = of(QUANTIZED[name], long=True)
    rows = np.linspace(-2.0, 2.0, 18, dtype=np.float32).reshape(2, 3, 3) * np.array([1, 0.1], np.float32)[:, None, None]
    f = jtbridge.wrap(quantized, **OPTIONS[options])
    expected = np.stack([quantized(torch.tensor(row)).numpy() for row in rows])
    for program in (jax.vmap(f), jax.jit(jax.vmap(f)), lambda x: jnp.stack([jax.jit(f)(row) for row in x])):
        np.testing.assert_allclose(program(jnp.asarray(rows)), expected, atol=1e-6)
