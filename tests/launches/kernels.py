"""Kernels as a user writes them, and the functions that launch them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def half_of(x):
    return x * 0.5


@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    x = tl.load(x_ptr + i, mask=inside)
    y = tl.load(y_ptr + i, mask=inside)
    tl.store(out_ptr + i, half_of(x) * 2 + y, mask=inside)


# Without `restore_value`, Triton itself would scale the values again in every run that it times.
@triton.autotune(
    configs=[triton.Config({"BLOCK": 64}), triton.Config({"BLOCK": 128}, num_warps=8)],
    key=["n"],
    restore_value=["x_ptr"],
)
@triton.jit
def scale_kernel(x_ptr, factor, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    tl.store(x_ptr + i, tl.load(x_ptr + i, mask=inside) * factor, mask=inside)


@triton.heuristics({"BLOCK": lambda args: triton.next_power_of_2(args["n"]), "EVEN": lambda args: args["n"] % 2 == 0})
@triton.jit
def row_sum_kernel(out_ptr, x_ptr, x_row, n, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    row = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    if EVEN:
        x = tl.load(x_ptr + row * x_row + i, mask=i < n, other=0.0)
    else:
        x = tl.load(x_ptr + row * x_row + i, mask=i < n, other=0.0)
    tl.store(out_ptr + row, tl.sum(x, 0))


@triton.jit
def mean_kernel(x_ptr, out_ptr, count, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n, other=0.0)
    tl.store(out_ptr, tl.sum(x, 0) / count)


@triton.jit
def product_kernel(a_ptr, b_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    at = i[:, None] * N + i[None, :]
    tl.store(out_ptr + at, tl.dot(tl.load(a_ptr + at), tl.load(b_ptr + at)).to(out_ptr.dtype.element_ty))


def product(a, b):
    out = torch.empty_like(a)
    product_kernel[(1,)](a, b, out, a.shape[0])
    return out


def blocks(n):
    return lambda meta: (triton.cdiv(n, meta["BLOCK"]),)


def add(x, y):
    out = torch.empty_like(x)
    add_kernel[(triton.cdiv(x.numel(), 64),)](x, y, out, x.numel(), BLOCK=64)
    return out


def scaled_in_place(x, factor=3.0):
    x = x.clone()
    scale_kernel[blocks(x.numel())](x, factor, x.numel())
    return x


def row_sums(x):
    out = torch.empty(x.shape[0])
    row_sum_kernel[(x.shape[0],)](out, x, x.stride(0), x.shape[1])
    return out


def every_other_row_sum(x):
    return row_sums(x[::2, :3])


def column_scaled(x):
    x = x.clone()
    column = x.t()[1]  # a view with gaps
    scale_strided[(1,)](column, column.stride(0), column.numel(), BLOCK=16)
    return x


@triton.jit
def scale_strided(x_ptr, stride, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(x_ptr + i * stride, tl.load(x_ptr + i * stride, mask=i < n) * 10, mask=i < n)


def mean_of_positive(x):
    """Read a number from a tensor for the kernel, and assert a property of the data."""
    positive = x > 0
    count = positive.sum().item()
    assert positive.sum() > 0, "nothing is positive"
    out = torch.empty(1, device=x.device)
    mean_kernel[(1,)](torch.where(positive, x, 0), out, count, x.numel(), BLOCK=16)
    return out


class Scaled(torch.autograd.Function):
    """Returns ``3 * x``, by a kernel, with a backward by a kernel."""

    @staticmethod
    def forward(ctx, x):
        return scaled_in_place(x)

    @staticmethod
    def backward(ctx, grad):
        return scaled_in_place(grad.contiguous(), 3.0)


def scaled(x):
    return Scaled.apply(x) ** 2


class Halved(torch.autograd.Function):
    """Returns ``x / 2``. Only the backward launches a kernel."""

    @staticmethod
    def forward(ctx, x):
        return x / 2

    @staticmethod
    def backward(ctx, g):
        return add(g, g) / 4


def wrapped_add(x, y):
    out = torch.empty_like(x)
    torch.library.wrap_triton(add_kernel)[(triton.cdiv(x.numel(), 64),)](x, y, out, x.numel(), BLOCK=64)
    return out


@torch.library.triton_op("jtbridge_tests::triton_add", mutates_args=())
def operator_add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return wrapped_add(x, y)


operator_add.register_autograd(lambda ctx, grad: (grad, 2 * grad))  # 2 distinguishes it from the true gradient


@torch.library.triton_op("jtbridge_tests::triton_sum", mutates_args=())
def operator_sum(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return wrapped_add(x, y)


def _backward_of_sum(ctx, grad):
    return operator_sum(grad, torch.zeros_like(grad)), grad


operator_sum.register_autograd(_backward_of_sum)
batches_of_sum: list[torch.Size] = []


@operator_sum.register_vmap
def _(info, in_dims, x, y):
    """A batch is more of the same."""
    whole = [
        z.expand(info.batch_size, *z.shape) if dim is None else z.movedim(dim, 0)
        for z, dim in zip((x, y), in_dims, strict=True)
    ]
    batches_of_sum.append(whole[0].shape)
    return operator_sum(*(z.contiguous() for z in whole)), 0


def returns_a_number(x):
    count = (x >= 0).sum().item()
    out = torch.empty(1, device=x.device)
    mean_kernel[(1,)](x, out, count, x.numel(), BLOCK=16)
    return out, count


def counts_without_a_kernel(x):
    assert (x >= 0).all(), "something is negative"
    return x * (x > 0).sum().item()


@triton.jit
def rows_scaled_kernel(x_ptr, out_ptr, rows, N: tl.constexpr, BLOCK: tl.constexpr, LOOP: tl.constexpr):
    i = tl.arange(0, BLOCK)
    for j in range(LOOP):
        at = j.to(tl.int64) * N + i
        inside = (i < N) & (j < rows)
        tl.store(out_ptr + at, tl.load(x_ptr + at, mask=inside, other=0.0) * (j + 1), mask=inside)
    for j in tl.range(LOOP, LOOP + 2, num_stages=1):
        at = j.to(tl.int64) * N + i
        inside = (j < rows) & (i < N)
        tl.store(out_ptr + at, tl.load(x_ptr + at, mask=inside, other=0.0) * -j, mask=inside)


def rows_scaled(x):
    out = torch.zeros_like(x)
    rows_scaled_kernel[(1,)](x, out, x.shape[0] - 1, N=x.shape[1], BLOCK=8, LOOP=4)
    return out


@triton.autotune(configs=[triton.Config({}, num_warps=2), triton.Config({}, num_warps=4)], key=[])
@triton.jit
def warps_kernel(x_ptr, out_ptr, num_stages: tl.constexpr, num_warps: tl.constexpr):
    i = tl.program_id(0)
    tl.store(out_ptr + i, tl.load(x_ptr + i) * num_stages)


@triton.jit
def stages_kernel(x_ptr, out_ptr, N: tl.constexpr, num_warps: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(out_ptr + i, tl.load(x_ptr + i) * num_warps)


def options_are_parameters(x):
    """A kernel whose own parameters have the names of options of a launch."""
    by_warps, by_stages = torch.zeros_like(x), torch.zeros_like(x)
    warps_kernel[lambda meta: (meta["num_warps"],)](x, by_warps, num_stages=3)
    stages_kernel[(2,)](x, by_stages, 4, num_warps=8)
    return by_warps, by_stages


def launched_short(x):
    stages_kernel[(2,)](x, torch.zeros_like(x), 4)


@triton.jit
def rounded_kernel(x_ptr, y_ptr, out_ptr, total_ptr, most_ptr, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n, other=0.0)
    y = tl.load(y_ptr + i, mask=i < n, other=0.0)
    found = tl.where(x < y, x * y - x, -x / (y + i.to(y.dtype)))
    tl.store(out_ptr + i, found, mask=i < n)
    tl.atomic_add(total_ptr + i * 0, x, mask=i < n)
    tl.atomic_add(total_ptr + 1, tl.sum(x, 0))
    tl.store(most_ptr, tl.max(x, 0))


def rounded(x, y):
    """In the dtype of x throughout; the sum of x added up one by one, and at once; the largest of x."""
    out, total, most = torch.empty_like(x), torch.zeros_like(x[:2]), torch.empty_like(x[:1])
    rounded_kernel[(1,)](x, y, out, total, most, x.numel(), BLOCK=64)
    return out, total, most


numbers = tl.arange  # such aliases occur in modules of helpers
largest = tl.maximum


@triton.jit
def positive_part(x):
    return largest(x, 0.0)


@triton.jit
def clipped_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    i = numbers(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n)
    tl.store(out_ptr + i, positive_part(x), mask=i < n)


def clipped(x):
    out = torch.empty_like(x)
    clipped_kernel[(1,)](x, out, x.numel(), BLOCK=64)
    return out
