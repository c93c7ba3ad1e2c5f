"""Scaled dot-product attention and its gradient: the operators of torch's flash attention for CPUs.

A long sequence is computed in blocks of queries, so that the scores of all queries never exist at once. On CPUs the
blocks are faster too, because the scores of a block stay in the cache. Scores of half-precision inputs are float32.
Several heads of the queries may share one head of the keys.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jtbridge.errors import TranslationError
from jtbridge.lowerings._common import is_below, opmath
from jtbridge.lowerings._registry import register_lowering

# The number of queries in a block, and the number of scores of a pair of heads above which blocks pay off.
_BLOCK, _MANY_SCORES = 128, 512 * 256


@register_lowering("_scaled_dot_product_flash_attention_for_cpu")
def _attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: jax.Array | None = None,
    scale: float | None = None,
) -> tuple[jax.Array, jax.Array]:
    _refuse_dropout(dropout_p)
    groups = key.shape[1]
    scores = functools.partial(_masked_scores, key=key, scale=_score_scale(query, scale), is_causal=is_causal)

    def of_queries(start: jax.Array, q: jax.Array, mask: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        s = scores(start, q, mask)
        top = jnp.max(s, -1, keepdims=True, initial=-jnp.inf)
        p = jnp.exp(s - jnp.where(top == -jnp.inf, 0, top))
        total = jnp.sum(p, -1, keepdims=True)
        # A query whose keys are all masked gets an output of 0 and a logsumexp of 0.
        total, top = jnp.where(total == 0, 1, total), jnp.where(total == 0, 0, top)
        out = _einsum("bhgqk,bhkd->bhgqd", p.astype(value.dtype), value) / total
        return out.astype(query.dtype), (top + jnp.log(total))[..., 0]

    out, logsumexp = _by_blocks(of_queries, _grouped_heads(query, groups), _grouped_mask(attn_mask, groups), key)
    return out.reshape(*query.shape[:-1], value.shape[-1]), logsumexp.reshape(query.shape[:-1])


@register_lowering("_scaled_dot_product_flash_attention_for_cpu_backward")
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
    attn_mask: jax.Array | None = None,
    scale: float | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    _refuse_dropout(dropout_p)
    groups, wide = key.shape[1], opmath(query.dtype)
    factor = _score_scale(query, scale)
    scores = functools.partial(_masked_scores, key=key, scale=factor, is_causal=is_causal)
    delta = jnp.sum(grad_out.astype(wide) * out.astype(wide), -1)

    def of_queries(
        start: jax.Array, rows: tuple[jax.Array, ...], mask: jax.Array | None, sums: tuple[jax.Array, jax.Array]
    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        q, grad, log_total, along = rows
        p = jnp.exp(scores(start, q, mask) - log_total[..., None])
        by_value = _einsum("bhgqk,bhgqd->bhkd", p.astype(grad.dtype), grad)
        by_p = _einsum("bhgqd,bhkd->bhgqk", grad, value)
        by_score = (p * (by_p - along[..., None]) * factor).astype(query.dtype)
        by_query = _einsum("bhgqk,bhkd->bhgqd", by_score, key).astype(query.dtype)
        by_key = _einsum("bhgqk,bhgqd->bhkd", by_score, q)
        return (sums[0] + by_key, sums[1] + by_value), by_query

    rows = tuple(_grouped_heads(x, groups) for x in (query, grad_out, logsumexp.astype(wide), delta))
    sums = jnp.zeros(key.shape, wide), jnp.zeros(value.shape, wide)
    (by_key, by_value), by_query = _summed_by_blocks(of_queries, rows, _grouped_mask(attn_mask, groups), key, sums)
    return by_query.reshape(query.shape), by_key.astype(key.dtype), by_value.astype(value.dtype)


def _refuse_dropout(dropout_p: float) -> None:
    if dropout_p:
        raise TranslationError("flash attention on CPU has no dropout")


def _score_scale(query: jax.Array, scale: float | None) -> float:
    return 1 / math.sqrt(query.shape[-1]) if scale is None else scale


def _einsum(formula: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """Return an einsum that is accumulated and returned in float32 for half-precision arrays."""
    return jnp.einsum(formula, a, b, preferred_element_type=opmath(a.dtype))


def _grouped_heads(x: jax.Array, groups: int) -> jax.Array:
    """Split the heads (dimension 1) into (group, head in group). A group of query heads shares one head of the keys."""
    return x.reshape(x.shape[0], groups, x.shape[1] // groups, *x.shape[2:])


def _grouped_mask(mask: jax.Array | None, groups: int) -> jax.Array | None:
    if mask is None:
        return None
    mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
    return mask[:, :, None] if mask.shape[1] == 1 else _grouped_heads(mask, groups)


def _masked_scores(
    start: jax.Array, q: jax.Array, mask: jax.Array | None, *, key: jax.Array, scale: float, is_causal: bool
) -> jax.Array:
    """Return the masked scores of the queries from index `start` on: (batch, group, head in group, query, key)."""
    s = _einsum("bhgqd,bhkd->bhgqk", q, key)
    s = s * jnp.asarray(scale, s.dtype)
    if mask is not None:
        s = jnp.where(mask, s, -jnp.inf) if mask.dtype == bool else s + mask.astype(s.dtype)
    if is_causal:
        queries = start + jnp.arange(s.shape[-2], dtype=jnp.int32)
        s = jnp.where(jnp.arange(s.shape[-1], dtype=jnp.int32) <= queries[:, None], s, -jnp.inf)
    return s


def _by_blocks(function: Callable[..., Any], query: jax.Array, mask: jax.Array | None, key: jax.Array) -> Any:
    """Apply ``function(start, queries, mask)`` to blocks of queries, and join the results along the queries."""

    def step(start: jax.Array, rows: tuple[jax.Array], mask: jax.Array | None, none: tuple[()]) -> Any:
        return none, function(start, rows[0], mask)

    return _summed_by_blocks(step, (query,), mask, key, ())[1]


def _summed_by_blocks(
    function: Callable[..., Any],
    rows: tuple[jax.Array, ...],
    mask: jax.Array | None,
    key: jax.Array,
    sums: Any,
) -> tuple[Any, Any]:
    """Apply ``function(start, rows, mask, sums)`` -> ``(sums, results)`` to blocks of queries (dimension 3) in turn.

    Return the last sums, and the results joined along the queries. A short sequence is one block.
    """
    length = rows[0].shape[3]
    is_short = is_below(length, _BLOCK + 1) or is_below(length * key.shape[2], _MANY_SCORES + 1)
    if is_short or not isinstance(length, int):  # a symbolic length
        return function(jnp.int32(0), rows, mask, sums)
    blocks = -(-length // _BLOCK)
    starts = jnp.arange(blocks, dtype=jnp.int32) * np.int32(_BLOCK)
    sliced = mask is not None and mask.shape[3] != 1
    taken = (rows, mask) if sliced else (rows, None)

    def step(sums: Any, at: tuple[jax.Array, Any]) -> tuple[Any, Any]:
        start, (block, masked) = at
        return function(start, block, masked if sliced else mask, sums)

    split = jax.tree.map(lambda x: _split_blocks(x, blocks), taken)
    sums, results = lax.scan(step, sums, (starts, split))
    return sums, jax.tree.map(lambda x: _joined_blocks(x, length), results)


def _split_blocks(x: jax.Array, blocks: int) -> jax.Array:
    """Split the queries (dimension 3) into a leading dimension of blocks. The last block is filled with zeros.

    The zeros add nothing to any sum.
    """
    missing = blocks * _BLOCK - x.shape[3]
    x = jnp.pad(x, [(0, missing) if axis == 3 else (0, 0) for axis in range(x.ndim)])
    return jnp.moveaxis(x.reshape(*x.shape[:3], blocks, _BLOCK, *x.shape[4:]), 3, 0)


def _joined_blocks(x: jax.Array, length: int) -> jax.Array:
    x = jnp.moveaxis(x, 0, 3)
    return x.reshape(*x.shape[:3], -1, *x.shape[5:])[:, :, :, :length]
