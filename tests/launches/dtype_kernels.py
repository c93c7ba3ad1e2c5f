"""Kernels of many dtypes, and of NVIDIA's mathematical library."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def cast_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n)
    tl.store(out_ptr + i, x.to(out_ptr.dtype.element_ty), mask=i < n)


def cast(dtype):
    def to(x):
        out = torch.empty_like(x, dtype=dtype)
        cast_kernel[(triton.cdiv(x.numel(), 16),)](x, out, x.numel(), BLOCK=16)
        return out

    return to


def cast_or_nothing(x):
    """The grid is empty where x is."""
    out = torch.ones(3, device=x.device)
    cast_kernel[(x.numel(),)](x, out, x.numel(), BLOCK=16)
    return out


@triton.jit
def wide_kernel(x_ptr, most_ptr, next_ptr, BLOCK: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, BLOCK))
    tl.store(most_ptr, tl.argmax(x, 0).to(tl.int64) << 40)
    tl.store(next_ptr + tl.arange(0, BLOCK), x.to(tl.float64) + 2.0**-40)


def wide(x):
    """Where the largest number is, and what a double after x adds; numbers of 64 bits inside the function alone."""
    most, after = torch.empty(1, dtype=torch.int64, device=x.device), torch.empty_like(x, dtype=torch.float64)
    wide_kernel[(1,)](x, most, after, BLOCK=x.numel())
    out = torch.empty_like(x)
    narrow_kernel[(1,)](most, after - x, out, BLOCK=x.numel())
    return out


@triton.jit
def narrow_kernel(most_ptr, more_ptr, out_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    found = (tl.load(most_ptr) >> 40) + tl.load(more_ptr + i) * 2.0**40
    tl.store(out_ptr + i, found.to(tl.float32))


@triton.jit
def library_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i)
    tl.store(out_ptr + i, libdevice.round(x))
    tl.store(out_ptr + BLOCK + i, libdevice.signbit(x).to(tl.float32))
    tl.store(out_ptr + 2 * BLOCK + i, tl.where(libdevice.isnan(x) | (x > 1), libdevice.pow(2.0, x), x))
    tl.store(out_ptr + 3 * BLOCK + i, libdevice.div_rn(x, tl.load(x_ptr + 1)))


def library(x):
    out = x.new_empty(4, x.numel())
    library_kernel[(1,)](x, out, BLOCK=x.numel())
    return out


@triton.jit
def remainder_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out_ptr + i, libdevice.remainder(tl.load(x_ptr + i), 2.0))


def remainder(x):
    out = torch.empty_like(x)
    remainder_kernel[(1,)](x, out, BLOCK=x.numel())
    return out
