"""Softmax over rows. A program takes a tile of short rows, or one longer row.

The forward reads rows that fit into registers once. It reads a longer row twice: first for the running maximum and sum
(Milakov and Gimelshein, Online normalizer calculation for softmax, arXiv:1805.02867), then for the result. The backward
of a longer row goes over it twice: first for a sum, then for the gradient.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def softmax_forward(
    x_ptr, y_ptr, rows: tl.constexpr, n: tl.constexpr, tile: tl.constexpr, block: tl.constexpr, log: tl.constexpr
):
    if n <= block:
        row = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)[:, None]
        columns = tl.arange(0, block)[None, :]
        inside = (row < rows) & (columns < n)
        at = row * n + columns
        # A row beyond the last one is all zeros, and is not stored.
        x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
        x = tl.where(columns < n, x, -float("inf"))
        top = tl.max(x, 1, keep_dims=True)
        e = tl.exp(x - top)
        total = tl.sum(e, 1, keep_dims=True)
        y = x - top - tl.log(total) if log else e / total
        tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=inside)
    else:
        row = tl.program_id(0).to(tl.int64) * n
        columns = tl.arange(0, block)
        tops = tl.full([block], -float("inf"), tl.float32)
        totals = tl.zeros([block], tl.float32)
        for start in range(0, n, block):
            x = tl.load(x_ptr + row + start + columns, mask=start + columns < n, other=-float("inf")).to(tl.float32)
            new = tl.maximum(tops, x)
            base = tl.where(new > -float("inf"), new, 0.0)  # no inf - inf in a lane that has read only -inf
            totals = totals * tl.exp(tops - base) + tl.exp(x - base)
            tops = new
        top = tl.max(tops, 0)
        total = tl.sum(totals * tl.exp(tops - top), 0)
        for start in range(0, n, block):
            inside = start + columns < n
            x = tl.load(x_ptr + row + start + columns, mask=inside, other=-float("inf")).to(tl.float32)
            y = x - top - tl.log(total) if log else tl.exp(x - top) / total
            tl.store(y_ptr + row + start + columns, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def softmax_backward(
    y_ptr,
    ct_ptr,
    grad_ptr,
    rows: tl.constexpr,
    n: tl.constexpr,
    tile: tl.constexpr,
    block: tl.constexpr,
    log: tl.constexpr,
):
    if n <= block:
        row = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)[:, None]
        columns = tl.arange(0, block)[None, :]
        inside = (row < rows) & (columns < n)
        at = row * n + columns
        y = tl.load(y_ptr + at, mask=inside, other=0.0).to(tl.float32)
        ct = tl.load(ct_ptr + at, mask=inside, other=0.0).to(tl.float32)
        total = tl.sum(ct if log else ct * y, 1, keep_dims=True)
        grad = ct - tl.exp(y) * total if log else y * (ct - total)
        tl.store(grad_ptr + at, grad.to(grad_ptr.dtype.element_ty), mask=inside)
    else:
        row = tl.program_id(0).to(tl.int64) * n
        columns = tl.arange(0, block)
        sums = tl.zeros([block], tl.float32)
        for start in range(0, n, block):
            inside = start + columns < n
            ct = tl.load(ct_ptr + row + start + columns, mask=inside, other=0.0).to(tl.float32)
            if log:
                sums += ct
            else:
                y = tl.load(y_ptr + row + start + columns, mask=inside, other=0.0).to(tl.float32)
                sums += ct * y
        total = tl.sum(sums, 0)
        for start in range(0, n, block):
            inside = start + columns < n
            y = tl.load(y_ptr + row + start + columns, mask=inside, other=0.0).to(tl.float32)
            ct = tl.load(ct_ptr + row + start + columns, mask=inside, other=0.0).to(tl.float32)
            grad = ct - tl.exp(y) * total if log else y * (ct - total)
            tl.store(grad_ptr + row + start + columns, grad.to(grad_ptr.dtype.element_ty), mask=inside)
