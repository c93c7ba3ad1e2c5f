"""Cross-entropy over rows. The forward reads each row once, and the backward reads it once.

In the forward, a program takes its row in tiles of ``[pieces, lanes]``. Each lane has its own running maximum and sum
(Milakov and Gimelshein, Online normalizer calculation for softmax, arXiv:1805.02867). The lanes lie side by side in
memory, so that all pieces of a lane belong to one thread: within the loop, threads exchange nothing, and the sums are
scaled once for every `pieces` elements. The backward is elementwise, with many programs to a row.

A row that is ignored, or whose label is not a class, is not read.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def cross_entropy_forward(
    logits_ptr,
    labels_ptr,
    loss_ptr,
    lse_ptr,
    n: tl.constexpr,
    pieces: tl.constexpr,
    lanes: tl.constexpr,
    ignore_index: tl.constexpr,
    smoothing: tl.constexpr,
):
    program = tl.program_id(0)
    row = logits_ptr + program.to(tl.int64) * n
    label = tl.load(labels_ptr + program)
    if (label != ignore_index) & (label >= 0) & (label < n):
        offsets = tl.arange(0, pieces)[:, None] * lanes + tl.arange(0, lanes)[None, :]
        tops = tl.full([lanes], -float("inf"), tl.float32)
        totals = tl.zeros([lanes], tl.float32)
        sums = tl.zeros([lanes], tl.float32)
        for start in range(0, n, pieces * lanes):
            inside = start + offsets < n
            x = tl.load(row + start + offsets, mask=inside, other=-float("inf")).to(tl.float32)
            new = tl.maximum(tops, tl.max(x, 0))
            base = tl.where(new > -float("inf"), new, 0.0)  # no inf - inf in a lane that has read only -inf
            totals = totals * tl.exp(tops - base) + tl.sum(tl.exp(x - base[None, :]), 0)
            tops = new
            if smoothing > 0:
                sums += tl.sum(tl.where(inside, x, 0.0), 0)
        top = tl.max(tops, 0)
        log_sum = tl.log(tl.sum(totals * tl.exp(tops - top), 0))
        # The largest logit is subtracted first, so that a small loss is not a difference of large numbers.
        loss = log_sum + (1 - smoothing) * (top - tl.load(row + label).to(tl.float32))
        if smoothing > 0:
            loss += smoothing * (top - tl.sum(sums, 0) / n)
        tl.store(loss_ptr + program, loss)
        tl.store(lse_ptr + program, top + log_sum)
    else:
        tl.store(loss_ptr + program, tl.where(label == ignore_index, 0.0, float("nan")))
        tl.store(lse_ptr + program, 0.0)


@triton.jit
def cross_entropy_backward(
    logits_ptr,
    labels_ptr,
    lse_ptr,
    ct_ptr,
    grad_ptr,
    n: tl.constexpr,
    block: tl.constexpr,
    ignore_index: tl.constexpr,
    smoothing: tl.constexpr,
):
    program = tl.program_id(0)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    offsets = program.to(tl.int64) * n + columns
    inside = columns < n
    label = tl.load(labels_ptr + program)
    if (label != ignore_index) & (label >= 0) & (label < n):
        lse = tl.load(lse_ptr + program)
        ct = tl.load(ct_ptr + program)
        x = tl.load(logits_ptr + offsets, mask=inside, other=-float("inf")).to(tl.float32)
        grad = ct * (tl.exp(x - lse) - smoothing / n - tl.where(columns == label, 1 - smoothing, 0.0))
        tl.store(grad_ptr + offsets, grad.to(grad_ptr.dtype.element_ty), mask=inside)
    else:
        grad = tl.zeros([block], tl.float32) + tl.where(label == ignore_index, 0.0, float("nan"))
        tl.store(grad_ptr + offsets, grad.to(grad_ptr.dtype.element_ty), mask=inside)
