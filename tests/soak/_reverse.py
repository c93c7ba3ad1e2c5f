"""JAX functions that torch calls."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import torch

import jtbridge

from ._function import TIGHT, Function, floats


def functions() -> list[Function]:
    def curve(x: jax.Array) -> jax.Array:
        return x**2 * jnp.sin(x)

    def total(x: jax.Array) -> jax.Array:
        return curve(x).sum()

    in_torch, total_in_torch = jtbridge.to_torch_function(curve), jtbridge.to_torch_function(total)
    weights = jnp.linspace(-1.0, 1.0, 12).reshape(4, 3)
    model = jtbridge.to_torch_module(lambda p, x: jnp.tanh(x @ p["w"]), {"w": weights})
    back_in_jax = jax.jit(jtbridge.wrap(lambda x: in_torch(x) + torch.cos(x)))

    def by_backward(x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        return torch.autograd.grad(in_torch(x).sum(), x)[0]

    def of_model(x: torch.Tensor) -> torch.Tensor:
        return model(x).detach()

    def back_reference(x: torch.Tensor) -> torch.Tensor:
        return x**2 * torch.sin(x) + torch.cos(x)

    return [
        Function("call", "JAX in torch", 4, in_torch, curve, tolerance=TIGHT, from_torch=True),
        Function("backward", "JAX in torch", 2, by_backward, jax.grad(total), tolerance=TIGHT, from_torch=True),
        Function(
            "func.grad",
            "JAX in torch",
            1,
            torch.func.grad(total_in_torch),
            jax.grad(total),
            tolerance=TIGHT,
            from_torch=True,
        ),
        Function(
            "func.vmap", "JAX in torch", 1, torch.func.vmap(in_torch), curve, floats(("n", 4)), TIGHT, from_torch=True
        ),
        Function(
            "module", "JAX in torch", 2, of_model, lambda x: jnp.tanh(x @ weights), tolerance=TIGHT, from_torch=True
        ),
        Function("there and back", "JAX in torch", 4, back_in_jax, back_reference, tolerance=TIGHT),
    ]
