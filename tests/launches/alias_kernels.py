"""Autotuned kernels that write in place, to memory that is not their first argument.

In an eager call on a GPU, Triton itself times them, and without `restore_value` each timed run would write again.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

CONFIGS = [triton.Config({"BLOCK": 16}), triton.Config({"BLOCK": 32})]


@triton.autotune(configs=CONFIGS, key=["n"], restore_value=["out_ptr"])
@triton.jit
def accumulate_kernel(x_ptr, n, out_ptr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(out_ptr + i, mask=i < n) + tl.load(x_ptr + i, mask=i < n)
    tl.store(out_ptr + i, total, mask=i < n)


def accumulated(x, y):
    """x is written to."""
    n = x.numel()
    accumulate_kernel[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](y, n, x)
    return x


@triton.autotune(configs=CONFIGS, key=["n"], restore_value=["first_ptr", "second_ptr"])
@triton.jit
def several_kernel(fresh_ptr, x_ptr, first_ptr, n, second_ptr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n)
    tl.store(fresh_ptr + i, x * 100, mask=i < n)
    tl.store(first_ptr + i, tl.load(first_ptr + i, mask=i < n) + x, mask=i < n)
    tl.store(second_ptr + i, tl.load(second_ptr + i, mask=i < n) - x, mask=i < n)


def several(x, first, second):
    """Write to two arguments, and to a tensor without values."""
    fresh, n = torch.empty_like(x), x.numel()
    several_kernel[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](fresh, x, first, n, second)
    return fresh, first, second
