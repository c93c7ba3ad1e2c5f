"""Attention in jnp, with all scores in memory at once, and the settings and dropout that the kernels share with it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from jtbridge.core.positions import replaced

from .philox import philox


@dataclasses.dataclass(frozen=True)
class AttentionSettings:
    """The static options of attention.

    Args:
        scale: the factor of the products of queries and keys.
        left: the number of keys before its own position that a query sees; None: all.
        right: the number of keys after its own position that a query sees; None: all.
        mask: the kind of mask among the arrays.
        dropout_rate: the probability that a weight is dropped. If it is not 0, there are seeds among the arrays.
    """

    scale: float
    left: int | None
    right: int | None
    mask: Literal["none", "boolean", "additive"]
    dropout_rate: float

    @property
    def threshold(self) -> int:
        """The threshold of dropout: a weight is dropped if its 32 random bits are below this number."""
        return min(round(self.dropout_rate * 2**32), 2**32 - 1)

    @property
    def boost(self) -> float:
        """The factor of the weights that dropout keeps."""
        return 1 / (1 - self.dropout_rate) if self.dropout_rate < 1 else 0.0

    def split(self, arrays: Sequence[jax.Array]) -> tuple[list[jax.Array], jax.Array | None, jax.Array | None]:
        """Split the arrays into query, key and value; the mask; and the seeds."""
        rest = iter(arrays[3:])
        mask = None if self.mask == "none" else next(rest)
        return list(arrays[:3]), mask, next(rest) if self.dropout_rate else None


def forward(*arrays: jax.Array, settings: AttentionSettings) -> tuple[jax.Array, jax.Array]:
    """Return the output, and the logarithm of the sum of the exponentials of the scores.

    Both are computed in float32, or float64 for float64. The output is rounded once; the logarithm is not rounded.

    Args:
        arrays: query [batch, heads, q_len, d]; key and value [batch, kv_heads, kv_len, d]; then, if there is one, a
            mask [batch | 1, heads | 1, q_len | 1, kv_len | 1]; then, if there is dropout, seeds [batch, 3].
        settings: the static options.
    """
    (query, key, value), mask, seeds = settings.split(arrays)
    batch, heads, q_len, d = query.shape
    groups, kv_len = key.shape[1:3]
    shared_by = heads // max(groups, 1)
    wide = query.dtype if query.dtype.itemsize > 4 else jnp.dtype(jnp.float32)
    grouped = query.astype(wide).reshape(batch, groups, shared_by, q_len, d)
    scores = jnp.einsum("bgnqd,bgkd->bgnqk", grouped, key.astype(wide)).reshape(batch, heads, q_len, kv_len)
    scores = scores * jnp.asarray(settings.scale, wide)
    if mask is not None:
        scores = jnp.where(mask, scores, -jnp.inf) if settings.mask == "boolean" else scores + mask.astype(wide)
    seen = _in_window(q_len, kv_len, settings)
    if seen is not None:
        scores = jnp.where(seen, scores, -jnp.inf)

    # A query that sees no key gets 0 as its output and as its logarithm.
    top = jax.lax.stop_gradient(scores.max(-1, keepdims=True, initial=-jnp.inf))
    top = jnp.where(top == -jnp.inf, 0, top)
    e = jnp.exp(scores - top)
    total = e.sum(-1, keepdims=True)
    some = total != 0  # also True for NaN, which must reach the result
    total = jnp.where(some, total, 1)
    logsumexp = jnp.where(some, top + jnp.log(total), 0)[..., 0]
    weights = e / total
    if seeds is not None:
        kept = dropout(seeds, heads, q_len, kv_len, settings.threshold)
        weights = jnp.where(kept, weights * jnp.asarray(settings.boost, wide), 0)
    grouped = weights.reshape(batch, groups, shared_by, q_len, kv_len)
    out = jnp.einsum("bgnqk,bgkd->bgnqd", grouped, value.astype(wide))
    return out.reshape(batch, heads, q_len, value.shape[-1]).astype(query.dtype), logsumexp


def backward(*arrays: jax.Array, settings: AttentionSettings) -> tuple[jax.Array, ...]:
    """Return the gradients of the floating-point arrays, given the arguments, results and cotangents of `forward`."""
    inputs, (_, _, ct, ct_logsumexp) = list(arrays[:-4]), arrays[-4:]
    floating = [i for i, x in enumerate(inputs) if jnp.issubdtype(x.dtype, jnp.floating)]

    def of_floating(*xs: jax.Array) -> tuple[jax.Array, jax.Array]:
        return forward(*replaced(inputs, floating, xs), settings=settings)

    return jax.vjp(of_floating, *(inputs[i] for i in floating))[1]((ct, ct_logsumexp))


def dropout(seeds: jax.Array, heads: int, q_len: int, kv_len: int, threshold: int) -> jax.Array:
    """Return which weights [batch, heads, q_len, kv_len] dropout keeps.

    A weight is kept if its random bits are not below `threshold`.

    Args:
        seeds: uint32 [batch, 3]: both halves of the seed, and the last word of the counter.
    """

    def words(n: int, axis: int) -> jax.Array:
        return jax.lax.broadcasted_iota(jnp.uint32, tuple(n if i == axis else 1 for i in range(4)), axis)

    low, high, stream = (seeds[:, i, None, None, None] for i in range(3))
    bits, _, _, _ = philox((low, high), words(kv_len, 3), words(q_len, 2), words(heads, 1), stream)
    return bits >= np.uint32(threshold)


def mask_gradient(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array,
    seeds: jax.Array | None,
    ct: jax.Array,
    logsumexp: jax.Array,
    delta: jax.Array,
    *,
    settings: AttentionSettings,
) -> jax.Array:
    """Return the gradient of an additive mask. Only the scores of one batch element are in memory at a time.

    `ct` is the cotangent of the output, and `delta` is ``sum(output * ct, -1)`` less the cotangent of the logarithm.
    """
    _, heads, q_len, _ = query.shape
    groups, kv_len = key.shape[1:3]
    seen = _in_window(q_len, kv_len, settings)

    def products(x: jax.Array, y: jax.Array) -> jax.Array:
        grouped = x.reshape(groups, heads // groups, q_len, -1)
        # The highest matmul precision, to be as exact as the kernels: weights are exponentials of these products.
        found = jnp.einsum(
            "gnqd,gkd->gnqk", grouped, y, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32
        )
        return found.reshape(heads, q_len, kv_len)

    def of_batch(i: jax.Array) -> jax.Array:
        bias = mask[i if mask.shape[0] > 1 else 0]
        scores = products(query[i], key[i]) * jnp.float32(settings.scale) + bias.astype(jnp.float32)
        weights = jnp.exp(jnp.minimum(scores - logsumexp[i, ..., None], 0))
        weights = weights if seen is None else jnp.where(seen, weights, 0)
        along = products(ct[i], value[i])
        if seeds is not None:
            kept = dropout(seeds[i][None], heads, q_len, kv_len, settings.threshold)[0]
            along = jnp.where(kept, along * jnp.float32(settings.boost), 0)
        grad = weights * (along - delta[i, ..., None])
        return grad.sum([axis for axis in range(3) if bias.shape[axis] == 1], keepdims=True)

    every = jnp.arange(query.shape[0])
    if mask.shape[0] > 1:
        return jax.lax.map(of_batch, every).astype(mask.dtype)
    total, _ = jax.lax.scan(lambda sum_, i: (sum_ + of_batch(i), None), jnp.zeros(mask.shape[1:], jnp.float32), every)
    return total[None].astype(mask.dtype)


def _in_window(q_len: int, kv_len: int, settings: AttentionSettings) -> jax.Array | None:
    """Return which keys are in the window of each query, as booleans [q_len, kv_len]; None if all are."""
    if settings.left is None and settings.right is None:
        return None
    ahead = jnp.arange(kv_len)[None, :] - jnp.arange(q_len)[:, None]
    seen = jnp.ones((q_len, kv_len), bool)
    if settings.left is not None:
        seen &= ahead >= -settings.left
    if settings.right is not None:
        seen &= ahead <= settings.right
    return seen
