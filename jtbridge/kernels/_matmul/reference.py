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
    bias: jax.Array | None = None,
    *,
    activation: Activation | None,
    transpose_b: bool,
    precision: Precision,
) -> tuple[jax.Array, ...]:
    """Return ``activation(a @ b + bias)`` and, if there is an activation, its argument.

    Both are computed in float32, or in the dtype of `a` if that is neither bfloat16 nor float16, and rounded once.
    """
    product = _contract(a, b, 1 if transpose_b else 0, precision)
    before = product if bias is None else product + bias.astype(product.dtype)
    if activation is None:
        return (before.astype(a.dtype),)
    return ACTIVATIONS[activation](before).astype(a.dtype), before.astype(a.dtype)


def backward(
    a: jax.Array,
    b: jax.Array,
    *rest: jax.Array,
    activation: Activation | None,
    transpose_b: bool,
    precision: Precision,
    biased: bool,
) -> tuple[jax.Array, ...]:
    """Return the gradients of `a`, `b` and the bias.

    `rest` is the bias, if there is one, the argument of the activation, if there is one, and the cotangent. On a GPU
    the backward is this function too: XLA fuses the elementwise derivative of the activation with the sum of the bias's
    gradient, and computes the matrix products with cuBLAS.
    """
    *others, ct = rest
    if activation is not None:
        wide = others[-1].astype(_product_dtype(a))
        (ct,) = jax.vjp(ACTIVATIONS[activation], wide)[1](ct.astype(wide.dtype))
        of_bias = ct
        ct = ct.astype(a.dtype)
    else:
        of_bias = ct.astype(_product_dtype(a))
    of_a = _contract(ct, b, 0 if transpose_b else 1, precision).astype(a.dtype)
    rows, cts = a.reshape(-1, a.shape[-1]), ct.reshape(-1, ct.shape[-1])
    left, right = (cts, rows) if transpose_b else (rows, cts)
    of_b = _contract(left.T, right, 0, precision).astype(b.dtype)
    if not biased:
        return of_a, of_b
    return of_a, of_b, of_bias.sum(tuple(range(ct.ndim - 1))).astype(others[0].dtype)


def _contract(a: jax.Array, b: jax.Array, contracted: int, precision: Precision) -> jax.Array:
    """Contract the last dimension of `a` with dimension `contracted` of `b`, accumulated in float32 or wider."""
    dimensions = (((a.ndim - 1,), (contracted,)), ((), ()))
    return jax.lax.dot_general(
        a, b, dimensions, precision=PRECISIONS[precision], preferred_element_type=_product_dtype(a)
    )


def _product_dtype(x: jax.Array) -> jnp.dtype:
    return jnp.dtype(jnp.float32) if x.dtype in (jnp.bfloat16, jnp.float16) else x.dtype
