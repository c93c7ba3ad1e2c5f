"""Normalization over rows. A program holds a tile of short rows, or one longer row, in registers.

A row too long for that is read twice. Each lane updates its own statistics one element at a time, and the statistics of
the lanes are then combined (Chan, Golub and LeVeque, Algorithms for computing the sample variance, 1983), so that there
is no cancellation.

The gradients of weight and bias are sums over rows. A program adds up the gradients of its rows in registers and writes
one partial sum. There are about as many programs as a GPU runs at once, and each loads its next rows, through shared
memory, while it computes.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def norm_forward(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    h_ptr,
    statistics_ptr,
    rows: tl.constexpr,
    group: tl.constexpr,  # rows that share weight and bias
    n: tl.constexpr,
    eps: tl.constexpr,
    offset: tl.constexpr,
    centered: tl.constexpr,
    rounded: tl.constexpr,  # round to the dtype of the result before the weight
    has_residual: tl.constexpr,
    has_weight: tl.constexpr,
    has_bias: tl.constexpr,
    tile: tl.constexpr,
    block: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)[:, None]
    columns = tl.arange(0, block)[None, :]
    inside = (row < rows) & (columns < n)
    at = row * n + columns
    if group < rows:
        of_group = row // group * n + columns
        of_group_inside = inside
    else:
        of_group = columns
        of_group_inside = columns < n
    # The cache evicts the row first, because it is read once, and the weights last. The weights are loaded before the
    # row is first used, so that both loads overlap.
    x = tl.load(x_ptr + at, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
    if has_residual:
        x += tl.load(residual_ptr + at, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
    weight = x
    bias = x
    if has_weight:
        weight = tl.load(weight_ptr + of_group, mask=of_group_inside, other=0.0, eviction_policy="evict_last")
    if has_bias:
        bias = tl.load(bias_ptr + of_group, mask=of_group_inside, other=0.0, eviction_policy="evict_last")
    if has_residual:
        h = x.to(h_ptr.dtype.element_ty)
        tl.store(h_ptr + at, h, mask=inside)
        x = h.to(tl.float32)
    row_inside = row < rows
    if centered:
        mean = tl.sum(x, 1, keep_dims=True) * (1.0 / n)
        x = tl.where(columns < n, x - mean, 0.0)
        tl.store(statistics_ptr + row * 2 + 1, mean, mask=row_inside)
    rstd = tl.rsqrt(tl.sum(x * x, 1, keep_dims=True) * (1.0 / n) + eps)
    tl.store(statistics_ptr + row * (1 + centered), rstd, mask=row_inside)
    y = x * rstd
    if rounded:
        y = y.to(y_ptr.dtype.element_ty).to(tl.float32)
    if has_weight:
        y *= weight.to(tl.float32) + offset
    if has_bias:
        y += bias.to(tl.float32)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _load_with_residual(x_ptr, residual_ptr, at, inside, has_residual: tl.constexpr):
    """Load ``x``, or ``x + residual`` rounded to the dtype of `x`, and return it in float32."""
    x = tl.load(x_ptr + at, mask=inside, other=0.0)
    if has_residual:
        residual = tl.load(residual_ptr + at, mask=inside, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x_ptr.dtype.element_ty)
    return x.to(tl.float32)


@triton.jit
def norm_forward_pieces(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    h_ptr,
    statistics_ptr,
    rows: tl.constexpr,
    group: tl.constexpr,
    n: tl.constexpr,
    eps: tl.constexpr,
    offset: tl.constexpr,
    centered: tl.constexpr,
    rounded: tl.constexpr,
    has_residual: tl.constexpr,
    has_weight: tl.constexpr,
    has_bias: tl.constexpr,
    block: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * n
    residual_ptr += row * n
    y_ptr += row * n
    h_ptr += row * n
    if group < rows:
        weight_ptr += row // group * n
        bias_ptr += row // group * n
    columns = tl.arange(0, block)
    means = tl.zeros([block], tl.float32)
    squares = tl.zeros([block], tl.float32)
    for start in range(0, n, block):
        inside = start + columns < n
        x = _load_with_residual(x_ptr, residual_ptr, start + columns, inside, has_residual)
        if centered:
            # Each lane inside the row has now read one more element. A lane outside adds 0.
            away = tl.where(inside, x - means, 0.0)
            means += away / (start // block + 1)
            squares += away * tl.where(inside, x - means, 0.0)
        else:
            squares += x * x
    if centered:
        seen = (n - columns + block - 1) // block
        mean = tl.sum(means * seen, 0) * (1.0 / n)
        away = means - mean
        squares += seen * away * away
        tl.store(statistics_ptr + row * 2 + 1, mean)
    else:
        mean = 0.0
    rstd = tl.rsqrt(tl.sum(squares, 0) * (1.0 / n) + eps)
    tl.store(statistics_ptr + row * (1 + centered), rstd)
    for start in range(0, n, block):
        at = start + columns
        inside = at < n
        x = _load_with_residual(x_ptr, residual_ptr, at, inside, has_residual)
        if has_residual:
            tl.store(h_ptr + at, x.to(h_ptr.dtype.element_ty), mask=inside)
        y = (x - mean) * rstd
        if rounded:
            y = y.to(y_ptr.dtype.element_ty).to(tl.float32)
        if has_weight:
            y *= tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32) + offset
        if has_bias:
            y += tl.load(bias_ptr + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def norm_backward_sums(
    x_ptr,
    weight_ptr,
    statistics_ptr,
    ct_ptr,
    sums_ptr,
    rows: tl.constexpr,
    group: tl.constexpr,
    n: tl.constexpr,
    offset: tl.constexpr,
    centered: tl.constexpr,
    has_weight: tl.constexpr,
    block: tl.constexpr,
):
    """Compute the two means over a row that its gradient needs: of ``m * hat``, and of ``m``."""
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * n
    ct_ptr += row * n
    if group < rows:
        weight_ptr += row // group * n
    rstd = tl.load(statistics_ptr + row * (1 + centered))
    mean = tl.load(statistics_ptr + row * 2 + 1) if centered else 0.0
    columns = tl.arange(0, block)
    along = tl.zeros([block], tl.float32)
    total = tl.zeros([block], tl.float32)
    for start in range(0, n, block):
        at = start + columns
        x = tl.load(x_ptr + at, mask=at < n, other=0.0).to(tl.float32)
        m = tl.load(ct_ptr + at, mask=at < n, other=0.0).to(tl.float32)
        if has_weight:
            m *= tl.load(weight_ptr + at, mask=at < n, other=0.0).to(tl.float32) + offset
        along += m * (x - mean) * rstd
        if centered:
            total += m
    tl.store(sums_ptr + row * 2, tl.sum(along, 0) * (1.0 / n))
    tl.store(sums_ptr + row * 2 + 1, tl.sum(total, 0) * (1.0 / n))


@triton.jit
def norm_backward(
    x_ptr,
    weight_ptr,
    statistics_ptr,
    ct_ptr,
    ct_h_ptr,
    sums_ptr,
    grad_ptr,
    partial_ptr,
    group: tl.constexpr,  # rows that share weight and bias, split among `programs` programs
    per_group: tl.constexpr,
    n: tl.constexpr,
    offset: tl.constexpr,
    centered: tl.constexpr,
    has_residual: tl.constexpr,
    has_weight: tl.constexpr,
    has_bias: tl.constexpr,
    programs: tl.constexpr,
    tile: tl.constexpr,
    block: tl.constexpr,
    stages: tl.constexpr,
):
    """Compute the gradient of x, and a program's part of the gradients of weight and bias.

    A program takes whole rows, or a block of columns where rows are too long. In the second case the means over each
    row are already in `sums_ptr`.
    """
    program = tl.program_id(0) % programs
    of_group = (tl.program_id(0) // programs).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)[None, :]
    in_row = columns < n
    x_ptr += of_group * group * n
    ct_ptr += of_group * group * n
    ct_h_ptr += of_group * group * n
    grad_ptr += of_group * group * n
    statistics_ptr += of_group * group * (1 + centered)
    sums_ptr += of_group * group * 2
    if per_group:
        weight_ptr += of_group * n
    weight = tl.zeros([1, block], tl.float32)
    if has_weight:
        weight = tl.load(weight_ptr + columns, mask=in_row, other=0.0)
    # Sums over the rows of all tiles. The rows within a tile are added up at the end.
    grad_weight = tl.zeros([tile, block], tl.float32)
    grad_bias = tl.zeros([tile, block], tl.float32)
    for start in tl.range(program * tile, group, programs * tile, num_stages=stages):
        row = start + tl.arange(0, tile)[:, None].to(tl.int64)
        row_inside = row < group
        inside = row_inside & in_row
        at = row * n + columns
        x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
        ct = tl.load(ct_ptr + at, mask=inside, other=0.0).to(tl.float32)
        rstd = tl.load(statistics_ptr + row * (1 + centered), mask=row_inside, other=0.0)
        if centered:
            x -= tl.load(statistics_ptr + row * 2 + 1, mask=row_inside, other=0.0)
        hat = x * rstd
        m = ct
        if has_weight:
            m = ct * (weight.to(tl.float32) + offset)
            grad_weight += ct * hat
        if has_bias:
            grad_bias += ct
        if block < n:
            along = tl.load(sums_ptr + row * 2, mask=row_inside, other=0.0)
            grad = m - hat * along
            if centered:
                grad -= tl.load(sums_ptr + row * 2 + 1, mask=row_inside, other=0.0)
        else:
            grad = m - hat * (tl.sum(m * hat, 1, keep_dims=True) * (1.0 / n))
            if centered:
                grad -= tl.sum(m, 1, keep_dims=True) * (1.0 / n)
        grad *= rstd
        if has_residual:
            grad += tl.load(ct_h_ptr + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(grad_ptr + at, grad.to(grad_ptr.dtype.element_ty), mask=inside)
    partial = partial_ptr + (of_group * programs + program) * (has_weight + has_bias) * n
    if has_weight:
        tl.store(partial + columns, tl.sum(grad_weight, 0, keep_dims=True), mask=in_row)
        partial += n
    if has_bias:
        tl.store(partial + columns, tl.sum(grad_bias, 0, keep_dims=True), mask=in_row)
