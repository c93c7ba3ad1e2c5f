"""JAX functions, each with the same function in torch, and arguments."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch


@dataclasses.dataclass(frozen=True)
class Case:
    """A JAX function and the torch function that is the reference. Both take and return one tensor."""

    name: str
    of_jax: Callable[..., Any]
    of_torch: Callable[..., Any]
    x: torch.Tensor


def _numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(sum(shape)))


_WEIGHT = _numbers(3, 4)
_WEIGHT_OF_JAX = jnp.asarray(_WEIGHT.numpy())
_COMPLEX = _numbers(3, dtype=torch.complex64)


@jax.custom_vjp
def _with_own_rule(x: Any) -> Any:
    return jnp.tanh(x)


_with_own_rule.defvjp(lambda x: (jnp.tanh(x), x), lambda x, ct: (ct * (1 - jnp.tanh(x) ** 2),))


def _scan(x: Any) -> Any:
    return jax.lax.scan(lambda c, y: (jnp.sin(c) * y, c), jnp.ones(()), x)[0] * x


def _scan_of_torch(x: torch.Tensor) -> torch.Tensor:
    c = torch.ones(())
    for y in x.unbind():
        c = torch.sin(c) * y
    return c * x


REAL = [
    Case("polynomial", lambda x: x**2 * jnp.sin(x), lambda x: x**2 * torch.sin(x), _numbers(3)),
    Case("softmax", lambda x: jax.nn.softmax(x) ** 2, lambda x: (torch.exp(x) / torch.exp(x).sum()) ** 2, _numbers(4)),
    Case("closed over", lambda x: jnp.tanh(x @ _WEIGHT_OF_JAX), lambda x: torch.tanh(x @ _WEIGHT), _numbers(2, 3)),
    Case("identity", lambda x: x, lambda x: x.clone(), _numbers(3)),
    Case("linear", lambda x: 3 * x[::-1], lambda x: 3 * x.flip(0), _numbers(3)),
    Case("number", lambda x: jnp.exp(x) * x, lambda x: torch.exp(x) * x, torch.tensor(0.7)),
    Case("scan", jax.jit(_scan), _scan_of_torch, _numbers(4)),
    Case("inner grad", jax.grad(lambda x: (x**4).sum()), lambda x: 4 * x**3, _numbers(3)),
    Case(
        "by complex",
        lambda x: jnp.abs(jnp.exp(1j * jax.lax.complex(x, 0 * x)) + 1) ** 2,
        lambda x: torch.abs(torch.exp(1j * x) + 1) ** 2,
        _numbers(3),
    ),
]
ONCE = Case("custom_vjp", _with_own_rule, torch.tanh, _numbers(3))  # it has no forward derivative
COMPLEX = [
    Case("holomorphic", lambda z: jnp.exp(z) * z**2, lambda z: torch.exp(z) * z**2, _COMPLEX),
    Case("conjugate", lambda z: jnp.conj(z) * jnp.sin(z), lambda z: torch.conj(z) * torch.sin(z), _COMPLEX),
    Case("magnitude", lambda z: jnp.abs(z) ** 3, lambda z: torch.abs(z) ** 3, _COMPLEX),
    Case(
        "parts",
        lambda z: jax.lax.complex(z.real * z.imag**2, z.imag),
        lambda z: z.real * z.imag**2 + 1j * z.imag,
        _COMPLEX,
    ),
]
