"""Sums, means and maxima over bags of rows of a table.

A bag is a run of row numbers; ``offsets`` holds the start of each bag. After the result, torch's operators return the
bag of each row number, the size of each bag and, for a maximum, the row from which each element came. Their gradients
use these three results.

Gradients scaled by frequency are divided by the number of times that a row occurs, as torch documents; torch's CPU
kernel mixes up rows.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from torch import fx

from jtbridge.lowerings._common import opmath, out_dtype, out_shape
from jtbridge.lowerings._registry import register_lowering

from ._out_of_range import read_at
from .embedding import summed_rows

_SUM, _MEAN, _MAX = 0, 1, 2


def _bags(offsets: jax.Array, count: int, length: int, *, to_last: bool) -> jax.Array:
    """Return the bag of each position in the list of row numbers; `count` for a position after the last bag.

    Args:
        offsets: the start of each of `count` bags, and perhaps the end of the last one.
        count: the number of bags.
        length: the number of positions.
        to_last: whether the last bag extends to the last position.
    """
    places = jnp.arange(length, dtype=offsets.dtype)
    bags = jnp.searchsorted(offsets[:count], places, side="right").astype(offsets.dtype) - 1
    return bags if to_last or offsets.size == count else jnp.where(places < offsets[count], bags, count)


def _reads_last_offset(dtype: np.dtype, mode: int, padding_idx: int) -> bool:
    """Return whether torch reads the end of the last bag, as only its fast kernel does (torch 2.13)."""
    return mode != _MAX and padding_idx < 0 and dtype in (jnp.float32, jnp.float16, jnp.bfloat16)


@register_lowering("_embedding_bag", "_embedding_bag_forward_only", node=True)
def _embedding_bag(
    weight: jax.Array,
    indices: jax.Array,
    offsets: jax.Array,
    scale_grad_by_freq: bool = False,
    mode: int = _SUM,
    sparse: bool = False,
    per_sample_weights: jax.Array | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
    *,
    node: fx.Node,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    del scale_grad_by_freq, sparse  # used by the gradient only
    count = out_shape(node)[0]
    to_last = not _reads_last_offset(weight.dtype, mode, padding_idx)
    bags = _bags(offsets, count, indices.size, to_last=to_last)
    kept = jnp.where(indices == padding_idx, count, bags) if padding_idx >= 0 else bags  # out of range: no write
    # Torch counts the size of the last bag up to the end of the list, even if `offsets` ends it earlier.
    sized = kept if to_last else _bags(offsets, count, indices.size, to_last=True)
    size = jnp.zeros(count, bags.dtype).at[sized].add(1, mode="drop")
    rows = read_at(weight, (indices,), wrap=False)
    source = jnp.zeros(out_shape(node, 3), out_dtype(node, 3))
    if mode == _MAX:
        value, source = _bag_maxima(rows, indices, kept, size)
        outside = (indices < 0) | (indices >= weight.shape[0])
        value = jnp.where(jnp.zeros(count, bool).at[kept].max(outside, mode="drop")[:, None], jnp.nan, value)
    else:
        value = _bag_sums(rows, per_sample_weights, kept, count)
        if mode == _MEAN:
            value = value / jnp.maximum(size, 1).astype(value.dtype)[:, None]
            source = jnp.pad(size, (0, source.shape[0] - count))
        value = value.astype(weight.dtype)
    if offsets.size:  # torch raises for other offsets
        value = jnp.where((offsets[0] == 0) & (offsets[-1] <= indices.size), value, jnp.nan)
    # With `include_last_offset`, torch's trace has one size more than there are bags.
    sizes = jnp.pad(size if mode != _SUM else jnp.zeros_like(size), (0, out_shape(node, 2)[0] - count))
    offset2bag = bags if out_shape(node, 1) == bags.shape else jnp.zeros(out_shape(node, 1), bags.dtype)
    return (
        value,
        offset2bag.astype(out_dtype(node, 1)),
        sizes.astype(out_dtype(node, 2)),
        source.astype(out_dtype(node, 3)),
    )


def _bag_sums(rows: jax.Array, scale: jax.Array | None, bags: jax.Array, count: int) -> jax.Array:
    rows = rows.astype(opmath(rows.dtype))
    if scale is not None:
        rows = rows * scale.astype(rows.dtype)[:, None]
    return jnp.zeros((count, rows.shape[1]), rows.dtype).at[bags].add(rows, mode="drop")


def _bag_maxima(rows: jax.Array, indices: jax.Array, bags: jax.Array, size: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the maximum of each bag and column, and the row number where it first occurs; zeros for empty bags.

    As in torch, which compares each element with the largest one before it, a NaN counts only in the first row of a
    bag, and is the maximum there.
    """
    count = size.shape[0]
    shape = (count, rows.shape[1])
    order = jnp.arange(rows.shape[0])[:, None]
    opening = jnp.full((count, 1), rows.shape[0]).at[bags].min(order, mode="drop")
    ignored = jnp.isnan(rows) & (order != opening.at[bags].get(mode="clip"))
    greatest = jnp.full(shape, -jnp.inf, rows.dtype).at[bags].max(jnp.where(ignored, -jnp.inf, rows), mode="drop")
    of_row = greatest.at[bags].get(mode="clip")
    reached = (rows == of_row) | (jnp.isnan(of_row) & ~ignored & jnp.isnan(rows))
    first = jnp.full(shape, rows.shape[0]).at[bags].min(jnp.where(reached, order, rows.shape[0]), mode="drop")
    filled = size[:, None] > 0
    number = indices.at[first].get(mode="clip")
    return jnp.where(filled, greatest, 0).astype(rows.dtype), jnp.where(filled, number, 0)


