"""SwiGLU and GeGLU as JAX functions with derivatives and batching."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from jtbridge.kernels._differentiable import DifferentiableKernel
from jtbridge.kernels._primitive import KernelPrimitive, leading
from jtbridge.kernels._shapes import FLOATS, check_floating, check_same_dtype, unsupported_dtype_reason
from jtbridge.kernels._tuning import LaunchParameters, launch_tuned, size

from . import reference
from .configurations import GatedConfiguration, candidates


def unsupported_reason(gate: jax.Array, up: jax.Array) -> str | None:
    """Return the reason that the kernel cannot run on two arrays of the same shape; None if it can."""
    return (
        unsupported_dtype_reason("gate", gate.dtype, FLOATS)
        or (f"`gate` is {gate.dtype} and `up` is {up.dtype}" if gate.dtype != up.dtype else None)
        or ("`gate` has no elements" if 0 in gate.shape else None)
    )


def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """Compute ``silu(gate) * up`` in float32, rounded once.

    Triton kernels compute the forward and the backward where the program is lowered for a GPU; elsewhere both are
    computed in jnp. The function is differentiable to any order. The residuals are the arguments alone: the backward
    computes the activation again.

    Args:
        gate: [...], float32, bfloat16 or float16; other floating-point dtypes are computed in jnp.
        up: like `gate`.

    Returns:
        An array like `gate`.

    Raises:
        TypeError: an argument is not of a real floating-point dtype, or `up` has another dtype than `gate`.
        ValueError: `gate` and `up` differ in shape.

    Example:
        >>> import jax.numpy as jnp
        >>> from jtbridge.kernels import swiglu
        >>> swiglu(jnp.array([0.0, 100.0]), jnp.array([3.0, 2.0])).tolist()
        [0.0, 200.0]

    Source: Shazeer, arXiv:2002.05202.
    """
    return _gated_product(gate, up, "silu")


def geglu(gate: jax.Array, up: jax.Array, *, approximate: str = "tanh") -> jax.Array:
    """Compute ``gelu(gate) * up`` in float32, rounded once; see :func:`swiglu`.

    Args:
        gate: [...], float32, bfloat16 or float16; other floating-point dtypes are computed in jnp.
        up: like `gate`.
        approximate: "tanh", or "none" for the error function.

    Returns:
        An array like `gate`.

    Raises:
        TypeError: an argument is not of a real floating-point dtype, or `up` has another dtype than `gate`.
        ValueError: `gate` and `up` differ in shape, or `approximate` is neither "tanh" nor "none".

    Example:
        >>> import jax.numpy as jnp
        >>> from jtbridge.kernels import geglu
        >>> geglu(jnp.array([0.0, 100.0]), jnp.array([3.0, 2.0]), approximate="none").tolist()
        [0.0, 200.0]

    Source: Shazeer, arXiv:2002.05202; Hendrycks and Gimpel, arXiv:1606.08415.
    """
    if approximate not in ("tanh", "none"):
        raise ValueError(f"`approximate` is {approximate!r}, expected 'tanh' or 'none'")
    return _gated_product(gate, up, "gelu_tanh" if approximate == "tanh" else "gelu")


def _gated_product(gate: jax.Array, up: jax.Array, activation: str) -> jax.Array:
    gate, up = jnp.asarray(gate), jnp.asarray(up)
    check_floating(gate=gate, up=up)
    check_same_dtype(gate=gate, up=up)
    if gate.shape != up.shape:
        raise ValueError(f"`up` has shape {up.shape}, expected that of `gate`, {gate.shape}")
    if unsupported_reason(gate, up):
        return reference.activate(gate, activation) * up
    return differentiable_kernel(activation)(gate, up)[0]


@functools.cache
def differentiable_kernel(activation: str, *, rounded: bool = False) -> DifferentiableKernel:
    """Return the gated activation as a differentiable kernel.

    With `rounded`, the activation and its cotangent are rounded to the dtype of the arrays.
    """
    of = functools.partial(functools.partial, activation=activation, rounded=rounded)
    return DifferentiableKernel(
        forward=KernelPrimitive(of(reference.forward), of(_forward), leading()),
        backward=KernelPrimitive(of(reference.backward), of(_backward), leading()),
        results=1,
        saved=lambda inputs, outputs: inputs,
    )


def _forward(gate: jax.Array, up: jax.Array, **options: Any) -> list[jax.Array]:
    from .triton_kernel import gated_forward

    return _launched(gated_forward, gate, up, results=1, **options)


def _backward(gate: jax.Array, up: jax.Array, ct: jax.Array, **options: Any) -> list[jax.Array]:
    from .triton_kernel import gated_backward

    return _launched(gated_backward, gate, up, ct, results=2, **options)


def _launched(kernel: Any, *arrays: jax.Array, results: int, activation: str, rounded: bool) -> list[jax.Array]:
    x = arrays[0]
    options = {"activation": activation, "rounded": rounded}

    def launch_parameters(c: GatedConfiguration) -> LaunchParameters:
        return LaunchParameters((math.ceil(x.size / c.block),), {"size": x.size, "block": c.block, **options}, c.warps)

    return launch_tuned(
        kernel,
        *arrays,
        out_types=[jax.ShapeDtypeStruct(x.shape, x.dtype)] * results,
        candidates=candidates(),
        problem={"dtype": str(x.dtype), "size": size(x.size), **options},
        launch_parameters=launch_parameters,
    )
