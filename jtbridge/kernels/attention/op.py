"""Attention as a JAX function with derivatives and batching."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp

from jtbridge.kernels._chip import target
from jtbridge.kernels._operation import Operation
from jtbridge.kernels._shapes import FLOATS, unsupported_dtype
from jtbridge.kernels._step import Fold, Step
from jtbridge.kernels._tuning import Arrangement, launch_tuned, size

from . import configurations, reference
from .reference import Settings

Window = tuple[int | None, int | None]


def supports(query: jax.Array, key: jax.Array, value: jax.Array) -> str | None:
    """Why the kernels cannot run on ``query[b, h, q, d]``, ``key[b, g, k, d]`` and `value`; None if they can."""
    named = {"query": query, "key": key, "value": value}
    for name, x in named.items():
        reason = unsupported_dtype(name, x.dtype, FLOATS) or (f"`{name}` has no elements" if 0 in x.shape else None)
        if reason:
            return reason
    for name in ("key", "value"):
        if named[name].dtype != query.dtype:
            return f"`{name}` is {named[name].dtype}, `query` is {query.dtype}"
    if key.shape != value.shape:
        return f"`value` has shape {value.shape}, `key` has {key.shape}"
    if query.shape[-1] > configurations.LARGEST_HEAD:
        return f"`query` has heads of {query.shape[-1]}, the kernels take up to {configurations.LARGEST_HEAD}"
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
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """``softmax(scale * query @ key.T + mask) @ value``, accumulated in float32, without the scores in memory.

    By Triton kernels, forward and backward, where the program is lowered for a GPU; in jnp elsewhere, where all scores
    are there at once. Differentiable to any order, also by an additive mask, whose gradient is as large as itself and
    is computed in jnp, one batch after the other, if it is asked for. A batch of attentions is folded into `batch`.

    Args:
        query: [batch, heads, q_len, d], float32, bfloat16 or float16. Other dtypes, and `d` over 256, take jnp's way.
        key: [batch, kv_heads, kv_len, d], like `query`. `heads` is a multiple of `kv_heads`: as many heads of the
            query in a row share one of the key.
        value: like `key`.
        mask: [batch | 1, heads | 1, q_len | 1, kv_len | 1], leading dimensions may be missing. Boolean: True where a
            query sees a key. Or floating-point, added to the scores.
        is_causal: query `i` sees keys up to `i`, also if `q_len` and `kv_len` differ.
        scale: what the products are multiplied with; ``1 / sqrt(d)`` if it is None.
        window: how many keys before and behind its own position a query sees; None for no limit.
        dropout_rate: how likely a weight is dropped; the others are divided by ``1 - dropout_rate``.
        dropout_key: a JAX key, if there is dropout. Which weights are dropped is a function of the key, the batch, the
            head, the query and the key's position, the same on a GPU and elsewhere, forward and backward.
        return_logsumexp: also return the logarithm of the sum of the exponentials of the scores.

    Returns:
        An array like `query`; 0 for a query that sees no key, as in torch. With `return_logsumexp` also float32
        [batch, heads, q_len], before dropout, 0 for a query that sees no key.

    Raises:
        ValueError: shapes do not fit, `window` is negative, `dropout_rate` is not from 0 to 1 or lacks a key.

    Example:
        >>> import jax.numpy as jnp
        >>> from jtbridge.kernels import attention
        >>> x = jnp.arange(8.0).reshape(1, 1, 4, 2)
        >>> attention(0 * x, 0 * x, x, is_causal=True)[0, 0, :, 0].tolist()
        [0.0, 1.0, 2.0, 3.0]

    Source: Dao, FlashAttention-2, arXiv:2307.08691; torch's ``scaled_dot_product_attention``.
    """
    query, key, value = (jnp.asarray(x) for x in (query, key, value))
    _check(query, key, value, dropout_rate, dropout_key)
    arrays = [query, key, value]
    kind = "none"
    if mask is not None:
        mask = _four_dimensional(jnp.asarray(mask), (*query.shape[:3], key.shape[2]))
        kind = "boolean" if mask.dtype == bool else "additive"
        arrays.append(mask)
    if dropout_rate:
        arrays.append(_seeds(dropout_key, query.shape[0]))
    left, right = _window(window, is_causal)
    factor = 1 / math.sqrt(max(query.shape[-1], 1)) if scale is None else float(scale)
    if factor < 0:  # the kernels look for the largest product, not for the smallest
        arrays[0], factor = -query, -factor
    settings = Settings(factor, left, right, kind, float(dropout_rate))
    if supports(query, key, value):
        out, logsumexp = reference.forward(*arrays, settings=settings)
    else:
        out, logsumexp = operation(settings)(*arrays)
    return (out, logsumexp) if return_logsumexp else out


def _check(
    query: jax.Array, key: jax.Array, value: jax.Array, dropout_rate: float, dropout_key: jax.Array | None
) -> None:
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.ndim != 4:
            raise ValueError(f"`{name}` has shape {x.shape}, expected [batch, heads, length, head size]")
    batch, heads, _, d = query.shape
    if key.shape[0] != batch or key.shape[3] != d:
        raise ValueError(f"`key` has shape {key.shape}, which does not fit `query` of shape {query.shape}")
    if value.shape[:3] != key.shape[:3]:
        raise ValueError(f"`value` has shape {value.shape}, which does not fit `key` of shape {key.shape}")
    if heads % max(key.shape[1], 1):
        raise ValueError(f"`query` has {heads} heads, which is no multiple of the {key.shape[1]} of `key`")
    if not 0 <= dropout_rate <= 1:
        raise ValueError(f"`dropout_rate` is {dropout_rate}, expected a probability")
    if dropout_rate and dropout_key is None:
        raise ValueError("`dropout_rate` is not 0, so `dropout_key` must be given: a JAX key, as of jax.random.key")


def _four_dimensional(mask: jax.Array, scores: tuple[int, ...]) -> jax.Array:
    fits = mask.ndim <= 4 and all(m in (1, n) for m, n in zip(mask.shape[::-1], scores[::-1], strict=False))
    if not fits:
        raise ValueError(f"`mask` has shape {mask.shape}, expected one that broadcasts to {scores}")
    if mask.dtype != bool and not jnp.issubdtype(mask.dtype, jnp.floating):
        raise ValueError(f"`mask` is {mask.dtype}, expected bool (True: seen) or floating-point numbers to add")
    return mask.reshape((1,) * (4 - mask.ndim) + mask.shape)


def _window(window: Window | None, is_causal: bool) -> Window:
    left, right = (None, None) if window is None else window
    if any(side is not None and side < 0 for side in (left, right)):
        raise ValueError(f"`window` is {window}, expected two counts, or None where there is no limit")
    return left, 0 if is_causal else right


def _seeds(key: jax.Array | None, batch: int) -> jax.Array:
    """For each of a batch the two halves of a seed, and its number: what :func:`reference.dropout` takes."""
    assert key is not None
    words = jnp.broadcast_to(jax.random.bits(key, (2,), jnp.uint32), (batch, 2))
    return jnp.concatenate([words, jnp.arange(batch, dtype=jnp.uint32)[:, None]], 1)


@functools.lru_cache(256)
def operation(settings: Settings) -> Operation:
    def step(of_reference: Any, kernels: Any, gradient: bool) -> Step:
        keywords = {"settings": settings}
        return Step(
            functools.partial(of_reference, **keywords),
            functools.partial(kernels, **keywords),
            _fold(settings, gradient),
        )

    return Operation(
        forward=step(reference.forward, _forward, gradient=False),
        backward=step(reference.backward, _backward, gradient=True),
        results=2,
        saved=lambda inputs, outputs: [*inputs, *outputs],
    )


def _fold(settings: Settings, gradient: bool) -> Fold:
    """A batch of steps as a step whose batch is longer. All arrays have the batch first, a mask perhaps 1 for it."""
    of_mask = 3 if settings.mask != "none" else None
    # Its gradient must be one for each of the batch.
    expanded = settings.mask == "additive" and gradient

    def fold(step: Step, batched: Sequence[bool], arrays: Sequence[jax.Array]) -> Sequence[jax.Array]:
        size = next(x.shape[0] for b, x in zip(batched, arrays, strict=True) if b)
        batch = arrays[0].shape[1 if batched[0] else 0]

        def folded(i: int, x: jax.Array) -> jax.Array:
            if i == of_mask and not batched[i] and x.shape[0] == 1 and not expanded:
                return x
            inner = x.shape[1:] if not batched[i] else x.shape[2:]
            whole = jnp.broadcast_to(x if batched[i] else x[None], (size, batch, *inner))
            return whole.reshape(size * batch, *inner)

        results = [y.reshape(size, batch, *y.shape[1:]) for y in step(*(folded(i, x) for i, x in enumerate(arrays)))]
        if expanded and arrays[3].shape[1 if batched[3] else 0] == 1:
            results[3] = results[3].sum(1, keepdims=True)
        return results

    return fold


def _forward(*arrays: jax.Array, settings: Settings) -> list[jax.Array]:
    from .triton_forward import attention_forward

    query = arrays[0]
    return _launched(
        attention_forward,
        arrays,
        [],
        [query, jax.ShapeDtypeStruct(query.shape[:3], jnp.float32)],
        settings,
        configurations.FORWARD,
        by_keys=False,
    )


def _backward(*arrays: jax.Array, settings: Settings) -> list[jax.Array]:
    from .triton_backward import attention_backward_key_value, attention_backward_query

    inputs, (out, logsumexp, ct, ct_logsumexp) = arrays[:-4], arrays[-4:]
    (query, key, value), mask, seeds = settings.split(inputs)
    # The scores' derivative is weights * (ct @ value.T - delta); that of their logsumexp is the weights.
    delta = jnp.sum(out.astype(jnp.float32) * ct.astype(jnp.float32), -1) - ct_logsumexp
    more = [ct, logsumexp * jnp.float32(math.log2(math.e)), delta]
    grad_key, grad_value = _launched(
        attention_backward_key_value,
        inputs,
        more,
        [key, value],
        settings,
        configurations.BACKWARD_KEY_VALUE,
        by_keys=True,
    )
    (grad_query,) = _launched(
        attention_backward_query,
        inputs,
        more,
        [query],
        settings,
        configurations.BACKWARD_QUERY,
        by_keys=False,
    )
    gradients = [grad_query, grad_key, grad_value]
    if mask is not None and settings.mask == "additive":
        # Nothing of it is left in the program where it is not asked for.
        gradients.append(
            reference.mask_gradient(query, key, value, mask, seeds, ct, logsumexp, delta, settings=settings)
        )
    return gradients


def _launched(
    kernel: Any,
    inputs: Sequence[jax.Array],
    more: Sequence[jax.Array],
    like: Sequence[Any],
    settings: Settings,
    table: configurations.Table,
    *,
    by_keys: bool,
) -> list[jax.Array]:
    (query, key, value), mask, seeds = settings.split(inputs)
    batch, heads, q_len, d = query.shape
    kv_heads, kv_len = key.shape[1:3]
    block_d = configurations.padded(d)
    entry = block_d, query.dtype.itemsize
    # A kernel without a mask or dropout does not read what is in their place.
    absent = query
    strides = (0, 0, 0, 0) if mask is None else _strides(mask.shape)
    constants = {
        "heads": heads,
        "kv_heads": kv_heads,
        "q_len": q_len,
        "kv_len": kv_len,
        "d": d,
        "scale": settings.scale,
        "left": q_len if settings.left is None else min(settings.left, q_len),
        "right": kv_len if settings.right is None else min(settings.right, kv_len),
        "mask": settings.mask,
        **dict(zip(("mask_batch", "mask_head", "mask_row", "mask_column"), strides, strict=True)),
        "threshold": settings.threshold,
        "boost": settings.boost,
        # The accuracy of float32 from tensor cores: three products of their 19 bits.
        "precision": "tf32x3" if query.dtype == jnp.float32 else "tf32",
        "block_d": block_d,
    }

    def arranged(c: configurations.Configuration) -> Arrangement:
        blocks = kv_heads * -(-kv_len // c.keys) if by_keys else heads * -(-q_len // c.queries)
        return Arrangement((batch * blocks,), {**constants, "block_q": c.queries, "block_k": c.keys}, c.warps, c.stages)

    return launch_tuned(
        kernel,
        query,
        key,
        value,
        absent if mask is None else mask,
        absent if seeds is None else seeds,
        *more,
        out_types=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in like],
        candidates=table[entry],
        default=configurations.default(table, entry, target()),
        problem={
            "dtype": str(query.dtype),
            "programs": size(batch * heads),
            "shared_by": heads // kv_heads,
            "q_len": size(q_len),
            "kv_len": size(kv_len),
            "head_size": block_d,
            "left": None if settings.left is None else size(settings.left),
            "right": None if settings.right is None else size(settings.right),
            "mask": settings.mask,
            "dropout": settings.dropout_rate > 0,
        },
        arranged=arranged,
    )


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """How far apart elements are along each dimension; 0 along those that are broadcast."""
    return tuple(0 if n == 1 else math.prod(shape[i + 1 :]) for i, n in enumerate(shape))
