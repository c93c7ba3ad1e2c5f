"""Attention as a JAX function with derivatives and batching."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal, overload

import jax
import jax.numpy as jnp
import numpy as np

from jtbridge.kernels._shapes import FLOATS, check_floating, check_same_dtype, factor, switch, unsupported_dtype_reason

from . import configurations, reference
from .choice import IMPLEMENTATIONS, Choice, Implementation, cudnn_unsupported_reason, decided
from .differentiable import differentiable_kernel, kernel_or_cudnn
from .reference import AttentionSettings

Window = tuple[int | None, int | None]


def unsupported_reason(query: jax.Array, key: jax.Array, value: jax.Array) -> str | None:
    """Return the reason that the kernels cannot run on these arrays; None if they can.

    The arrays are ``query[b, h, q, d]``, ``key[b, g, k, d]`` and `value`.
    """
    named = {"query": query, "key": key, "value": value}
    for name, x in named.items():
        reason = unsupported_dtype_reason(name, x.dtype, FLOATS) or (
            f"`{name}` has no elements" if 0 in x.shape else None
        )
        if reason:
            return reason
    for name in ("key", "value"):
        if named[name].dtype != query.dtype:
            return f"`{name}` is {named[name].dtype}, `query` is {query.dtype}"
    if key.shape != value.shape:
        return f"`value` has shape {value.shape}, `key` has {key.shape}"
    if query.shape[-1] > configurations.MAX_HEAD_SIZE:
        return f"`query` has heads of {query.shape[-1]}, the kernels take up to {configurations.MAX_HEAD_SIZE}"
    return None


@overload
def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    mask: jax.Array | None = ...,
    is_causal: bool = ...,
    scale: float | None = ...,
    window: Window | None = ...,
    dropout_rate: float = ...,
    dropout_key: jax.Array | None = ...,
    return_logsumexp: Literal[False] = ...,
    implementation: Implementation | None = ...,
) -> jax.Array: ...
@overload
def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    mask: jax.Array | None = ...,
    is_causal: bool = ...,
    scale: float | None = ...,
    window: Window | None = ...,
    dropout_rate: float = ...,
    dropout_key: jax.Array | None = ...,
    return_logsumexp: Literal[True],
    implementation: Implementation | None = ...,
) -> tuple[jax.Array, jax.Array]: ...
def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    mask: jax.Array | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    window: Window | None = None,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    return_logsumexp: bool = False,
    implementation: Implementation | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Compute ``softmax(scale * query @ key.T + mask) @ value``, accumulated in float32, without scores in memory.

    Where the program is lowered for a GPU, Triton kernels or cuDNN compute the forward and the backward. Elsewhere both
    are computed in jnp, with all scores in memory at once. The function is differentiable to any order, also with
    respect to an additive mask. The gradient of a mask has the size of the mask; on a GPU it is computed in jnp, for
    one element of `batch` at a time, and only if it is used. Under `vmap`, the batch axis is folded into `batch`.

    Args:
        query: [batch, heads, q_len, d], float32, bfloat16 or float16. Other floating-point dtypes,
            and `d` over 256, are computed in jnp.
        key: [batch, kv_heads, kv_len, d], like `query`. `heads` is a multiple of `kv_heads`: ``heads / kv_heads``
            consecutive heads of the query share a head of the key.
        value: like `key`. If only its last dimension differs, the function is computed in jnp.
        mask: [batch | 1, heads | 1, q_len | 1, kv_len | 1], leading dimensions may be missing. A boolean mask is True
            where a query sees a key; a floating-point mask is added to the scores.
        is_causal: query `i` sees keys up to `i`, also if `q_len` and `kv_len` differ.
        scale: the factor of the products of queries and keys; None for ``1 / sqrt(d)``.
        window: the number of keys before and the number of keys after its own position that a query sees, each None
            for no limit; None for no window.
        dropout_rate: the probability that a weight is dropped; the others are divided by ``1 - dropout_rate``.
        dropout_key: a JAX key, if there is dropout. Whether a weight is dropped depends on this key and on the weight's
            batch, head, query and key position alone. The same weights are dropped on a GPU and elsewhere, and in the
            forward and the backward.
        return_logsumexp: also return the logarithm of the sum of the exponentials of the scores.
        implementation: the implementation on a GPU. "triton": the kernels. "cudnn": cuDNN as JAX calls it, for bfloat16
            and float16 without a mask, dropout or the logarithm. None: the choice of :func:`chosen_attention`: cuDNN
            for common shapes on Hopper. Without a GPU the argument is checked and has no other effect.

    Returns:
        An array like `query`, with the last dimension of `value`; 0 for a query that sees no key, as in torch. With
        `return_logsumexp` also an array [batch, heads, q_len] of logarithms before dropout, in float32 (float64 for a
        float64 query), 0 for a query that sees no key.

    Raises:
        TypeError: query, key or value is not of a real floating-point dtype, or they have different dtypes; or `scale`
            is not a number, or `is_causal` not a bool, that is known when JAX traces.
        ValueError: shapes do not fit; `mask` is neither boolean nor floating-point; `window` is negative or not a pair;
            `dropout_rate` is not from 0 to 1, or there is no `dropout_key` for it; `implementation` is unknown or
            cannot compute this attention, with the reason.
        BackendError: when the program is lowered: "cudnn" is asked for, and cuDNN or a GPU that it supports is missing.

    Example:
        >>> import jax.numpy as jnp
        >>> from jtbridge.kernels import attention
        >>> x = jnp.arange(8.0).reshape(1, 1, 4, 2)
        >>> attention(0 * x, 0 * x, x, is_causal=True)[0, 0, :, 0].tolist()
        [0.0, 1.0, 2.0, 3.0]

    Source: Dao, FlashAttention-2, arXiv:2307.08691; torch's ``scaled_dot_product_attention``.
    """
    query, key, value = (jnp.asarray(x) for x in (query, key, value))
    _check_attention(query, key, value, dropout_rate, dropout_key)
    arrays = [query, key, value]
    if mask is not None:
        mask = _four_dimensional(jnp.asarray(mask), (*query.shape[:3], key.shape[2]))
        arrays.append(mask)
    if dropout_rate:
        arrays.append(_seeds(dropout_key, query.shape[0]))
    settings = _attention_settings(query, mask, is_causal, scale, window, dropout_rate)
    if settings.scale < 0:  # the kernels take the maximum of the products before they scale it
        arrays[0], settings = -query, dataclasses.replace(settings, scale=-settings.scale)
    kernel_reason, cudnn_reason = _reasons_against(query, key, value, settings, return_logsumexp, implementation)
    if kernel_reason:
        out, logsumexp = reference.forward(*arrays, settings=settings)
    elif implementation != "triton" and not cudnn_reason:
        (out,) = kernel_or_cudnn(settings, implementation)(*arrays)
        return out
    else:
        out, logsumexp = differentiable_kernel(settings)(*arrays)
    return (out, logsumexp) if return_logsumexp else out


