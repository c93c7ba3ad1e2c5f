"""Lowerings of layer and root mean square normalization to the kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from torch import fx

from jtbridge.lowerings._common import out_dtype
from jtbridge.lowerings._registry import register_lowering

from . import op as norms
from .reference import Norm

Maybe = jax.Array | None


def _norm_settings(weight: Maybe, bias: Maybe, eps: float, *, centered: bool) -> Norm:
    return Norm(centered, float(eps), 0.0, False, weight is not None, bias is not None)


def _is_refused(x: jax.Array, normalized_shape: Sequence[int], weight: Maybe, bias: Maybe) -> bool:
    """Return whether the kernels refuse the arguments. They normalize the last dimension only."""
    return len(normalized_shape) != 1 or norms.unsupported_reason(x, weight, bias, None) is not None


def _is_rms_refused(x: jax.Array, normalized_shape: Sequence[int], weight: Maybe) -> bool:
    """Return whether the kernels refuse the arguments of an RMS norm.

    If x and the weight have different dtypes, torch's result may have a third dtype. The kernels' result has that of x.
    """
    return _is_refused(x, normalized_shape, weight, None) or (weight is not None and weight.dtype != x.dtype)


def _as_rows(x: jax.Array) -> jax.Array:
    return x.reshape(1, math.prod(x.shape[:-1]), x.shape[-1])


def _normalized_by_kernel(x: jax.Array, weight: Maybe, bias: Maybe, norm: Norm) -> tuple[jax.Array, jax.Array]:
    """Return the result of the kernel, and its statistics [..., 1 or 2]."""
    given = [w[None] for w in (weight, bias) if w is not None]
    y, statistics = norms.differentiable_kernel(norm, tuple(str(w.dtype) for w in given)).forward(_as_rows(x), *given)
    return y.reshape(x.shape), statistics.reshape(*x.shape[:-1], -1)


def _norm_gradients(
    grad: jax.Array,
    x: jax.Array,
    statistics: jax.Array,
    weight: Maybe,
    norm: Norm,
    output_mask: Sequence[bool],
    bias: Maybe = None,
) -> tuple[Maybe, ...]:
    """Return the gradients of x, the weight and the bias, with None for each that `output_mask` does not ask for."""
    dtypes = tuple(str(w.dtype) for w in (weight, bias) if w is not None)
    given = [] if weight is None else [weight[None]]
    saved = [_as_rows(x), *given, statistics.reshape(1, -1, norm.statistics)]
    by_x, *sums = norms.differentiable_kernel(norm, dtypes).backward(*saved, _as_rows(grad))
    found = [by_x.reshape(x.shape), *(s[0] for s in sums), None, None]
    if norm.bias and not norm.weight:
        found.insert(1, None)
    return tuple(g if wanted else None for g, wanted in zip(found, output_mask, strict=False))


@register_lowering("native_layer_norm", node=True, kernel=True)
def _layer_norm(
    x: jax.Array, normalized_shape: Sequence[int], weight: Maybe, bias: Maybe, eps: float, *, node: fx.Node
) -> Any:
    if _is_refused(x, normalized_shape, weight, bias) or out_dtype(node, 1) != np.float32:
        return NotImplemented
    y, statistics = _normalized_by_kernel(x, weight, bias, _norm_settings(weight, bias, eps, centered=True))
    return y, statistics[..., 1:], statistics[..., :1]


@register_lowering("native_layer_norm_backward", node=True, kernel=True)
def _layer_norm_backward(
    grad: jax.Array,
    x: jax.Array,
    normalized_shape: Sequence[int],
    mean: jax.Array,
    rstd: jax.Array,
    weight: Maybe,
    bias: Maybe,
    output_mask: Sequence[bool],
    *,
    node: fx.Node,
) -> Any:
    del node
    absent = (output_mask[1] and weight is None) or (output_mask[2] and bias is None)
    if absent or mean.dtype != np.float32 or grad.dtype != x.dtype or _is_refused(x, normalized_shape, weight, bias):
        return NotImplemented
    statistics = jnp.concatenate([rstd, mean], -1)
    return _norm_gradients(
        grad, x, statistics, weight, _norm_settings(weight, bias, 0.0, centered=True), output_mask, bias
    )


@register_lowering("_fused_rms_norm", node=True, kernel=True)
def _rms_norm(x: jax.Array, normalized_shape: Sequence[int], weight: Maybe, eps: float | None, *, node: fx.Node) -> Any:
    if eps is None or _is_rms_refused(x, normalized_shape, weight) or out_dtype(node, 1) != np.float32:
        return NotImplemented
    return _normalized_by_kernel(x, weight, None, _norm_settings(weight, None, eps, centered=False))


@register_lowering("_fused_rms_norm_backward", node=True, kernel=True)
def _rms_norm_backward(
    grad: jax.Array,
    x: jax.Array,
    normalized_shape: Sequence[int],
    rstd: jax.Array,
    weight: Maybe,
    output_mask: Sequence[bool],
    *,
    node: fx.Node,
) -> Any:
    del node
    absent = output_mask[1] and weight is None
    if absent or rstd.dtype != np.float32 or grad.dtype != x.dtype or _is_rms_refused(x, normalized_shape, weight):
        return NotImplemented
    norm = _norm_settings(weight, None, 0.0, centered=False)
    return _norm_gradients(grad, x, rstd, weight, norm, output_mask)[:2]


def _weighed(x: jax.Array, weight: jax.Array) -> bool:
    return weight.dtype == x.dtype and not norms.unsupported_reason(x, weight)


@register_lowering("jtbridge::rms_norm", node=True, kernel=True)
def _scaled_rms_norm(
    x: jax.Array, weight: jax.Array, eps: float, offset: float, rounded: bool, factor_is_x: bool, *, node: fx.Node
) -> Any:
    del node, factor_is_x
    if not _weighed(x, weight):
        return NotImplemented
    return _normalized_by_kernel(x, weight, None, Norm(False, eps, offset, False, True, False, rounded))


@register_lowering("jtbridge::rms_norm_backward", node=True, kernel=True)
def _scaled_rms_norm_backward(
    grad: jax.Array,
    x: jax.Array,
    weight: jax.Array,
    rstd: jax.Array,
    eps: float,
    offset: float,
    rounded: bool,
    factor_is_x: bool,
    *,
    node: fx.Node,
) -> Any:
    """Return the gradients. The kernel rounds once, where torch's operators in half precision round after each step."""
    del node, rounded, factor_is_x
    if not _weighed(x, weight) or grad.dtype != x.dtype:
        return NotImplemented
    return _norm_gradients(grad, x, rstd, weight, Norm(False, eps, offset, False, True, False), (True, True))[:2]


