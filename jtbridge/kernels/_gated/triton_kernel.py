"""Gated activations: elementwise kernels, with a program for each block of elements, each read and written once.

Every block that is full is loaded without a mask, because a mask may split a vector load where it ends. Only the last
block may be partial.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))  # 0 where the exponential overflows: its product with a finite number is 0 too


@triton.jit
def _activation(x, activation: tl.constexpr):
    """Return the activation and its derivative. The compiler leaves out a result that is not used."""
    if activation == "silu":
        s = sigmoid(x)
        y = x * s
        slope = s * (1.0 + x * (1.0 - s))
    elif activation == "gelu_tanh":
        # x / 2 * (1 + tanh(z)) = x * sigmoid(2 z), which takes one exponential and has no cancellation.
        square = x * x
        s = sigmoid(1.5957691216057308 * x * (1.0 + 0.044715 * square))
        y = x * s
        slope = s * (1.0 + x * (1.0 - s) * 1.5957691216057308 * (1.0 + 0.134145 * square))
    else:
        below = 0.5 + 0.5 * tl.erf(0.7071067811865476 * x)
        y = x * below
        slope = below + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    return y, slope


@triton.jit
def _forward(gate_ptr, up_ptr, out_ptr, at, inside, activation: tl.constexpr, rounded: tl.constexpr):
    gate = tl.load(gate_ptr + at, mask=inside).to(tl.float32)
    up = tl.load(up_ptr + at, mask=inside).to(tl.float32)
    y, _ = _activation(gate, activation)
    if rounded:
        y = y.to(out_ptr.dtype.element_ty).to(tl.float32)
    tl.store(out_ptr + at, (y * up).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def gated_forward(
    gate_ptr, up_ptr, out_ptr, size: tl.constexpr, block: tl.constexpr, activation: tl.constexpr, rounded: tl.constexpr
):
    start = tl.program_id(0).to(tl.int64) * block
    at = tl.arange(0, block)
    if start + block <= size:
        _forward(gate_ptr + start, up_ptr + start, out_ptr + start, at, None, activation, rounded)
    else:
        _forward(gate_ptr + start, up_ptr + start, out_ptr + start, at, at < size - start, activation, rounded)


@triton.jit
def _backward(
    gate_ptr, up_ptr, ct_ptr, grad_gate_ptr, grad_up_ptr, at, inside, activation: tl.constexpr, rounded: tl.constexpr
):
    gate = tl.load(gate_ptr + at, mask=inside).to(tl.float32)
    up = tl.load(up_ptr + at, mask=inside).to(tl.float32)
    ct = tl.load(ct_ptr + at, mask=inside).to(tl.float32)
    y, slope = _activation(gate, activation)
    by_y = ct * up
    if rounded:
        y = y.to(grad_up_ptr.dtype.element_ty).to(tl.float32)
        by_y = by_y.to(grad_gate_ptr.dtype.element_ty).to(tl.float32)
    tl.store(grad_gate_ptr + at, (by_y * slope).to(grad_gate_ptr.dtype.element_ty), mask=inside)
    tl.store(grad_up_ptr + at, (ct * y).to(grad_up_ptr.dtype.element_ty), mask=inside)


@triton.jit
def gated_backward(
    gate_ptr,
    up_ptr,
    ct_ptr,
    grad_gate_ptr,
    grad_up_ptr,
    size: tl.constexpr,
    block: tl.constexpr,
    activation: tl.constexpr,
    rounded: tl.constexpr,
):
    start = tl.program_id(0).to(tl.int64) * block
    at = tl.arange(0, block)
    if start + block <= size:
        _backward(
            gate_ptr + start, up_ptr + start, ct_ptr + start, grad_gate_ptr + start, grad_up_ptr + start,
            at, None, activation, rounded,
        )  # fmt: skip
    else:
        _backward(
            gate_ptr + start, up_ptr + start, ct_ptr + start, grad_gate_ptr + start, grad_up_ptr + start,
            at, at < size - start, activation, rounded,
        )  # fmt: skip
