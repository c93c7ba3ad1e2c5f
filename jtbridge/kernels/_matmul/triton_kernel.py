"""Matrix product, with a program for each block of the result, which also applies the bias and the activation.

Programs that run at the same time take a group of blocks that share rows and columns, so that these are read from the
cache (Tillet et al., Triton: an intermediate language and compiler for tiled neural network computations, MAPL 2019).
A block that reaches beyond the last row or column of the operands reads the first rows or columns again, so that the
loop needs no mask for them. The block does not write these parts of the result.
"""

from __future__ import annotations

import triton
import triton.language as tl

from jtbridge.kernels._gated.triton_kernel import sigmoid


@triton.jit
def matmul_forward(
    a_ptr,
    b_ptr,
    bias_ptr,
    y_ptr,
    m: tl.constexpr,
    n: tl.constexpr,
    k: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    group: tl.constexpr,
    biased: tl.constexpr,
    transpose_b: tl.constexpr,
    activation: tl.constexpr,
    precision: tl.constexpr,
):
    total, first, places, inside = _accumulated(
        a_ptr, b_ptr, bias_ptr, m, n, k, block_m, block_n, block_k, group, biased, transpose_b, precision
    )
    tl.store(y_ptr + first + places, _apply_activation(total, activation).to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def matmul_forward_saving(
    a_ptr,
    b_ptr,
    bias_ptr,
    y_ptr,
    before_ptr,
    m: tl.constexpr,
    n: tl.constexpr,
    k: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    group: tl.constexpr,
    biased: tl.constexpr,
    transpose_b: tl.constexpr,
    activation: tl.constexpr,
    precision: tl.constexpr,
):
    total, first, places, inside = _accumulated(
        a_ptr, b_ptr, bias_ptr, m, n, k, block_m, block_n, block_k, group, biased, transpose_b, precision
    )
    tl.store(before_ptr + first + places, total.to(before_ptr.dtype.element_ty), mask=inside)
    tl.store(y_ptr + first + places, _apply_activation(total, activation).to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _accumulated(
    a_ptr,
    b_ptr,
    bias_ptr,
    m: tl.constexpr,
    n: tl.constexpr,
    k: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    group: tl.constexpr,
    biased: tl.constexpr,
    transpose_b: tl.constexpr,
    precision: tl.constexpr,
):
    program = tl.program_id(0)
    blocks_m: tl.constexpr = (m + block_m - 1) // block_m
    blocks_n: tl.constexpr = (n + block_n - 1) // block_n
    first = program // (group * blocks_n) * group
    height = min(blocks_m - first, group)
    within = program % (group * blocks_n)
    row = (first + within % height) * block_m
    column = (within // height) * block_n

    rows = row + tl.arange(0, block_m)
    columns = column + tl.arange(0, block_n)
    along = tl.arange(0, block_k)
    a_rows = (rows % m).to(tl.int64)
    b_columns = columns % n
    a_ptrs = a_ptr + a_rows[:, None] * k + along[None, :]
    if transpose_b:
        b_ptrs = b_ptr + b_columns.to(tl.int64)[None, :] * k + along[:, None]
    else:
        b_ptrs = b_ptr + along.to(tl.int64)[:, None] * n + b_columns[None, :]
    b_step: tl.constexpr = block_k if transpose_b else block_k * n

    total = tl.zeros([block_m, block_n], tl.float32)
    for start in range(0, k, block_k):
        if k % block_k == 0:
            a = tl.load(a_ptrs)
            b = tl.load(b_ptrs)
        else:
            a = tl.load(a_ptrs, mask=along[None, :] < k - start, other=0.0)
            b = tl.load(b_ptrs, mask=along[:, None] < k - start, other=0.0)
        total = tl.dot(a, b, total, input_precision=precision)
        a_ptrs += block_k
        b_ptrs += b_step
    if biased:
        total += tl.load(bias_ptr + columns, mask=columns < n, other=0.0).to(tl.float32)[None, :]
    # The offset of the block takes 64 bits. Places within the block take 32, because a large block has many of them.
    places = tl.arange(0, block_m)[:, None] * n + tl.arange(0, block_n)[None, :]
    return total, row.to(tl.int64) * n + column, places, (rows[:, None] < m) & (columns[None, :] < n)


@triton.jit
def _apply_activation(x, activation: tl.constexpr):
    if activation == "relu":
        # Not maximum(x, 0), which may drop a NaN.
        return tl.where(x < 0, 0.0, x)
    elif activation == "gelu":
        return 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
    elif activation == "gelu_tanh":
        # 0.5 * (1 + tanh(u)) is sigmoid(2 * u).
        return x * sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif activation == "silu":
        return x * sigmoid(x)
    else:
        return x
