"""Matrix product as a JAX function with derivatives and batching."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from jtbridge.kernels._chip import target
from jtbridge.kernels._differentiable import DifferentiableKernel
from jtbridge.kernels._primitive import KernelPrimitive, leading
from jtbridge.kernels._shapes import FLOATS, check_floating, unsupported_dtype_reason
from jtbridge.kernels._tuning import LaunchParameters, launch_tuned, size

from . import reference
from .configurations import MatmulConfiguration, candidates, default
from .reference import ACTIVATIONS, PRECISIONS, Activation, Precision

# The number of rows of blocks that are computed together, column by column, so that operands stay in the cache.
_GROUP = 8


def unsupported_reason(a: jax.Array, b: jax.Array, bias: jax.Array | None = None) -> str | None:
    """Return the reason that the kernel cannot multiply ``a[..., m, k]`` by a matrix `b`; None if it can."""
    for name, x in (("b", b), ("bias", bias)):
        if x is not None and x.dtype != a.dtype:
            return f"`{name}` is {x.dtype}, but `a` {a.dtype}"
    return (
        unsupported_dtype_reason("a", a.dtype, FLOATS)
        or ("`a` has no elements" if 0 in a.shape else None)
        or ("`b` has no elements" if 0 in b.shape else None)
    )


def matmul(
    a: jax.Array,
    b: jax.Array,
    bias: jax.Array | None = None,
    *,
    activation: Activation | None = None,
    transpose_b: bool = False,
    precision: Precision = "ieee",
) -> jax.Array:
    """Compute ``activation(a @ b + bias)``, accumulated in float32 and rounded once.

    Where the program is lowered for a GPU, a Triton kernel computes the product, with bias and activation in its
    epilogue. Elsewhere the function is computed in jnp. The backward uses XLA's matrix products (cuBLAS on a GPU); if
    there is an activation, its argument is a residual of the forward. The function is differentiable to any order. A
    batch of `a` is folded into its rows; a batch of `b` or `bias` becomes a loop over its elements.

    Args:
        a: [..., m, k], float32, bfloat16 or float16; other dtypes are computed in jnp.
        b: [k, n], of the dtype of `a`; [n, k] with `transpose_b`.
        bias: [n], of the dtype of `a`, or None.
        activation: "relu", "gelu" (by the error function), "gelu_tanh", "silu", or None.
        transpose_b: whether `b` is given as a linear layer's weight, [n, k].
        precision: the matmul precision of float32: "ieee"; or, on tensor cores, "tf32x3", which is nearly as exact, or
            "tf32", which has ten bits of mantissa.

    Returns:
        [..., m, n], of the dtype of `a`.

    Raises:
        TypeError: there is an activation, or dtypes differ, and an argument is not of a real floating-point dtype.
        ValueError: the shapes do not fit, or an option is not one of the values above.

    Example:
        >>> import jax.numpy as jnp
        >>> from jtbridge.kernels import matmul
        >>> matmul(jnp.ones((2, 3)), jnp.ones((3, 1)), jnp.array([-4.0]), activation="relu").tolist()
        [[0.0], [0.0]]

    Source: Tillet et al., Triton, MAPL 2019; Hendrycks and Gimpel, Gaussian error linear units, arXiv:1606.08415.
    """
    a, b = jnp.asarray(a), jnp.asarray(b)
    bias = None if bias is None else jnp.asarray(bias)
    _check_matmul(a, b, bias, activation, transpose_b, precision)
    options = {"activation": activation, "transpose_b": transpose_b, "precision": precision}
    given = (a, b) if bias is None else (a, b, bias)
    if unsupported_reason(a, b, bias):
        return reference.forward(*given, **options)[0]
    return differentiable_kernel(**options, biased=bias is not None)(*given)[0]


def _check_matmul(
    a: jax.Array, b: jax.Array, bias: jax.Array | None, activation: str | None, transpose_b: bool, precision: str
) -> None:
    if activation not in (None, *ACTIVATIONS):
        raise ValueError(f"`activation` is {activation!r}, expected None or one of {', '.join(ACTIVATIONS)}")
    if precision not in PRECISIONS:
        raise ValueError(f"`precision` is {precision!r}, expected one of {', '.join(PRECISIONS)}")
    if activation or any(x is not None and x.dtype != a.dtype for x in (b, bias)):
        check_floating(a=a, b=b, bias=bias)
    expected = "[n, k]" if transpose_b else "[k, n]"
    if a.ndim < 2 or b.ndim != 2 or b.shape[transpose_b] != a.shape[-1]:
        raise ValueError(f"`b` has shape {b.shape}, but `a` {a.shape}: expected {expected} and [..., m, k]")
    if bias is not None and bias.shape != (b.shape[1 - transpose_b],):
        raise ValueError(f"`bias` has shape {bias.shape}, but `b` {b.shape}: expected [n], where `b` is {expected}")


@functools.cache
def differentiable_kernel(
    activation: Activation | None, transpose_b: bool, precision: Precision, biased: bool
) -> DifferentiableKernel:
    """Return ``activation(a @ b)`` or, with `biased`, ``activation(a @ b + bias)`` as a differentiable kernel."""
    options: dict[str, Any] = {"activation": activation, "transpose_b": transpose_b, "precision": precision}
    forward = functools.partial(reference.forward, **options)
    backward = functools.partial(reference.backward, **options, biased=biased)
    shared = leading(shared=(1, 2) if biased else (1,))

    def without_saved(*inputs: jax.Array) -> tuple[jax.Array, ...]:
        return forward(*inputs)[:1]

    return DifferentiableKernel(
        forward=KernelPrimitive(forward, functools.partial(_forward, **options, saving=activation is not None), shared),
        backward=KernelPrimitive(backward, backward),
        results=1,
        saved=lambda inputs, outputs: [*inputs, *outputs[1:]],
        alone=KernelPrimitive(without_saved, functools.partial(_forward, **options, saving=False), shared),
        batching_rule=shared,
    )


def _forward(
    a: jax.Array,
    b: jax.Array,
    bias: jax.Array | None = None,
    *,
    activation: Activation | None,
    transpose_b: bool,
    precision: Precision,
    saving: bool,
) -> list[jax.Array]:
    from .triton_kernel import matmul_forward, matmul_forward_saving

    m, k = math.prod(a.shape[:-1]), a.shape[-1]
    n = b.shape[1 - transpose_b]
    kind = "half" if a.dtype != jnp.float32 else "ieee" if precision == "ieee" else "tf32"
    out_type = jax.ShapeDtypeStruct((*a.shape[:-1], n), a.dtype)
    options = {
        "biased": bias is not None,
        "transpose_b": transpose_b,
        "activation": activation,
        "precision": target().precision(precision),
    }

    def launch_parameters(c: MatmulConfiguration) -> LaunchParameters:
        blocks = {"block_m": c.block_m, "block_n": c.block_n, "block_k": c.block_k, "group": _GROUP}
        grid = (-(-m // c.block_m) * -(-n // c.block_n),)
        return LaunchParameters(grid, {"m": m, "n": n, "k": k, **blocks, **options}, c.num_warps, c.num_stages)

    return launch_tuned(
        matmul_forward_saving if saving else matmul_forward,
        a,
        b,
        b if bias is None else bias,  # the kernel does not read a missing bias, so it gets b instead
        out_types=[out_type] * (1 + saving),
        candidates=[default(kind, m, n, target()), *candidates(kind, m, n)],
        problem={"dtype": str(a.dtype), "m": size(m), "n": size(n), "k": size(k), **options},
        launch_parameters=launch_parameters,
    )
