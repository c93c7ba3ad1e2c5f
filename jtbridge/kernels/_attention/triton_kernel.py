"""Device functions that the forward and the backward of attention share: loads, masks and dropout of a block.

Scores are multiplied by log2(e), so that an exponential is one instruction; the factor is part of the scale and costs
nothing. Blocks of keys that no query of a program sees are skipped. For blocks that all its queries see, no positions
are compared. The other blocks are masked.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-2e38)  # stays finite when multiplied by log2(e) and added to a product


@triton.jit
def load_rows(base, first, length, block: tl.constexpr, d: tl.constexpr, block_d: tl.constexpr, edge: tl.constexpr):
    """Load rows of ``[length, d]`` from `first` on, with zeros beyond `d` and, if `edge`, also beyond the last row."""
    rows = tl.arange(0, block)[:, None]
    columns = tl.arange(0, block_d)[None, :]
    at = base + tl.cast(first, tl.int64) * d + (rows * d + columns)
    if edge and d < block_d:
        return tl.load(at, mask=(first + rows < length) & (columns < d), other=0.0)
    elif edge:
        return tl.load(at, mask=first + rows < length, other=0.0)
    elif d < block_d:
        return tl.load(at, mask=columns < d, other=0.0)
    else:
        return tl.load(at)


@triton.jit
def store_rows(base, first, length, x, block: tl.constexpr, d: tl.constexpr, block_d: tl.constexpr):
    """Store rows of ``[length, d]`` from `first` on, without rows beyond the last row and columns beyond `d`."""
    rows = tl.arange(0, block)[:, None]
    columns = tl.arange(0, block_d)[None, :]
    at = base + tl.cast(first, tl.int64) * d + (rows * d + columns)
    inside = first + rows < length
    if d < block_d:
        inside = inside & (columns < d)
    tl.store(at, x.to(base.dtype.element_ty), mask=inside)


@triton.jit
def bounds(
    first,
    length: tl.constexpr,
    other: tl.constexpr,
    block: tl.constexpr,
    step: tl.constexpr,
    before: tl.constexpr,
    after: tl.constexpr,
):
    """Return which of the `other` positions are paired with a block of positions that begins at `first`.

    Position `i` is paired with ``i - before`` to ``i + after``. Returns ``start, inner, outer, stop``, all but `stop`
    multiples of `step`: positions from `inner` to `outer` are paired with the whole block; positions from `start` to
    `inner` and from `outer` to `stop` may be paired with a part of it.
    """
    last = tl.minimum(first + block, length) - 1
    start = first * 0
    inner = first * 0
    outer = first * 0 + other // step * step
    stop = first * 0 + other
    if after < other - 1:
        stop = tl.minimum(stop, last + after + 1)
        outer = tl.minimum(outer, (first + after + 1) // step * step)
    if before < length - 1:
        start = tl.maximum(first - before, 0) // step * step
        inner = (tl.maximum(last - before, 0) + step - 1) // step * step
        inner = tl.minimum(inner, (stop + step - 1) // step * step)
    return start, inner, tl.maximum(outer, inner), stop


@triton.jit
def scores(
    products,
    rows,
    columns,
    mask_ptr,
    scale2: tl.constexpr,
    q_len: tl.constexpr,
    kv_len: tl.constexpr,
    left: tl.constexpr,
    right: tl.constexpr,
    mask: tl.constexpr,
    mask_row: tl.constexpr,
    mask_column: tl.constexpr,
    edge: tl.constexpr,
):
    """Return scores times log2(e) from products of queries (`rows`) and keys (`columns`); -inf for a key not seen."""
    scores = products * scale2
    if mask != "none":
        if mask_row == 0:
            at = mask_ptr + columns * mask_column
            inside = columns < kv_len
        elif mask_column == 0:
            at = mask_ptr + rows.to(tl.int64) * mask_row
            inside = rows < q_len
        else:
            at = mask_ptr + rows.to(tl.int64) * mask_row + columns
            inside = (rows < q_len) & (columns < kv_len)
        if mask == "boolean":
            scores = tl.where(tl.load(at, mask=inside, other=0) != 0, scores, -float("inf"))
        else:
            bias = tl.load(at, mask=inside, other=-float("inf")).to(tl.float32)
            # A finite mask stays finite: if all keys of a query have the lowest finite number, they get equal weights
            # instead of not being seen. Not tl.maximum, which may drop a NaN.
            finite = tl.where(bias < LOWEST, LOWEST, bias) * LOG2E
            scores += tl.where(bias == -float("inf"), bias, finite)
    if edge:
        seen = columns < kv_len
        if right < kv_len - 1:
            seen = seen & (columns <= rows + right)
        if left < q_len - 1:
            seen = seen & (columns >= rows - left)
        scores = tl.where(seen, scores, -float("inf"))
    return scores


@triton.jit
def kept(seeds_ptr, head, rows, columns, threshold: tl.constexpr):
    """Return which weights dropout keeps: a function of the seeds of the batch, the head, the query and the key."""
    low = tl.load(seeds_ptr).to(tl.uint64)
    high = tl.load(seeds_ptr + 1).to(tl.uint64)
    stream = tl.load(seeds_ptr + 2).to(tl.uint32)
    bits, _, _, _ = tl.philox(low | (high << 32), columns.to(tl.uint32), rows.to(tl.uint32), head.to(tl.uint32), stream)
    return bits >= threshold
