"""Matrix product with a bias and an activation, in jnp."""

from __future__ import annotations

import functools
from typing import Literal

import jax
import jax.numpy as jnp

Activation = Literal["relu", "gelu", "gelu_tanh", "silu"]
Precision = Literal["ieee", "tf32x3", "tf32"]

ACTIVATIONS = {
    "relu": jax.nn.relu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "silu": jax.nn.silu,
}
PRECISIONS = {"ieee": jax.lax.Precision.HIGHEST, "tf32x3": jax.lax.Precision.HIGH, "tf32": jax.lax.Precision.DEFAULT}


def forward(
    a: jax.Array,
    b: jax.Array,
    bias: jax.Array,
    *,
    activation: Activation | None,
    transpose_b: bool,
    precision: Precision,
) -> tuple[jax.Array, ...]:
    """``activation(a @ b + bias)``, in float32 and rounded once, and with an activation what it was applied to.

    A bias of no elements is none.
    """
    product = _product(a, b, 1 if transpose_b else 0, precision)
    before = product + bias.astype(product.dtype) if bias.size else product
    if activation is None:
        return (before.astype(a.dtype),)
    return ACTIVATIONS[activation](before).astype(a.dtype), before.astype(a.dtype)


def backward(
    a: jax.Array,
    b: jax.Array,
    bias: jax.Array,
    *rest: jax.Array,
    activation: Activation | None,
    transpose_b: bool,
    precision: Precision,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of `a`, `b` and `bias`, from what the activation was applied to, if there is one, and the cotangent.

    The activation's derivative is elementwise, which XLA fuses with the bias's sum; the products are XLA's (cuBLAS).
    """
    *before, ct = rest
    if activation is not None:
        wide = before[0].astype(_accumulator(a))
        (ct,) = jax.vjp(ACTIVATIONS[activation], wide)[1](ct.astype(wide.dtype))
        of_bias = ct
        ct = ct.astype(a.dtype)
    else:
        of_bias = ct.astype(_accumulator(a))
    of_a = _product(ct, b, 0 if transpose_b else 1, precision).astype(a.dtype)
    rows, cts = a.reshape(-1, a.shape[-1]), ct.reshape(-1, ct.shape[-1])
    left, right = (cts, rows) if transpose_b else (rows, cts)
    of_b = _product(left.T, right, 0, precision).astype(b.dtype)
    every = tuple(range(ct.ndim - 1))
    return of_a, of_b, (of_bias.sum(every) if bias.size else jnp.zeros(0)).astype(bias.dtype)


def _product(a: jax.Array, b: jax.Array, contracted: int, precision: Precision) -> jax.Array:
    """The last dimension of `a` with one of `b`, accumulated in float32 or wider."""
    dimensions = (((a.ndim - 1,), (contracted,)), ((), ()))
    return jax.lax.dot_general(
        a, b, dimensions, precision=PRECISIONS[precision], preferred_element_type=_accumulator(a)
    )


def _accumulator(x: jax.Array) -> jnp.dtype:
    return jnp.dtype(jnp.float32) if x.dtype in (jnp.bfloat16, jnp.float16) else x.dtype
