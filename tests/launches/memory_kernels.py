"""Kernels that get views, or the same memory twice."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def scale_two_kernel(q_ptr, k_ptr, q_row, k_row, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    q = q_ptr + tl.program_id(0) * q_row + i
    k = k_ptr + tl.program_id(0) * k_row + i
    tl.store(q, tl.load(q, mask=i < n) * 2, mask=i < n)
    tl.store(k, tl.load(k, mask=i < n) * 3, mask=i < n)


@triton.jit
def copy_rows_kernel(x_ptr, out_ptr, row, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + tl.program_id(0) * row + i, mask=i < n)
    tl.store(out_ptr + tl.program_id(0) * n + i, x, mask=i < n)


@triton.jit
def double_into_kernel(x_ptr, out_ptr, n):
    for i in range(n):
        tl.store(out_ptr + i, tl.load(x_ptr + i) * 2)


@triton.jit
def put_two_kernel(a_ptr, b_ptr):
    tl.store(a_ptr, 5.0)
    tl.store(b_ptr + 1, 7.0)


def halves_scaled(x):
    """Scale in place, like rotary embeddings of the result of one projection."""
    x = x.clone()
    q, k = x.chunk(2, dim=-1)
    scale_two_kernel[(x.shape[0],)](q, k, q.stride(0), k.stride(0), q.shape[1], BLOCK=4)
    return x


def columns_scaled(x):
    """Do the same to a column-major tensor."""
    x = x.t().contiguous().t() + 0
    q, k = x[:, 0], x[:, 4]
    scale_two_kernel[(1,)](q, k, 0, 0, q.shape[0], BLOCK=4)
    return x


def from_the_first_row(x):
    """Pass the address of a part, from which the kernel reaches the rest."""
    out = x.new_empty(x.shape[0], 3)
    copy_rows_kernel[(x.shape[0],)](x[0, 2:], out, x.stride(0), 3, BLOCK=4)
    return out


def by_the_shapes_of_views(x):
    """Use the shape of a view as the grid."""
    out = x.new_zeros(x.shape[1], 2)
    copy_rows_kernel[lambda meta: (meta["x_ptr"].shape[0],)](x.t(), out, 2, 2, BLOCK=4)
    return out


def powers(x):
    """Compute each element from the previous one, which the kernel itself has written."""
    x = x.reshape(-1) + 0
    double_into_kernel[(1,)](x[:-1], x[1:], 5)
    return x


def put_twice(x):
    x = x.reshape(-1) + 0
    put_two_kernel[(1,)](x, x)
    return x


def written_as_two_types(x):
    x = x + 0
    put_two_kernel[(1,)](x, x.view(torch.int32))
    return x


def written_detached(x):
    x = x.reshape(-1) + 0
    put_two_kernel[(1,)](x[:4].detach(), x[2:6].detach())
    return x
