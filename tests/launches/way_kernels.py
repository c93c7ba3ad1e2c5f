"""Kernels launched in all the ways that Triton allows, and numbers as their arguments."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def add_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(out_ptr + i, tl.load(x_ptr + i, mask=i < n), mask=i < n)


def blocks(meta):
    return (triton.cdiv(meta["n"], meta["BLOCK"]),)


def modelled(x_ptr, out_ptr, n, BLOCK, **_):
    """Return the modelled time of a configuration: the largest block is the fastest."""
    assert x_ptr.shape == out_ptr.shape
    return n / BLOCK


configs = [triton.Config({"BLOCK": 16}), triton.Config({"BLOCK": 32}, num_warps=2)]
by_a_model = triton.autotune(
    configs, key=["n"], restore_value=["out_ptr"], prune_configs_by={"perf_model": modelled, "top_k": 1}
)(add_kernel)
on_amd = triton.autotune([triton.Config({"BLOCK": 16, "waves_per_eu": w}) for w in (1, 2)], key=["n"])(add_kernel)
reset = triton.autotune(configs, key=["n"], reset_to_zero=["out_ptr"])(add_kernel)
held = add_kernel[(4,)]


def launching(launch):
    def f(x):
        out = torch.zeros_like(x)
        launch(x, out, x.numel())
        return out

    return f


WAYS = {
    "by_a_model": launching(by_a_model[blocks]),
    "on_amd": launching(on_amd[blocks]),
    "reset": launching(reset[blocks]),
    "held": launching(lambda *args: held(*args, BLOCK=16)),
    "run": launching(lambda *args: add_kernel.run(*args, BLOCK=16, grid=(4,), warmup=False)),
    "by_name": launching(lambda x, out, n: add_kernel[[4]](BLOCK=16, n=n, out_ptr=out, x_ptr=x)),
    "with_registers": launching(lambda *args: add_kernel[(4,)](*args, BLOCK=16, maxnreg=64)),
}


def waits_for_all(x):
    add_kernel[(4,)](x, x, x.numel(), BLOCK=16, launch_cooperative_grid=True)
    return x


@triton.jit(do_not_specialize=["one"])
def numbers_kernel(x_ptr, out_ptr, flag, one, many: tl.int64, exact: tl.float64, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i) * flag.to(tl.float32) + one.to(tl.float32)
    if flag:
        x += (many * many >> 40).to(tl.float32)
    tl.store(out_ptr + i, x + ((exact - 1.0) * 1e12).to(tl.float32))


def numbers(x, flag):
    out = torch.empty_like(x)
    numbers_kernel[(1,)](x, out, flag, 1, 1 << 21, 1 + 3e-12, BLOCK=x.numel())
    return out


@triton.jit
def described_kernel(x_ptr, out_ptr, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    x = tl.make_tensor_descriptor(x_ptr, [rows, columns], [columns, 1], [ROWS, COLUMNS])
    out = tl.make_tensor_descriptor(out_ptr, [rows, columns], [columns, 1], [ROWS, COLUMNS])
    row = tl.program_id(0) * ROWS
    out.store([row, 0], x.load([row, 0]) * 2)


def described(x):
    out = torch.empty_like(x)
    described_kernel[(triton.cdiv(x.shape[0], 2),)](x, out, x.shape[0], x.shape[1], 2, 16)
    return out


@triton.jit
def square_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n)
    tl.store(out_ptr + i, x * x, mask=i < n)


@torch.library.triton_op("jtbridge_tests::triton_square_", mutates_args={"x"})
def square_(x: torch.Tensor) -> None:
    torch.library.wrap_triton(square_kernel)[(triton.cdiv(x.numel(), 16),)](x, x, x.numel(), BLOCK=16)


def end_squared(x):
    x = x.clone()
    square_(x[16:])
    return x


def of_complex(x):
    z = torch.complex(x, x)
    square_kernel[(4,)](z, z, z.numel(), BLOCK=16)
    return z
