"""Rotary position embedding: a program per block of tokens and of heads, which reads the angles once for its heads.

The heads of a second array follow those of the first, so that queries and keys take one launch.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _rotate(
    x_ptr,
    out_ptr,
    batch,
    head,
    heads: tl.constexpr,
    token,
    column,
    in_angles,
    cos_first,
    cos_second,
    sin_first,
    sin_second,
    tokens: tl.constexpr,
    half: tl.constexpr,
    rounded: tl.constexpr,
):
    start = batch * (heads * tokens * 2 * half)  # a scalar of 64 bits
    inside = (head < heads) & in_angles
    at = (head.to(tl.int64) * tokens + token) * (2 * half) + column
    first = tl.load(x_ptr + start + at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x_ptr + start + at + half, mask=inside, other=0.0).to(tl.float32)
    dtype = out_ptr.dtype.element_ty
    first_kept = first * cos_first
    first_turned = second * sin_first
    second_kept = second * cos_second
    second_turned = first * sin_second
    if rounded:
        first_kept = first_kept.to(dtype).to(tl.float32)
        first_turned = first_turned.to(dtype).to(tl.float32)
        second_kept = second_kept.to(dtype).to(tl.float32)
        second_turned = second_turned.to(dtype).to(tl.float32)
    tl.store(out_ptr + start + at, (first_kept - first_turned).to(dtype), mask=inside)
    tl.store(out_ptr + start + at + half, (second_kept + second_turned).to(dtype), mask=inside)


@triton.jit
def rope_rotate(
    q_ptr,
    k_ptr,
    cos_ptr,
    sin_ptr,
    q_out_ptr,
    k_out_ptr,
    batches: tl.constexpr,
    tokens: tl.constexpr,
    half: tl.constexpr,
    q_heads: tl.constexpr,
    k_heads: tl.constexpr,
    group_stride: tl.constexpr,  # of cos and sin, 0 where they are the same for all groups
    batch_stride: tl.constexpr,  # and for all of a batch
    transposed: tl.constexpr,
    rounded: tl.constexpr,  # products, before they are added
    head_block: tl.constexpr,
    token_block: tl.constexpr,
    half_block: tl.constexpr,
):
    token_blocks: tl.constexpr = (tokens + token_block - 1) // token_block
    q_blocks: tl.constexpr = (q_heads + head_block - 1) // head_block
    k_blocks: tl.constexpr = (k_heads + head_block - 1) // head_block
    program = tl.program_id(0)
    block_of_heads = program // token_blocks % (q_blocks + k_blocks)
    batch = (program // (token_blocks * (q_blocks + k_blocks))).to(tl.int64)
    token = program % token_blocks * token_block + tl.arange(0, token_block)[None, :, None]
    column = tl.arange(0, half_block)[None, None, :]
    head = tl.arange(0, head_block)[:, None, None]
    inside = (token < tokens) & (column < half)
    angles = batch // batches * group_stride + batch % batches * batch_stride
    at = token * (2 * half) + column
    cos_first = tl.load(cos_ptr + angles + at, mask=inside, other=0.0).to(tl.float32)
    cos_second = tl.load(cos_ptr + angles + at + half, mask=inside, other=0.0).to(tl.float32)
    sin_first = tl.load(sin_ptr + angles + at, mask=inside, other=0.0).to(tl.float32)
    sin_second = tl.load(sin_ptr + angles + at + half, mask=inside, other=0.0).to(tl.float32)
    if transposed:
        # The transpose takes the other half's sine, and turns the other way.
        kept = sin_first
        sin_first = -sin_second
        sin_second = -kept
    if block_of_heads < q_blocks:
        _rotate(
            q_ptr, q_out_ptr, batch, block_of_heads * head_block + head, q_heads, token, column, inside,
            cos_first, cos_second, sin_first, sin_second, tokens, half, rounded,
        )  # fmt: skip
    else:
        _rotate(
            k_ptr, k_out_ptr, batch, (block_of_heads - q_blocks) * head_block + head, k_heads, token, column, inside,
            cos_first, cos_second, sin_first, sin_second, tokens, half, rounded,
        )  # fmt: skip