def chosen_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    mask: jax.Array | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    window: Window | None = None,
    dropout_rate: float = 0.0,
    return_logsumexp: bool = False,
    implementation: Implementation | None = None,
) -> Choice:
    """Return the implementation that :func:`attention` runs on the GPU of this process, and the reason.

    Without a GPU, the result is the implementation of a program that this process lowers for a GPU.

    Args:
        query: as in :func:`attention`, and so are the other arguments. Only shapes and dtypes of arrays are read.

    Returns:
        ``(implementation, reason)``: "triton", "cudnn", or "jnp" where neither of them applies.

    Raises:
        TypeError: as in :func:`attention`.
        ValueError: `window` is negative or not a pair, or `implementation` cannot compute this attention.
        BackendError: "cudnn" is asked for, and cuDNN or a GPU that it supports is missing.

    Example:
        >>> import jax.numpy as jnp
        >>> from jtbridge.kernels import chosen_attention
        >>> x = jnp.zeros((1, 2, 8, 64))
        >>> chosen_attention(x, x, x, is_causal=True)
        Choice(implementation='triton', reason='cuDNN takes bfloat16 and float16, not float32')
    """
    settings = _attention_settings(query, mask, is_causal, scale, window, dropout_rate)
    settings = dataclasses.replace(settings, scale=abs(settings.scale))
    kernel_reason, cudnn_reason = _reasons_against(query, key, value, settings, return_logsumexp, implementation)
    if kernel_reason:
        return Choice("jnp", kernel_reason)
    if cudnn_reason:
        return Choice("triton", cudnn_reason)
    return decided(query, key, settings, implementation)


