"""A kernel that uses a global variable, itself and in a function that it calls."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

FACTOR = tl.constexpr(2)
SHIFT = tl.constexpr(3)


@triton.jit
def shifted(x):
    return x + SHIFT


@triton.jit
def line_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n)
    tl.store(out_ptr + i, shifted(x * FACTOR), mask=i < n)


def line(x):
    out = torch.empty_like(x)
    line_kernel[(triton.cdiv(x.numel(), 16),)](x, out, x.numel(), BLOCK=16)
    return out
