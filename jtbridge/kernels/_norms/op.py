"""Layer and root mean square normalization as JAX functions with derivatives and batching."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jtbridge.kernels._differentiable import DifferentiableKernel
from jtbridge.kernels._primitive import KernelPrimitive, grouped
from jtbridge.kernels._shapes import FLOATS, check_floating, unsupported_dtype_reason
from jtbridge.kernels._tuning import LaunchParameters, launch_tuned, size

from . import reference
from .configurations import NormConfiguration, candidates_backward, candidates_forward, candidates_sums, programs
from .reference import Norm


def unsupported_reason(
    x: jax.Array, weight: jax.Array | None = None, bias: jax.Array | None = None, residual: jax.Array | None = None
) -> str | None:
    """Return the reason that the kernel cannot run on ``x[..., n]``; None if it can."""
    for name, array in {"x": x, "weight": weight, "bias": bias, "residual": residual}.items():
        if array is not None and (reason := unsupported_dtype_reason(name, array.dtype, FLOATS)):
            return reason
    return "`x` has no elements" if 0 in x.shape else None


def layer_norm(
    x: jax.Array,
    weight: jax.Array | None = None,
    bias: jax.Array | None = None,
    *,
    eps: float = 1e-5,
    residual: jax.Array | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Compute ``(x - mean) / sqrt(variance + eps) * weight + bias`` over the last dimension, accumulated in float32.

    Triton kernels compute the forward and the backward where the program is lowered for a GPU; elsewhere both are
    computed in jnp. The function is differentiable to any order. Under vmap, one launch computes the rows of the whole
    batch, also if each element of the batch has its own weight and bias.

    Args:
        x: [..., n], float32, bfloat16 or float16; other floating-point dtypes are computed in jnp.
        weight: [n], of any of these dtypes; None: 1.
        bias: [n], of any of these dtypes; None: 0.
        eps: added to the variance.
        residual: like `x`, and added to `x` first; the sum is rounded to the dtype of `x` and returned as well.

    Returns:
        An array like `x`; with a `residual`, this array and ``x + residual``.

    Raises:
        TypeError: an argument is not of a real floating-point dtype, or `residual` has another dtype than `x`.
        ValueError: `weight` or `bias` is not [n], `residual` has another shape than `x`, or `x` has no dimension.

    Example:
        >>> import jax.numpy as jnp
        >>> from jtbridge.kernels import layer_norm
        >>> layer_norm(jnp.array([1.0, 3.0]), bias=jnp.array([1.0, 1.0])).round(3).tolist()
        [0.0, 2.0]

    Source: Ba, Kiros and Hinton, arXiv:1607.06450.
    """
    return _normalize(x, weight, bias, residual, centered=True, eps=eps, offset=0.0)


