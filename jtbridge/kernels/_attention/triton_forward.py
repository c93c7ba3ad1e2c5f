"""The forward of attention. A program takes a block of queries and reads the keys with a running maximum and sum.

Dao, FlashAttention-2, arXiv:2307.08691.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_kernel import LN2, LOG2E, bounds, kept, load_rows, scores, store_rows


@triton.jit
def attention_forward(
    q_ptr,
    k_ptr,
    v_ptr,
    mask_ptr,
    seeds_ptr,
    out_ptr,
    lse_ptr,
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
    acc = tl.zeros([block_q, block_d], tl.float32)
    total = tl.zeros([block_q], tl.float32)
    top = tl.full([block_q], -float("inf"), tl.float32)
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
                s = tl.dot(q, tl.trans(k), input_precision=precision)
                if part != 1 or mask != "none":
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
                    new = tl.maximum(top, tl.max(s, 1))
                    base = tl.where(new == -float("inf"), 0.0, new)  # no inf - inf in a row that has seen no key yet
                    p = tl.exp2(s - base[:, None])
                    shrink = tl.exp2(top - base)
                else:
                    new = tl.maximum(top, tl.max(s, 1) * scale2)
                    p = tl.exp2(s * scale2 - new[:, None])
                    shrink = tl.exp2(top - new)
                top = new
                total = total * shrink + tl.sum(p, 1)
                if threshold > 0:
                    p = tl.where(kept(seeds_ptr, head, rows[:, None], columns[None, :], threshold), p, 0.0)
                v = load_rows(v_ptr + kv_at, key, kv_len, block_k, d, block_d, part != 1)
                acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=precision)

    seen = total != 0  # also True for NaN, which must reach the result
    total = tl.where(seen, total, 1.0)
    lse = tl.where(seen, top * LN2 + tl.log(total), 0.0)
    store_rows(out_ptr + q_at * d, first, q_len, acc * (boost / total)[:, None], block_q, d, block_d)
    tl.store(lse_ptr + q_at + rows, lse, mask=rows < q_len)
