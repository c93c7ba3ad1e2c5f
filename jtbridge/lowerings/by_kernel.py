"""Operators by the kernels of `jtbridge.kernels`: what the `triton` backend prefers to the lowerings in JAX.

Each takes what the lowering of the operator takes, and gives ``NotImplemented`` where its kernel does not apply: then
the lowering in JAX is used. A kernel is a JAX primitive, which on other platforms than a GPU is jnp.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from torch import fx

from jtbridge.kernels._operation import Operation
from jtbridge.kernels.attention import op as attention
from jtbridge.kernels.norms import op as norms
from jtbridge.kernels.norms.reference import Norm
from jtbridge.kernels.softmax import op as softmax_kernel

from ._common import out_dtype
from ._registry import Lowering

_BY_KERNEL: dict[str, Lowering] = {}


def find_by_kernel(operator: Any) -> Lowering | None:
    """What computes an operator by a kernel, if anything does."""
    return _BY_KERNEL.get(operator.name())


def _by_kernel(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        for name in names:
            _BY_KERNEL[f"aten::{name}"] = Lowering(function, node=True)
        return function

    return register


def _along_the_last(x: jax.Array, dim: int) -> jax.Array:
    return jnp.moveaxis(x, dim, -1)


@_by_kernel("_softmax", "_log_softmax")
def _softmax(x: jax.Array, dim: int, half_to_float: bool, *, node: fx.Node) -> Any:
    if half_to_float or x.ndim == 0 or softmax_kernel.supports(x):
        return NotImplemented
    operation = softmax_kernel.operation(log="log" in str(node.target))
    (y,) = operation.forward(_along_the_last(x, dim))
    return jnp.moveaxis(y, -1, dim)


@_by_kernel("_softmax_backward_data", "_log_softmax_backward_data")
def _softmax_backward(grad: jax.Array, y: jax.Array, dim: int, input_dtype: Any, *, node: fx.Node) -> Any:
    if y.ndim == 0 or grad.dtype != y.dtype or y.dtype != out_dtype(node) or softmax_kernel.supports(y):
        return NotImplemented
    operation = softmax_kernel.operation(log="log" in str(node.target))
    (by_x,) = operation.backward(_along_the_last(y, dim), _along_the_last(grad, dim))
    return jnp.moveaxis(by_x, -1, dim)


Maybe = jax.Array | None


def _norm(weight: Maybe, bias: Maybe, eps: float, *, centered: bool) -> Norm:
    return Norm(centered, float(eps), 0.0, False, weight is not None, bias is not None)


def _refused(x: jax.Array, normalized_shape: Sequence[int], weight: Maybe, bias: Maybe) -> bool:
    """Whether the kernels do not apply: they take the last dimension alone, here with weights of the dtype of x."""
    if len(normalized_shape) != 1 or any(w is not None and w.dtype != x.dtype for w in (weight, bias)):
        return True
    return norms.supports(x, weight, bias, None) is not None


def _rows(x: jax.Array) -> jax.Array:
    return x.reshape(1, math.prod(x.shape[:-1]), x.shape[-1])


def _normalized(x: jax.Array, weight: Maybe, bias: Maybe, norm: Norm) -> tuple[jax.Array, jax.Array]:
    """The result, and its statistics [..., 1 or 2]."""
    given = [w[None] for w in (weight, bias) if w is not None]
    y, statistics = norms.operation(norm, tuple(str(w.dtype) for w in given)).forward(_rows(x), *given)
    return y.reshape(x.shape), statistics.reshape(*x.shape[:-1], -1)


def _norm_gradients(
    grad: jax.Array, x: jax.Array, statistics: jax.Array, weight: Maybe, norm: Norm, output_mask: Sequence[bool]
) -> tuple[Maybe, ...]:
    """By x, by the weight and by the bias, those of them that are asked for."""
    dtypes = tuple(str(x.dtype) for _ in range(norm.weight + norm.bias))
    given = [] if weight is None else [weight[None]]
    saved = [_rows(x), *given, statistics.reshape(1, -1, norm.statistics)]
    by_x, *sums = norms.operation(norm, dtypes).backward(*saved, _rows(grad))
    found = [by_x.reshape(x.shape), *(s[0] for s in sums), None, None]
    if norm.bias and not norm.weight:
        found.insert(1, None)
    return tuple(g if wanted else None for g, wanted in zip(found, output_mask, strict=False))


@_by_kernel("native_layer_norm")
def _layer_norm(
    x: jax.Array, normalized_shape: Sequence[int], weight: Maybe, bias: Maybe, eps: float, *, node: fx.Node
) -> Any:
    if _refused(x, normalized_shape, weight, bias) or out_dtype(node, 1) != np.float32:
        return NotImplemented
    y, statistics = _normalized(x, weight, bias, _norm(weight, bias, eps, centered=True))
    return y, statistics[..., 1:], statistics[..., :1]


@_by_kernel("native_layer_norm_backward")
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
    if absent or mean.dtype != np.float32 or grad.dtype != x.dtype or _refused(x, normalized_shape, weight, bias):
        return NotImplemented
    statistics = jnp.concatenate([rstd, mean], -1)
    return _norm_gradients(grad, x, statistics, weight, _norm(weight, bias, 0.0, centered=True), output_mask)


@_by_kernel("_fused_rms_norm")
def _rms_norm(x: jax.Array, normalized_shape: Sequence[int], weight: Maybe, eps: float | None, *, node: fx.Node) -> Any:
    if eps is None or _refused(x, normalized_shape, weight, None) or out_dtype(node, 1) != np.float32:
        return NotImplemented
    return _normalized(x, weight, None, _norm(weight, None, eps, centered=False))


@_by_kernel("_fused_rms_norm_backward")
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
    if absent or rstd.dtype != np.float32 or grad.dtype != x.dtype or _refused(x, normalized_shape, weight, None):
        return NotImplemented
    norm = _norm(weight, None, 0.0, centered=False)
    return _norm_gradients(grad, x, rstd, weight, norm, output_mask)[:2]


def _attended(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    dropout_p: float,
    is_causal: bool,
    mask: Maybe,
    scale: float | None,
) -> tuple[Operation, list[jax.Array]] | None:
    """The operation that attention is, and its arrays; None where its kernels do not apply."""
    factor = 1 / math.sqrt(max(query.shape[-1], 1)) if scale is None else scale
    if dropout_p or factor <= 0 or attention.supports(query, key, value):
        return None
    arrays = [query, key, value]
    kind = "none"
    if mask is not None:
        kind = "boolean" if mask.dtype == bool else "additive"
        arrays.append(mask.reshape((1,) * (4 - mask.ndim) + mask.shape))
    settings = attention.Settings(factor, None, 0 if is_causal else None, kind, 0.0)
    return attention.operation(settings), arrays


@_by_kernel("_scaled_dot_product_flash_attention_for_cpu")
def _attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Maybe = None,
    scale: float | None = None,
    node: fx.Node,
) -> Any:
    found = _attended(query, key, value, dropout_p, is_causal, attn_mask, scale)
    if found is None or out_dtype(node, 1) != np.float32:
        return NotImplemented
    operation, arrays = found
    return tuple(operation.forward(*arrays))


@_by_kernel("_scaled_dot_product_flash_attention_for_cpu_backward")
def _attention_backward(
    grad_out: jax.Array,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    out: jax.Array,
    logsumexp: jax.Array,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Maybe = None,
    scale: float | None = None,
    node: fx.Node,
) -> Any:
    del node
    found = _attended(query, key, value, dropout_p, is_causal, attn_mask, scale)
    if found is None or logsumexp.dtype != np.float32:
        return NotImplemented
    operation, arrays = found
    return tuple(operation.backward(*arrays, out, logsumexp, grad_out, jnp.zeros_like(logsumexp))[:3])
