"""Softmax as a JAX function with derivatives and batching."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from jtbridge.kernels._differentiable import DifferentiableKernel
from jtbridge.kernels._primitive import KernelPrimitive, leading
from jtbridge.kernels._shapes import FLOATS, unsupported_dtype_reason
from jtbridge.kernels._tuning import LaunchParameters, launch_tuned, size

from . import reference
from .configurations import SoftmaxConfiguration, candidates


def unsupported_reason(x: jax.Array) -> str | None:
    """Return the reason that the kernel cannot run on ``x[..., n]``; None if it can."""
    return unsupported_dtype_reason("x", x.dtype, FLOATS) or ("`x` has no elements" if 0 in x.shape else None)


def softmax(x: jax.Array, axis: int = -1) -> jax.Array:
    """Compute ``exp(x) / sum(exp(x))`` along an axis, accumulated in float32.

    Triton kernels compute the forward and the backward where the program is lowered for a GPU; elsewhere both are
    computed in jnp. The function is differentiable to any order. Under vmap, one launch computes the rows of
    the whole batch.

    Args:
        x: an array, float32, bfloat16 or float16; other dtypes are computed in jnp.
        axis: the axis along which the numbers are normalized.

    Returns:
        An array like `x`, whose sum along the axis is 1. A row that is all -inf gives NaN, as in torch.

    Example:
        >>> import jax.numpy as jnp
        >>> from jtbridge.kernels import softmax
        >>> softmax(jnp.zeros((2, 4))).tolist()[0]
        [0.25, 0.25, 0.25, 0.25]

    Source: Milakov and Gimelshein, arXiv:1805.02867.
    """
    return _softmax_along(x, axis, log=False)


def log_softmax(x: jax.Array, axis: int = -1) -> jax.Array:
    """Compute ``x - log(sum(exp(x)))`` along an axis; see :func:`softmax`.

    Args:
        x: an array, float32, bfloat16 or float16; other dtypes are computed in jnp.
        axis: the axis along which the exponentials are summed.

    Returns:
        An array like `x`.

    Example:
        >>> import jax.numpy as jnp
        >>> from jtbridge.kernels import log_softmax
        >>> bool(jnp.isclose(log_softmax(jnp.zeros(4))[0], -jnp.log(4.0)))
        True
    """
    return _softmax_along(x, axis, log=True)


def _softmax_along(x: jax.Array, axis: int, log: bool) -> jax.Array:
    x = jnp.asarray(x)
    if unsupported_reason(x):
        return (jax.nn.log_softmax if log else jax.nn.softmax)(x, axis)
    moved = jnp.moveaxis(x, axis, -1)
    return jnp.moveaxis(differentiable_kernel(log)(moved)[0], -1, axis)


@functools.cache
def differentiable_kernel(log: bool) -> DifferentiableKernel:
    """Return softmax over the last dimension or, with `log`, its logarithm, as a differentiable kernel."""
    of = functools.partial(functools.partial, log=log)
    return DifferentiableKernel(
        forward=KernelPrimitive(of(reference.forward), of(_forward), leading()),
        backward=KernelPrimitive(of(reference.backward), of(_backward), leading()),
        results=1,
        saved=lambda inputs, outputs: outputs,
    )


def _forward(x: jax.Array, *, log: bool) -> list[jax.Array]:
    from .triton_kernel import softmax_forward

    return _launched(softmax_forward, x, log=log)


def _backward(y: jax.Array, ct: jax.Array, *, log: bool) -> list[jax.Array]:
    from .triton_kernel import softmax_backward

    return _launched(softmax_backward, y, ct, log=log)


def _launched(kernel: Any, x: jax.Array, *more: jax.Array, log: bool) -> list[jax.Array]:
    n, rows = x.shape[-1], math.prod(x.shape[:-1])

    def launch_parameters(c: SoftmaxConfiguration) -> LaunchParameters:
        constants = {"rows": rows, "n": n, "tile": c.tile, "block": c.block, "log": log}
        return LaunchParameters((math.ceil(rows / c.tile),), constants, c.warps)

    return launch_tuned(
        kernel,
        x,
        *more,
        out_types=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
        candidates=candidates(rows, n),
        problem={"dtype": str(x.dtype), "rows": size(rows), "n": size(n), "log": log},
        launch_parameters=launch_parameters,
    )