def _attention_settings(
    query: jax.Array,
    mask: jax.Array | None,
    is_causal: bool,
    scale: float | None,
    window: Window | None,
    dropout_rate: float,
) -> AttentionSettings:
    kind = "none" if mask is None else "boolean" if mask.dtype == bool else "additive"
    left, right = _window_limits(window, switch("is_causal", is_causal))
    scale = 1 / math.sqrt(max(query.shape[-1], 1)) if scale is None else factor("scale", scale)
    return AttentionSettings(scale, left, right, kind, float(dropout_rate))


def _reasons_against(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    settings: AttentionSettings,
    return_logsumexp: bool,
    implementation: str | None,
) -> tuple[str | None, str | None]:
    """Return why the kernels cannot compute this attention, and why cuDNN cannot; None for each that can.

    Raises:
        ValueError: `implementation` is unknown, or cannot compute this attention.
    """
    if implementation not in (None, *IMPLEMENTATIONS):
        raise ValueError(
            f"`implementation` is {implementation!r}, expected None or one of {', '.join(IMPLEMENTATIONS)}"
        )
    kernel = unsupported_reason(query, key, value)
    cudnn = cudnn_unsupported_reason(query, key, settings, return_logsumexp)
    reason = kernel or (cudnn if implementation == "cudnn" else None)
    if implementation and reason:
        raise ValueError(f"`implementation` is {implementation!r}, which cannot do this: {reason}")
    return kernel, cudnn


def _check_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, dropout_rate: float, dropout_key: jax.Array | None
) -> None:
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.ndim != 4:
            raise ValueError(f"`{name}` has shape {x.shape}, expected [batch, heads, length, head size]")
        check_floating(**{name: x})
    check_same_dtype(query=query, key=key, value=value)
    batch, heads, _, d = query.shape
    if key.shape[0] != batch or key.shape[3] != d:
        raise ValueError(
            f"`key` has shape {key.shape}, expected ({batch}, heads, length, {d}) for `query` of shape {query.shape}"
        )
    if value.shape[:3] != key.shape[:3]:
        raise ValueError(
            f"`value` has shape {value.shape}, expected that of `key`, {key.shape}, except for the last dimension"
        )
    if heads % key.shape[1] if key.shape[1] else heads:
        raise ValueError(f"`query` has {heads} heads, expected a multiple of the {key.shape[1]} heads of `key`")
    if not 0 <= dropout_rate <= 1:
        raise ValueError(f"`dropout_rate` is {dropout_rate}, expected a probability")
    if dropout_rate and dropout_key is None:
        raise ValueError("`dropout_rate` is not 0, so `dropout_key` must be given, such as jax.random.key(0)")


def _four_dimensional(mask: jax.Array, scores: tuple[int, ...]) -> jax.Array:
    fits = mask.ndim <= 4 and all(m in (1, n) for m, n in zip(mask.shape[::-1], scores[::-1], strict=False))
    if not fits:
        raise ValueError(f"`mask` has shape {mask.shape}, expected one that broadcasts to {scores}")
    if mask.dtype != bool and not jnp.issubdtype(mask.dtype, jnp.floating):
        raise ValueError(f"`mask` is {mask.dtype}, expected bool (True: seen) or floating-point numbers to add")
    return mask.reshape((1,) * (4 - mask.ndim) + mask.shape)


def _window_limits(window: Window | None, is_causal: bool) -> Window:
    sides = (None, None) if window is None else window
    if not (isinstance(sides, tuple | list) and len(sides) == 2 and all(map(_is_limit, sides))):
        raise ValueError(f"`window` is {window}, expected two counts, where None means no limit")
    left, right = (None if side is None else int(side) for side in sides)
    return left, 0 if is_causal else right


def _is_limit(side: object) -> bool:
    return side is None or (isinstance(side, int | np.integer) and int(side) >= 0)


def _seeds(key: jax.Array | None, batch: int) -> jax.Array:
    """Return the seeds of :func:`reference.dropout`: for each batch element, both halves of a seed and its index."""
    assert key is not None
    words = jnp.broadcast_to(jax.random.bits(key, (2,), jnp.uint32), (batch, 2))
    return jnp.concatenate([words, jnp.arange(batch, dtype=jnp.uint32)[:, None]], 1)
