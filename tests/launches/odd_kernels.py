"""Kernels that store through pointers in all kinds of ways."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def put(p, value, inside):
    tl.store(p, value, mask=inside)


@triton.jit
def in_a_loop(x_ptr, index_ptr, out_ptr, n):
    i = tl.arange(0, 64)
    p = out_ptr + tl.load(index_ptr + i).to(tl.int32)
    q = x_ptr + i
    for s in range(0, n, 64):
        put(p, tl.load(q, mask=i + s < n), i + s < n)
        p += 64
        q += 64


@triton.jit
def one_of_two(x_ptr, y_ptr, flag):
    q = x_ptr if flag else y_ptr
    tl.store(q + tl.arange(0, 64), 0.0)


@triton.jit
def by_a_branch(a_ptr, b_ptr, c_ptr, n):
    i = tl.arange(0, 64)
    x = tl.load(a_ptr + i)
    if n > 3:
        tl.store(c_ptr + i, x)
    else:
        tl.store(b_ptr + i, x)


@triton.jit
def in_a_while_loop(a_ptr, b_ptr, n):
    i = tl.arange(0, 64)
    p = a_ptr + i
    q = b_ptr + i
    k = 0
    while k < n:
        x = tl.load(p)
        tl.store(q, x)
        p += 64
        q += 64
        k += 64


@triton.jit
def atomically(x_ptr, sum_ptr):
    tl.atomic_add(sum_ptr, tl.sum(tl.load(x_ptr + tl.arange(0, 64)), 0))


@triton.jit
def swapped(a_ptr, b_ptr, n):
    p = a_ptr
    q = b_ptr
    for _ in range(n):
        tl.store(p, tl.load(q))
        r = p
        p = q
        q = r


@triton.jit
def nothing(x_ptr):
    tl.load(x_ptr)


@triton.jit
def from_memory(x_ptr):
    p = tl.load(x_ptr.to(tl.pointer_type(tl.int64)))
    tl.store(p.to(tl.pointer_type(tl.float32)), 1.0)
