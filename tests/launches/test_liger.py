"""Liger-Kernel's operators: values and gradients equal those of torch's formulas, and they lower for a GPU."""

from __future__ import annotations

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.nn import functional

import jtbridge
from tests.kernels.harness import kernels_in, needs_compiler, needs_triton

pytest.importorskip("liger_kernel", reason="Liger-Kernel is installed by `make test-kernels`")
pytestmark = [needs_triton, needs_compiler]

LABELS = np.int32([1, 2, -100, 5, 0, 3])


def normal(*shape):
    return jnp.asarray(np.random.default_rng(0).standard_normal(shape), jnp.float32)


def liger(module, function):
    return getattr(importlib.import_module(f"liger_kernel.ops.{module}"), function).apply


def rope(q, k, cos, sin):
    def turned(x):
        half = x.shape[-1] // 2
        return torch.cat([-x[..., half:], x[..., :half]], -1)

    return q * cos[:, None] + turned(q) * sin[:, None], k * cos[:, None] + turned(k) * sin[:, None]


def angles():
    return jnp.concatenate([normal(1, 5, 8)] * 2, -1)


# name: (Liger's, torch's, arguments, which of them have gradients, kernels in the program of the gradient)
CASES = {
    "rms_norm": (
        lambda x, w: liger("rms_norm", "LigerRMSNormFunction")(x, w, 1e-6),
        lambda x, w: functional.rms_norm(x, (32,), w, 1e-6),
        lambda: (normal(6, 32), normal(32)),
        (0, 1),
        {"_rms_norm_forward_kernel", "_rms_norm_backward_kernel"},
    ),
    "layer_norm": (
        lambda x, w, b: liger("layer_norm", "LigerLayerNormFunction")(x, w, b, 1e-5),
        lambda x, w, b: functional.layer_norm(x, (32,), w, b, 1e-5),
        lambda: (normal(6, 32), normal(32), normal(32)),
        (0, 1, 2),
        {"_layer_norm_forward_kernel", "_layer_norm_backward_kernel"},
    ),
    "swiglu": (
        lambda a, b: liger("swiglu", "LigerSiLUMulFunction")(a, b),
        lambda a, b: functional.silu(a) * b,
        lambda: (normal(6, 32), normal(6, 32) + 1),
        (0, 1),
        {"_swiglu_forward_kernel", "_swiglu_backward_kernel"},
    ),
    "geglu": (
        lambda a, b: liger("geglu", "LigerGELUMulFunction")(a, b),
        lambda a, b: functional.gelu(a, approximate="tanh") * b,
        lambda: (normal(6, 32), normal(6, 32) + 1),
        (0, 1),
        {"_geglu_tanh_forward_kernel", "_geglu_tanh_backward_kernel"},
    ),
    "rope": (
        lambda q, k, c, s: liger("rope", "LigerRopeFunction")(q, k, c, s),
        rope,
        lambda: (normal(2, 4, 5, 16), normal(2, 2, 5, 16), jnp.cos(angles()), jnp.sin(angles())),
        (0, 1),
        {"_triton_rope"},
    ),
    "cross_entropy": (
        lambda x, y: liger("cross_entropy", "LigerCrossEntropyFunction")(x, y, None)[0],
        functional.cross_entropy,
        lambda: (normal(6, 32), LABELS),
        (0,),
        {"liger_cross_entropy_kernel", "element_mul_kernel"},
    ),
    "fused_linear_cross_entropy": (
        lambda x, w, y: liger("fused_linear_cross_entropy", "LigerFusedLinearCrossEntropyFunction")(x, w, y)[0],
        lambda x, w, y: functional.cross_entropy(x @ w.T, y),
        lambda: (normal(6, 32), normal(40, 32), LABELS),
        (0, 1),
        {"liger_cross_entropy_kernel", "element_mul_kernel"},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_match_torch(name):
    theirs, torchs, arguments, wrt, _ = CASES[name]
    args = arguments()
    f, g = jtbridge.wrap(theirs, backend="xla"), jtbridge.wrap(torchs, backend="dlpack")

    def loss(function):
        return lambda *xs: sum(jnp.sin(y).sum() for y in jax.tree.leaves(function(*xs)))

    got, want = f(*args), g(*args)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    got, want = jax.jit(jax.grad(loss(f), wrt))(*args), jax.grad(loss(g), wrt)(*args)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_lowered_for_a_gpu(name):
    theirs, _, arguments, wrt, kernels = CASES[name]
    f = jtbridge.wrap(theirs)

    def loss(*xs):
        return sum(jnp.sin(y).sum() for y in jax.tree.leaves(f(*xs)))

    assert set(kernels_in(jax.grad(loss, wrt), *arguments())) == kernels
