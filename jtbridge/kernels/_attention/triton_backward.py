"""The gradients of attention. The weights are computed again.

A program for a block of keys sums over the queries, and over the heads that share the keys. A program for a block of
queries sums over the keys. One program computes the whole of each sum, in a fixed order.

Dao, FlashAttention-2, arXiv:2307.08691.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_kernel import LOG2E, bounds, kept, load_rows, scores, store_rows


@triton.jit
def _softmax_weights(scores, lse2, mask: tl.constexpr):
    """Compute the softmax from scores and the logarithm of the sum of their exponentials, both times log2(e)."""
    if mask == "additive":
        # Next to the lowest finite scores, rounding loses the logarithm of the sum, and the difference may be positive.
        below = scores - lse2
        return tl.exp2(tl.where(below > 0, 0.0, below))  # not tl.minimum, which may drop a NaN
    else:
        return tl.exp2(scores - lse2)


@triton.jit
def attention_backward_query(
    q_ptr,
    k_ptr,
    v_ptr,
    mask_ptr,
    seeds_ptr,
    ct_ptr,
    lse2_ptr,
    delta_ptr,
    grad_ptr,
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    q_len: tl.constexpr,
    kv_len: tl.constexpr,
    d: tl.constexpr,
    scale: tl.constexpr,
    left: tl.constexpr,
    right: tl.constexpr,
    mask: tl.constexpr,
    mask_batch: tl.constexpr,
    mask_head: tl.constexpr,
    mask_row: tl.constexpr,
    mask_column: tl.constexpr,
    threshold: tl.constexpr,
    boost: tl.constexpr,
    precision: tl.constexpr,
    block_d: tl.constexpr,
    block_q: tl.constexpr,
    block_k: tl.constexpr,
):
    scale2: tl.constexpr = scale * LOG2E
    blocks: tl.constexpr = (q_len + block_q - 1) // block_q
    program = tl.program_id(0)
    block = program % blocks
    if right < kv_len - 1:
        block = blocks - 1 - block  # blocks with the longest loops first
    batch = program // blocks // heads
    head = program // blocks % heads
    q_at = (batch.to(tl.int64) * heads + head) * q_len
    kv_at = (batch.to(tl.int64) * kv_heads + head // (heads // kv_heads)) * kv_len * d
    mask_ptr += batch.to(tl.int64) * mask_batch + head.to(tl.int64) * mask_head
    seeds_ptr += batch * 3

    first = block * block_q
    rows = first + tl.arange(0, block_q)
    q = load_rows(q_ptr + q_at * d, first, q_len, block_q, d, block_d, q_len % block_q != 0)
    ct = load_rows(ct_ptr + q_at * d, first, q_len, block_q, d, block_d, q_len % block_q != 0)
    lse2 = tl.load(lse2_ptr + q_at + rows, mask=rows < q_len, other=0.0)
    delta = tl.load(delta_ptr + q_at + rows, mask=rows < q_len, other=0.0)
    grad = tl.zeros([block_q, block_d], tl.float32)
    start, inner, outer, stop = bounds(first, q_len, kv_len, block_q, block_k, left, right)
    for part in tl.static_range(3):  # the second part needs no masking
        if (
            part == 1
            or (part == 0 and left < q_len - 1)
            or (part == 2 and (right < kv_len - 1 or kv_len % block_k != 0))
        ):
            lower = start if part == 0 else (inner if part == 1 else outer)
            upper = inner if part == 0 else (outer if part == 1 else stop)
            for key in range(lower, upper, block_k):
                columns = key + tl.arange(0, block_k)
                k = load_rows(k_ptr + kv_at, key, kv_len, block_k, d, block_d, part != 1)
                v = load_rows(v_ptr + kv_at, key, kv_len, block_k, d, block_d, part != 1)
                s = tl.dot(q, tl.trans(k), input_precision=precision)
                dp = tl.dot(ct, tl.trans(v), input_precision=precision)
                s = scores(
                    s,
                    rows[:, None],
                    columns[None, :],
                    mask_ptr,
                    scale2,
                    q_len,
                    kv_len,
                    left,
                    right,
                    mask,
                    mask_row,
                    mask_column,
                    part != 1,
                )
                p = _softmax_weights(s, lse2[:, None], mask)
                if threshold > 0:
                    stays = kept(seeds_ptr, head, rows[:, None], columns[None, :], threshold)
                    dp = tl.where(stays, dp * boost, 0.0)
                ds = p * (dp - delta[:, None])
                grad = tl.dot(ds.to(k.dtype), k, grad, input_precision=precision)
    store_rows(grad_ptr + q_at * d, first, q_len, grad * scale, block_q, d, block_d)


@triton.jit
def attention_backward_key_value(
    q_ptr,
    k_ptr,
    v_ptr,
    mask_ptr,
    seeds_ptr,
    ct_ptr,
    lse2_ptr,
    delta_ptr,
    grad_k_ptr,
    grad_v_ptr,
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    q_len: tl.constexpr,
    kv_len: tl.constexpr,
    d: tl.constexpr,
    scale: tl.constexpr,
    left: tl.constexpr,
    right: tl.constexpr,
    mask: tl.constexpr,
    mask_batch: tl.constexpr,
    mask_head: tl.constexpr,
    mask_row: tl.constexpr,
    mask_column: tl.constexpr,
    threshold: tl.constexpr,
    boost: tl.constexpr,
    precision: tl.constexpr,
    block_d: tl.constexpr,
    block_q: tl.constexpr,
    block_k: tl.constexpr,
):
    scale2: tl.constexpr = scale * LOG2E
    blocks: tl.constexpr = (kv_len + block_k - 1) // block_k
    group: tl.constexpr = heads // kv_heads
    program = tl.program_id(0)
    block = program % blocks
    if left < q_len - 1 and right >= kv_len - 1:
        block = blocks - 1 - block  # blocks with the longest loops first
    batch = program // blocks // kv_heads
    kv_head = program // blocks % kv_heads
    kv_at = (batch.to(tl.int64) * kv_heads + kv_head) * kv_len * d
    mask_ptr += batch.to(tl.int64) * mask_batch
    seeds_ptr += batch * 3

    first = block * block_k
    columns = first + tl.arange(0, block_k)
    k = load_rows(k_ptr + kv_at, first, kv_len, block_k, d, block_d, kv_len % block_k != 0)
    v = load_rows(v_ptr + kv_at, first, kv_len, block_k, d, block_d, kv_len % block_k != 0)
    grad_k = tl.zeros([block_k, block_d], tl.float32)
    grad_v = tl.zeros([block_k, block_d], tl.float32)
    start, inner, outer, stop = bounds(first, kv_len, q_len, block_k, block_q, right, left)
    if kv_len % block_k != 0:
        outer = tl.where(first + block_k <= kv_len, outer, inner)  # a block that ends beyond the last key needs masking
    for member in range(group):
        head = kv_head * group + member
        q_at = (batch.to(tl.int64) * heads + head) * q_len
        head_mask_ptr = mask_ptr + tl.cast(head, tl.int64) * mask_head
        for part in tl.static_range(3):  # the second part needs no masking
            if (
                part == 1
                or (part == 0 and right < kv_len - 1)
                or (part == 2 and (left < q_len - 1 or q_len % block_q != 0 or kv_len % block_k != 0))
            ):
                lower = start if part == 0 else (inner if part == 1 else outer)
                upper = inner if part == 0 else (outer if part == 1 else stop)
                for query in range(lower, upper, block_q):
                    rows = query + tl.arange(0, block_q)
                    q = load_rows(q_ptr + q_at * d, query, q_len, block_q, d, block_d, part != 1)
                    ct = load_rows(ct_ptr + q_at * d, query, q_len, block_q, d, block_d, part != 1)
                    if part == 1:
                        lse2 = tl.load(lse2_ptr + q_at + rows)
                        delta = tl.load(delta_ptr + q_at + rows)
                    else:
                        lse2 = tl.load(lse2_ptr + q_at + rows, mask=rows < q_len, other=0.0)
                        delta = tl.load(delta_ptr + q_at + rows, mask=rows < q_len, other=0.0)
                    s = tl.dot(k, tl.trans(q), input_precision=precision)  # [keys, queries]
                    dp = tl.dot(v, tl.trans(ct), input_precision=precision)
                    s = scores(
                        s,
                        rows[None, :],
                        columns[:, None],
                        head_mask_ptr,
                        scale2,
                        q_len,
                        kv_len,
                        left,
                        right,
                        mask,
                        mask_row,
                        mask_column,
                        part != 1,
                    )
                    p = _softmax_weights(s, lse2[None, :], mask)
                    if threshold > 0:
                        stays = kept(seeds_ptr, head, rows[None, :], columns[:, None], threshold)
                        dp = tl.where(stays, dp * boost, 0.0)
                        grad_v = tl.dot(
                            tl.where(stays, p * boost, 0.0).to(ct.dtype), ct, grad_v, input_precision=precision
                        )
                    else:
                        grad_v = tl.dot(p.to(ct.dtype), ct, grad_v, input_precision=precision)
                    ds = p * (dp - delta[None, :])
                    grad_k = tl.dot(ds.to(q.dtype), q, grad_k, input_precision=precision)
    store_rows(grad_k_ptr + kv_at, first, kv_len, grad_k * scale, block_k, d, block_d)
    store_rows(grad_v_ptr + kv_at, first, kv_len, grad_v, block_k, d, block_d)