@register_lowering("_embedding_bag_dense_backward")
def _embedding_bag_dense_backward(
    grad: jax.Array,
    indices: jax.Array,
    offset2bag: jax.Array,
    bag_size: jax.Array,
    maximum_indices: jax.Array,
    num_weights: int,
    scale_grad_by_freq: bool,
    mode: int,
    per_sample_weights: jax.Array | None,
    padding_idx: int = -1,
) -> jax.Array:
    if mode == _MAX:
        dtype = grad.dtype
        grad = jnp.where(bag_size[:, None] > 0, grad, 0).astype(opmath(dtype))
        columns = jnp.arange(grad.shape[1])
        total = jnp.zeros((num_weights, grad.shape[1]), grad.dtype)
        return total.at[maximum_indices, columns].add(grad, mode="drop").astype(dtype)
    of_rows = grad.at[offset2bag].get(mode="fill", fill_value=0)
    if per_sample_weights is not None:
        of_rows = of_rows * per_sample_weights.astype(grad.dtype)[:, None]
    if mode == _MEAN:
        sizes = jnp.maximum(bag_size.at[offset2bag].get(mode="fill", fill_value=1), 1)
        of_rows = of_rows / sizes.astype(grad.dtype)[:, None]
    return summed_rows(of_rows, indices, num_weights, padding_idx, scale_grad_by_freq)


@register_lowering("_embedding_bag_backward")
def _embedding_bag_backward(
    grad: jax.Array,
    indices: jax.Array,
    offsets: jax.Array,
    offset2bag: jax.Array,
    bag_size: jax.Array,
    maximum_indices: jax.Array,
    num_weights: int,
    scale_grad_by_freq: bool,
    mode: int,
    sparse: bool,
    per_sample_weights: jax.Array | None,
    padding_idx: int = -1,
) -> jax.Array:
    del sparse
    return _embedding_bag_dense_backward(
        grad,
        indices,
        _known_bags(offset2bag, offsets, indices, grad, mode, padding_idx),
        bag_size,
        maximum_indices,
        num_weights,
        scale_grad_by_freq,
        mode,
        per_sample_weights,
        padding_idx,
    )


def _known_bags(
    offset2bag: jax.Array, offsets: jax.Array, indices: jax.Array, grad: jax.Array, mode: int, padding_idx: int
) -> jax.Array:
    """Return the bag of each position; a forward operator that does not need `offset2bag` leaves it empty."""
    if offset2bag.size:
        return offset2bag
    to_last = not _reads_last_offset(grad.dtype, mode, padding_idx)
    return _bags(offsets, grad.shape[0], indices.size, to_last=to_last)


@register_lowering("_embedding_bag_per_sample_weights_backward")
def _embedding_bag_per_sample_weights_backward(
    grad: jax.Array,
    weight: jax.Array,
    indices: jax.Array,
    offsets: jax.Array,
    offset2bag: jax.Array,
    mode: int,
    padding_idx: int = -1,
) -> jax.Array:
    bags = _known_bags(offset2bag, offsets, indices, grad, mode, padding_idx)
    dtype = opmath(grad.dtype)
    rows = read_at(weight, (indices,), wrap=False).astype(dtype)
    products = jnp.sum(rows * grad.at[bags].get(mode="fill", fill_value=0).astype(dtype), axis=1)
    return jnp.where(indices == padding_idx, 0, products).astype(grad.dtype)
