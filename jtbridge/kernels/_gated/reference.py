"""``activation(gate) * up`` in jnp."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from jtbridge.kernels._shapes import to_precision

ACTIVATIONS = ("silu", "gelu_tanh", "gelu")


def activate(gate: jax.Array, activation: str) -> jax.Array:
    """Apply the activation function with a name of :data:`ACTIVATIONS`."""
    if activation == "silu":
        return jax.nn.silu(gate)
    return jax.nn.gelu(gate, approximate=activation == "gelu_tanh")


def forward(gate: jax.Array, up: jax.Array, *, activation: str, rounded: bool = False) -> tuple[jax.Array]:
    """Compute ``activation(gate) * up`` in float32, rounded once; with `rounded`, the activation is rounded too."""
    activated = activate(gate.astype(jnp.float32), activation)
    if rounded:
        activated = to_precision(activated, gate.dtype)
    return ((activated * up.astype(jnp.float32)).astype(gate.dtype),)


def backward(
    gate: jax.Array, up: jax.Array, ct: jax.Array, *, activation: str, rounded: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Return the gradients ``ct * up * activation'(gate)`` and ``ct * activation(gate)``."""
    wide, wide_ct = gate.astype(jnp.float32), ct.astype(jnp.float32)
    activated, by_activated = activate(wide, activation), wide_ct * up.astype(jnp.float32)
    if rounded:
        activated, by_activated = (to_precision(x, gate.dtype) for x in (activated, by_activated))
    return (by_activated * _activation_derivative(wide, activation)).astype(gate.dtype), (wide_ct * activated).astype(
        up.dtype
    )


def _activation_derivative(x: jax.Array, activation: str) -> jax.Array:
    """Return the activation's derivative."""
    if activation == "silu":
        s = jax.nn.sigmoid(x)
        return s * (1 + x * (1 - s))
    if activation == "gelu_tanh":  # x / 2 * (1 + tanh(z)) = x * sigmoid(2 z)
        c = 2 * math.sqrt(2 / math.pi)
        s = jax.nn.sigmoid(c * (x + 0.044715 * x**3))
        return s * (1 + x * (1 - s) * c * (1 + 3 * 0.044715 * x**2))
    return jax.scipy.stats.norm.cdf(x) + x * jax.scipy.stats.norm.pdf(x)
