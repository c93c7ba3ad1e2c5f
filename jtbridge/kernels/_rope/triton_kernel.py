"""Rotary position embedding. A program takes a block of tokens and of heads, and reads the angles once for its heads.

The heads of a second array follow the heads of the first, so that queries and keys take one launch.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _load_parts(ptr, row, inside, half: tl.constexpr, half_block: tl.constexpr, interleaved: tl.constexpr):
    """Load the two parts of rows that are rotated with each other, halves or neighbours, in float32."""
    if interleaved:
        # Neighbours are read together, and then separated.
        column = tl.arange(0, 2 * half_block)[None, None, :]
        both = tl.load(ptr + row + column, mask=inside & (column < 2 * half), other=0.0).to(tl.float32)
        first, second = tl.split(tl.reshape(both, (both.shape[0], both.shape[1], half_block, 2)))
    else:
        column = tl.arange(0, half_block)[None, None, :]
        inside = inside & (column < half)
        first = tl.load(ptr + row + column, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(ptr + row + column + half, mask=inside, other=0.0).to(tl.float32)
    return first, second


@triton.jit
def _store_parts(
    ptr, row, inside, first, second, half: tl.constexpr, half_block: tl.constexpr, interleaved: tl.constexpr
):
    if interleaved:
        column = tl.arange(0, 2 * half_block)[None, None, :]
        tl.store(ptr + row + column, tl.interleave(first, second), mask=inside & (column < 2 * half))
    else:
        column = tl.arange(0, half_block)[None, None, :]
        inside = inside & (column < half)
        tl.store(ptr + row + column, first, mask=inside)
        tl.store(ptr + row + column + half, second, mask=inside)


@triton.jit
def _rotate(
    x_ptr,
    out_ptr,
    batch,
    head,
    heads: tl.constexpr,
    token,
    cos_first,
    cos_second,
    sin_first,
    sin_second,
    tokens: tl.constexpr,
    half: tl.constexpr,
    rounded: tl.constexpr,
    interleaved: tl.constexpr,
    tokens_first: tl.constexpr,
    half_block: tl.constexpr,
):
    start = batch * (heads * tokens * 2 * half)  # a scalar of 64 bits
    inside = (head < heads) & (token < tokens)
    if tokens_first:
        row = (token.to(tl.int64) * heads + head) * (2 * half)
    else:
        row = (head.to(tl.int64) * tokens + token) * (2 * half)
    first, second = _load_parts(x_ptr + start, row, inside, half, half_block, interleaved)
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
    first = (first_kept - first_turned).to(dtype)
    second = (second_kept + second_turned).to(dtype)
    _store_parts(out_ptr + start, row, inside, first, second, half, half_block, interleaved)


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
    group_stride: tl.constexpr,  # of cos and sin; 0 if all groups share them
    batch_stride: tl.constexpr,  # of cos and sin; 0 if a batch shares them
    transposed: tl.constexpr,
    rounded: tl.constexpr,  # round products before they are added
    interleaved: tl.constexpr,  # rotate neighbours instead of halves
    tokens_first: tl.constexpr,  # q and k have the tokens before the heads
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
    head = tl.arange(0, head_block)[:, None, None]
    angles = batch // batches * group_stride + batch % batches * batch_stride
    row = token * (2 * half)
    inside = token < tokens
    cos_first, cos_second = _load_parts(cos_ptr + angles, row, inside, half, half_block, interleaved)
    sin_first, sin_second = _load_parts(sin_ptr + angles, row, inside, half, half_block, interleaved)
    if transposed:
        # The transpose of the rotation uses the sine of the other half, with the opposite sign.
        kept = sin_first
        sin_first = -sin_second
        sin_second = -kept
    if block_of_heads < q_blocks:
        _rotate(
            q_ptr, q_out_ptr, batch, block_of_heads * head_block + head, q_heads, token,
            cos_first, cos_second, sin_first, sin_second, tokens, half, rounded, interleaved, tokens_first, half_block,
        )  # fmt: skip
    else:
        _rotate(
            k_ptr, k_out_ptr, batch, (block_of_heads - q_blocks) * head_block + head, k_heads, token,
            cos_first, cos_second, sin_first, sin_second, tokens, half, rounded, interleaved, tokens_first, half_block,
        )  # fmt: skip
