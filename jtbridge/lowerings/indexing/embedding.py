"""Embeddings: reads of a table's rows by row number, the gradient of the table, and renormalization of rows.

Row numbers that are out of range, for which torch raises on a CPU, read NaN and write nothing. Clamping the row numbers
instead was not clearly faster on a busy CPU, and has not been timed elsewhere.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jtbridge.lowerings._common import opmath
from jtbridge.lowerings._registry import register_lowering

from ._out_of_range import read_at


@register_lowering("embedding")
def _embedding(
    weight: jax.Array,
    indices: jax.Array,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> jax.Array:
    del padding_idx, scale_grad_by_freq, sparse  # used by the gradient only
    return read_at(weight, (indices,), wrap=False)


@register_lowering("embedding_dense_backward")
def _embedding_dense_backward(
    grad: jax.Array, indices: jax.Array, num_weights: int, padding_idx: int, scale_grad_by_freq: bool
) -> jax.Array:
    rows = indices.reshape(-1)
    return summed_rows(grad.reshape(rows.size, grad.shape[-1]), rows, num_weights, padding_idx, scale_grad_by_freq)


def summed_rows(
    grad: jax.Array, rows: jax.Array, num_weights: int, padding_idx: int, scale_grad_by_freq: bool
) -> jax.Array:
    """Return the gradient of a table from the gradients of the rows that were read."""
    dtype = grad.dtype
    grad = grad.astype(opmath(dtype))
    if scale_grad_by_freq:
        counts = jnp.zeros(num_weights, grad.dtype).at[rows].add(1, mode="drop", wrap_negative_indices=False)
        grad = grad / counts.at[rows].get(mode="clip", wrap_negative_indices=False)[:, None]
    if padding_idx >= 0:
        rows = jnp.where(rows == padding_idx, num_weights, rows)  # out of range, so that the write is dropped
    total = jnp.zeros((num_weights, grad.shape[1]), grad.dtype)
    return total.at[rows].add(grad, mode="drop", wrap_negative_indices=False).astype(dtype)


@register_lowering("embedding_renorm")
def _embedding_renorm(weight: jax.Array, indices: jax.Array, max_norm: float, norm_type: float) -> jax.Array:
    dtype = weight.dtype
    chosen = indices.reshape(-1)
    rows = weight.at[chosen].get(mode="clip", wrap_negative_indices=False).astype(opmath(dtype))
    norm = jnp.linalg.norm(rows, ord=norm_type, axis=1).astype(dtype).astype(rows.dtype)[:, None]
    shrunk = jnp.where(norm > max_norm, rows * (max_norm / (norm + 1e-7)), rows).astype(dtype)
    return weight.at[chosen].set(shrunk, mode="drop", wrap_negative_indices=False)