def rms_norm(
    x: jax.Array,
    weight: jax.Array | None = None,
    *,
    eps: float = 1e-6,
    residual: jax.Array | None = None,
    offset: float = 0.0,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Compute ``x / sqrt(mean(x**2) + eps) * (offset + weight)`` over the last dimension, accumulated in float32.

    Kernels, derivatives and batching are as in :func:`layer_norm`.

    Args:
        x: [..., n], float32, bfloat16 or float16; other floating-point dtypes are computed in jnp.
        weight: [n], of any of these dtypes; None: the result is not scaled.
        eps: added to the mean square.
        residual: like `x`, and added to `x` first; the sum is rounded to the dtype of `x` and returned as well.
        offset: added to the weight; 1 for Gemma.

    Returns:
        An array like `x`; with a `residual`, this array and ``x + residual``.

    Raises:
        TypeError: an argument is not of a real floating-point dtype, or `residual` has another dtype than `x`.
        ValueError: `weight` is not [n], `residual` has another shape than `x`, or `x` has no dimension.

    Example:
        >>> import jax.numpy as jnp
        >>> from jtbridge.kernels import rms_norm
        >>> rms_norm(jnp.array([3.0, -3.0]), jnp.array([1.0, 2.0])).round(3).tolist()
        [1.0, -2.0]

    Source: Zhang and Sennrich, arXiv:1910.07467.
    """
    return _normalize(x, weight, None, residual, centered=False, eps=eps, offset=offset)


def _normalize(
    x: jax.Array,
    weight: jax.Array | None,
    bias: jax.Array | None,
    residual: jax.Array | None,
    *,
    centered: bool,
    eps: float,
    offset: float,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    x = jnp.asarray(x)
    weight, bias, residual = (None if array is None else jnp.asarray(array) for array in (weight, bias, residual))
    _check_norm(x, weight, bias, residual)
    norm = Norm(centered, float(eps), float(offset), residual is not None, weight is not None, bias is not None)
    count = math.prod(x.shape[:-1])
    rows = [array.reshape(1, count, x.shape[-1]) for array in (x, residual) if array is not None]
    arrays = [*rows, *(array[None] for array in (weight, bias) if array is not None)]
    if unsupported_reason(x, weight, bias, residual):
        results = reference.forward(*arrays, norm=norm)[:-1]
    else:
        dtypes = tuple(str(array.dtype) for array in (weight, bias) if array is not None)
        results = differentiable_kernel(norm, dtypes)(*arrays)
    shaped = [y.reshape(x.shape) for y in results]
    return (shaped[0], shaped[1]) if norm.residual else shaped[0]


def _check_norm(x: jax.Array, weight: jax.Array | None, bias: jax.Array | None, residual: jax.Array | None) -> None:
    given = {"x": x, "weight": weight, "bias": bias, "residual": residual}
    check_floating(**given)
    if x.ndim == 0:
        raise ValueError("`x` has no dimension to be normalized over")
    for name in ("weight", "bias"):
        array = given[name]
        if array is not None and array.shape != x.shape[-1:]:
            raise ValueError(f"`{name}` has shape {array.shape}, expected {x.shape[-1:]} for `x` of shape {x.shape}")
    if residual is not None and residual.shape != x.shape:
        raise ValueError(f"`residual` has shape {residual.shape}, expected that of `x`, {x.shape}")
    if residual is not None and residual.dtype != x.dtype:
        raise TypeError(f"`residual` is {residual.dtype}, expected the dtype of `x`, {x.dtype}")


@functools.cache
def differentiable_kernel(norm: Norm, dtypes: tuple[str, ...]) -> DifferentiableKernel:
    """Return a normalization of [g, rows, n] as a differentiable kernel. `dtypes` has the dtypes of weight and bias."""

    def saved(inputs: Sequence[jax.Array], outputs: Sequence[jax.Array]) -> Sequence[jax.Array]:
        weight = inputs[1 + norm.residual :][: norm.weight]
        return outputs[1] if norm.residual else inputs[0], *weight, outputs[-1]

    forward_weights = range(1 + norm.residual, 1 + norm.residual + norm.weight + norm.bias)
    return DifferentiableKernel(
        forward=KernelPrimitive(
            functools.partial(reference.forward, norm=norm),
            functools.partial(_forward, norm=norm),
            grouped(shared=forward_weights),
        ),
        backward=KernelPrimitive(
            functools.partial(reference.backward, norm=norm, dtypes=dtypes),
            functools.partial(_backward, norm=norm, dtypes=dtypes),
            grouped(shared=[1] * norm.weight),
        ),
        results=1 + norm.residual,
        saved=saved,
    )


def _flags(norm: Norm) -> dict[str, bool]:
    """Return whether a norm subtracts the mean, and which arrays it has, as constants of the kernels."""
    return {
        "centered": norm.centered,
        "has_residual": norm.residual,
        "has_weight": norm.weight,
        "has_bias": norm.bias,
    }


def _dtype_names(arrays: Sequence[jax.Array]) -> str:
    return " ".join(str(array.dtype) for array in arrays)


def _forward(*arrays: jax.Array, norm: Norm) -> list[jax.Array]:
    from .triton_kernel import norm_forward, norm_forward_pieces

    x, *others = arrays
    groups, group, n = x.shape
    given = iter(others)
    # The kernel does not read a missing array. Its parameter needs some array, so it gets x.
    residual, weight, bias = (next(given) if there else x for there in (norm.residual, norm.weight, norm.bias))
    rows = groups * group
    candidates = candidates_forward(rows, n)
    whole = n <= candidates[0].block
    shared = any(array.shape[0] == 1 for array in others[norm.residual :]) or not (norm.weight or norm.bias)
    flags = {**_flags(norm), "rounded": norm.rounded}

    def launch_parameters(c: NormConfiguration) -> LaunchParameters:
        shape = {"rows": rows, "group": rows if shared else group, "n": n, "block": c.block}
        tile = {"tile": c.tile} if whole else {}
        constants = {**shape, **tile, **flags, "eps": norm.eps, "offset": norm.offset}
        return LaunchParameters((math.ceil(rows / c.tile),), constants, c.warps)

    y, h, statistics = launch_tuned(
        norm_forward if whole else norm_forward_pieces,
        *(x, residual, weight, bias),
        out_types=[
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            jax.ShapeDtypeStruct(x.shape if norm.residual else (1,), x.dtype),
            jax.ShapeDtypeStruct((groups, group, norm.statistics), jnp.float32),
        ],
        candidates=candidates,
        problem={"dtypes": _dtype_names(arrays), "rows": size(rows), "n": size(n), "shared": shared, **flags},
        launch_parameters=launch_parameters,
    )
    return [y, *([h] if norm.residual else []), statistics]


def _backward(*arrays: jax.Array, norm: Norm, dtypes: Sequence[str]) -> list[jax.Array]:
    from .triton_kernel import norm_backward

    given = iter(arrays)
    x = next(given)
    weight = next(given) if norm.weight else x
    statistics, ct = next(given), next(given)
    ct_h = next(given) if norm.residual else x
    groups, group, n = x.shape
    loaded = (2 + norm.residual) * x.dtype.itemsize
    candidates = candidates_backward(group, n, loaded)
    sums = x if n <= candidates[0].block else _row_sums(x, weight, statistics, ct, norm=norm)
    count = norm.weight + norm.bias
    parts = programs(groups, group, n, count > 0)
    flags = {**_flags(norm), "per_group": norm.weight and weight.shape[0] > 1}

    def launch_parameters(c: NormConfiguration) -> LaunchParameters:
        shape = {"group": group, "n": n, "programs": parts, "tile": c.tile, "block": c.block, "stages": c.stages}
        grid = groups * parts, math.ceil(n / c.block)
        return LaunchParameters(grid, {**shape, **flags, "offset": norm.offset}, c.warps)

    grad, partial = launch_tuned(
        norm_backward,
        *(x, weight, statistics, ct, ct_h, sums),
        out_types=[
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            jax.ShapeDtypeStruct((groups, parts, count, n) if count else (1,), jnp.float32),
        ],
        candidates=candidates,
        problem={"dtypes": _dtype_names(arrays), "groups": size(groups), "rows": size(group), "n": size(n), **flags},
        launch_parameters=launch_parameters,
    )
    of_weights = partial.sum(1) if count else partial
    return [
        *([grad] * (1 + norm.residual)),
        *(of_weights[:, i].astype(dtype) for i, dtype in enumerate(dtypes)),
    ]


def _row_sums(x: jax.Array, weight: jax.Array, statistics: jax.Array, ct: jax.Array, *, norm: Norm) -> jax.Array:
    """Return the means over whole rows that the gradient needs where a program takes a block of columns."""
    from .triton_kernel import norm_backward_sums

    groups, group, n = x.shape
    rows = groups * group
    shared = not norm.weight or weight.shape[0] == 1
    flags = {"centered": norm.centered, "has_weight": norm.weight}
    candidates = candidates_sums()

    def launch_parameters(c: NormConfiguration) -> LaunchParameters:
        shape = {"rows": rows, "group": rows if shared else group, "n": n, "block": c.block}
        return LaunchParameters((rows,), {**shape, **flags, "offset": norm.offset}, c.warps)

    (sums,) = launch_tuned(
        norm_backward_sums,
        *(x, weight, statistics, ct),
        out_types=[jax.ShapeDtypeStruct((groups, group, 2), jnp.float32)],
        candidates=candidates,
        problem={"dtypes": _dtype_names((x, weight)), "rows": size(rows), "n": size(n), "shared": shared, **flags},
        launch_parameters=launch_parameters,
    )
    return sums
