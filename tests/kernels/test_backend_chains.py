"""The chains of operators that models write are kernels where their graph is lowered for a GPU."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from .harness import (
    assert_kernels_get_operator_arguments,
    needs_compiler,
    needs_triton,
    normal,
)

pytestmark = [needs_triton, needs_compiler, pytest.mark.cpu]

X = normal(2, 4, 6)


def of_unscaled_norms(x):
    h = x.float()
    h = (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)).type_as(x)
    return h.sin() + functional.rms_norm(x, (6,), eps=1e-5)


def of_norms_of_t5(x, weight):
    h = x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * h.to(weight.dtype)


def of_centered_norms(x, weight):
    """As Cohere has it."""
    h = x.float()
    mean = h.mean(-1, keepdim=True)
    h = (h - mean) * torch.rsqrt((h - mean).pow(2).mean(-1, keepdim=True) + 1e-5)
    return (weight.float() * h).to(x.dtype)


def rotate_half(x):
    return torch.cat((-x[..., 4:], x[..., :4]), -1)


def rotate_neighbours(x):
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


def of_tokens_first(q, k, cos, sin):
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    q, k = ((x * cos) + (rotate_half(x) * sin) for x in (q.transpose(1, 2), k.transpose(1, 2)))
    return q.sum(2) + k.sum(2)


def of_neighbours(q, k, cos, sin):
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    q, k = ((x * cos) + (rotate_neighbours(x) * sin) for x in (q, k))
    return q.sum(1) + k.sum(1)


def of_neighbours_in_float32(q, k, cos, sin):
    """As Cohere has it, and as ERNIE 4.5."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    wide = q.float()
    q = ((wide * cos) + (rotate_neighbours(wide) * sin)).to(q.dtype)
    k = ((k.float() * cos) + (rotate_neighbours(k).float() * sin)).to(k.dtype)
    return q.sum(1) + k.sum(1)


def of_complex_numbers(q, k, cos, sin):
    """As Llama 4 has it, of tokens before heads."""
    angles = torch.complex(cos.float(), sin.float())[:, :, None, ::2]
    q, k = (x.transpose(1, 2).contiguous() for x in (q, k))
    pairs = (torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2)) for x in (q, k))
    q, k = (torch.view_as_real(z * angles).flatten(3).type_as(q) for z in pairs)
    return q.sum(2) + k.sum(2)


ROPE_ARGUMENTS = normal(2, 4, 5, 8), normal(2, 2, 5, 8, seed=1), normal(2, 5, 8, seed=2), normal(2, 5, 8, seed=3)
CASES = [
    (of_unscaled_norms, (X,), (0,), {"norm_forward": 2, "norm_backward": 2}),
    (of_norms_of_t5, (X, normal(6, seed=1)), (0, 1), {"norm_forward": 1, "norm_backward": 1}),
    (of_centered_norms, (X, normal(6, seed=1)), (0, 1), {"norm_forward": 1, "norm_backward": 1}),
    (of_tokens_first, ROPE_ARGUMENTS, (0, 1, 2, 3), {"rope_rotate": 4}),
    (of_neighbours, ROPE_ARGUMENTS, (0, 1, 2, 3), {"rope_rotate": 4}),
    (of_complex_numbers, ROPE_ARGUMENTS, (0, 1, 2, 3), {"rope_rotate": 4}),
    (of_neighbours_in_float32, ROPE_ARGUMENTS, (0, 1), {"rope_rotate": 4}),
]


def of_gelu_written_out(gate, up):
    x = math.sqrt(2.0 / math.pi) * (gate + 0.044715 * torch.pow(gate, 3.0))
    return 0.5 * gate * (1.0 + torch.tanh(x)) * up


OF_EVERY_DTYPE = [(*case, dtype) for case in CASES for dtype in ("float32", "bfloat16", "float16")]
IN_FLOAT32 = (of_gelu_written_out, (X, X + 1), (0, 1), {"gated_forward": 1, "gated_backward": 1}, "float32")


@pytest.mark.parametrize(("function", "arguments", "wrt", "kernels", "dtype"), [*OF_EVERY_DTYPE, IN_FLOAT32])
def test_kernels_get_the_arguments_of_the_operators(function, arguments, wrt, kernels, dtype):
    assert_kernels_get_operator_arguments(function, [x.astype(dtype) for x in arguments], wrt, kernels)