@register_lowering("jtbridge::unscaled_rms_norm", node=True, kernel=True)
def _unscaled_rms_norm(x: jax.Array, eps: float, *, node: fx.Node) -> Any:
    del node
    return (
        NotImplemented
        if norms.unsupported_reason(x)
        else _normalized_by_kernel(x, None, None, _norm_settings(None, None, eps, centered=False))
    )


@register_lowering("jtbridge::unscaled_rms_norm_backward", node=True, kernel=True)
def _unscaled_rms_norm_backward(grad: jax.Array, x: jax.Array, rstd: jax.Array, eps: float, *, node: fx.Node) -> Any:
    del node
    if norms.unsupported_reason(x) or grad.dtype != x.dtype:
        return NotImplemented
    return _norm_gradients(grad, x, rstd, None, _norm_settings(None, None, eps, centered=False), (True,))[0]


@register_lowering("jtbridge::centered_norm", node=True, kernel=True)
def _centered_norm(x: jax.Array, weight: jax.Array, eps: float, *, node: fx.Node) -> Any:
    del node
    if not _weighed(x, weight):
        return NotImplemented
    y, statistics = _normalized_by_kernel(x, weight, None, _norm_settings(weight, None, eps, centered=True))
    return y, statistics[..., :1], statistics[..., 1:]


@register_lowering("jtbridge::centered_norm_backward", node=True, kernel=True)
def _centered_norm_backward(
    grad: jax.Array, x: jax.Array, weight: jax.Array, rstd: jax.Array, mean: jax.Array, eps: float, *, node: fx.Node
) -> Any:
    del node
    if not _weighed(x, weight) or grad.dtype != x.dtype:
        return NotImplemented
    statistics = jnp.concatenate([rstd, mean], -1)
    return _norm_gradients(grad, x, statistics, weight, _norm_settings(weight, None, eps, centered=True), (True, True))[
        :2
    ]
