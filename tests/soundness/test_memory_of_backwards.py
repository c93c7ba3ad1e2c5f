"""Backwards that write to their cotangent or to a tensor that the forward saved: no JAX array may change."""

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
]

Backward = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
SMALL, LARGE = 12, 120_000  # elements: an eager call copies the small ones and shares the large ones


def saved_through_numpy(x: torch.Tensor, ct: torch.Tensor) -> torch.Tensor:
    memory = x.numpy()
    memory *= 3
    return torch.from_numpy(memory * ct.numpy())


def saved_through_data(x: torch.Tensor, ct: torch.Tensor) -> torch.Tensor:
    x.data.mul_(3)
    return torch.from_numpy(ct.numpy().copy()) * x


def saved_through_dlpack(x: torch.Tensor, ct: torch.Tensor) -> torch.Tensor:
    torch.from_dlpack(x.detach()).mul_(3)
    return torch.from_numpy(ct.numpy().copy()) * x


def cotangent_through_numpy(x: torch.Tensor, ct: torch.Tensor) -> torch.Tensor:
    memory = ct.numpy()
    memory *= 1.5
    return ct


def cotangent_through_torch(x: torch.Tensor, ct: torch.Tensor) -> torch.Tensor:
    ct.mul_(1.5)
    return torch.from_numpy(ct.numpy())


BACKWARDS = (
    saved_through_numpy,
    saved_through_data,
    saved_through_dlpack,
    cotangent_through_numpy,
    cotangent_through_torch,
)
DERIVATIVES: dict[str, Callable[..., Any]] = {
    "grad": lambda f, x, y: jax.grad(lambda x: (f(x) * y).sum())(x),
    "pullback": lambda f, x, y: jax.vjp(f, x)[1](y)[0],
    "vmap": lambda f, x, y: jax.vmap(lambda x, y: jax.vjp(f, x)[1](y)[0])(x.reshape(2, -1), y.reshape(2, -1)).ravel(),
    "scan": lambda f, x, y: jax.lax.scan(lambda c, _: (c, jax.vjp(f, x)[1](y)[0]), 0.0, length=3)[1][-1],
}


def scaled(factor: float, backward: Backward) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that multiplies by `factor`, whose gradient is `backward` of the argument and the cotangent."""

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x * factor

        @staticmethod
        def backward(ctx: Any, ct: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return backward(ctx.saved_tensors[0], ct)

    return lambda x: Scaled.apply(x)


@pytest.mark.parametrize("backward", BACKWARDS)
@pytest.mark.parametrize("of", DERIVATIVES)
@pytest.mark.parametrize("size", [SMALL, LARGE])
@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("backend", ["auto", "dlpack", "callback"])
def test_arrays_are_not_overwritten(backend: str, jit: bool, size: int, of: str, backward: Backward):
    f = jtbridge.wrap(scaled(2, backward), backend=backend)

    def gradient(x: jax.Array, y: jax.Array) -> jax.Array:
        return DERIVATIVES[of](f, x, y)

    if jit:
        gradient = jax.jit(gradient)
    x, y = jnp.full(size, 0.5), jnp.full(size, 2.0)
    for _ in range(2):
        np.testing.assert_array_equal(gradient(x, y), np.full(size, 3.0))
    np.testing.assert_array_equal(x, np.full(size, 0.5))
    np.testing.assert_array_equal(y, np.full(size, 2.0))


def test_program_constant_is_not_overwritten():
    def backward(x: torch.Tensor, ct: torch.Tensor) -> torch.Tensor:
        memory = ct.numpy()
        memory *= 3
        return torch.from_numpy(memory)

    f = jtbridge.wrap(scaled(3, backward))
    weights = jnp.array([1.0, 2.0, 4.0])
    gradient = jax.jit(jax.grad(lambda x: (f(x) * weights).sum()))
    for _ in range(3):
        np.testing.assert_array_equal(gradient(jnp.ones(3)), [3.0, 6.0, 12.0])
    np.testing.assert_array_equal(weights, [1.0, 2.0, 4.0])


def test_failed_backward_restores_the_thread_state():
    def backward(x: torch.Tensor, ct: torch.Tensor) -> torch.Tensor:
        ct.numpy()[0] = 7
        raise ValueError("no gradient today")

    f = jtbridge.wrap(scaled(1, backward), backend="dlpack")
    y = jnp.full(3, 2.0)
    with pytest.raises(Exception, match="no gradient today"):
        jax.block_until_ready(jax.jit(jax.grad(lambda x: (f(x) * y).sum()))(jnp.ones(3)))
    np.testing.assert_array_equal(y, [2.0, 2.0, 2.0])
    array = torch.ones(3)
    array.numpy()[0] = 5  # a mode that is still active would copy the memory first
    assert array[0] == 5


def test_stored_cotangent_does_not_share_memory_with_jax():
    kept: list[torch.Tensor] = []

    def backward(x: torch.Tensor, ct: torch.Tensor) -> torch.Tensor:
        kept.append(torch.from_numpy(ct.numpy()))
        kept.append(ct.detach())
        return ct * 2

    f = jtbridge.wrap(scaled(2, backward), backend="dlpack")
    x, ct = jnp.arange(4.0), jnp.ones(4)
    gradient = jax.jit(lambda x, ct: jax.vjp(f, x)[1](ct)[0])
    for _ in range(2):
        np.testing.assert_array_equal(gradient(x, ct), np.full(4, 2.0))
        for tensor in kept:
            tensor.detach().numpy()[:] = 0
        np.testing.assert_array_equal(ct, np.ones(4))
