"""Kernels for AMD GPUs, on a machine without one: compiled, and lowered if jax-triton can do it."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest
import torch

import jtbridge
from jtbridge import kernels
from jtbridge.errors import LaunchError
from jtbridge.kernels import _chip
from jtbridge.triton import _versions

from .harness import launches, made_for, needs_compiler, needs_triton, normal

pytestmark = [needs_triton, needs_compiler, pytest.mark.cpu]

SHARED = 64 * 1024  # bytes that a workgroup may have on an MI200 or MI300
X, W = normal(64, 1024, dtype="bfloat16"), normal(1024, dtype="bfloat16")
Q, SQUARE = normal(2, 4, 256, 64, dtype="bfloat16"), normal(512, 512, dtype="bfloat16")
ANGLES = jnp.ones((256, 64), "bfloat16")
LABELS = jnp.zeros(64, jnp.int32)

KERNELS = {
    "softmax": (kernels.softmax, (X,)),
    "layer_norm": (lambda x, w: kernels.layer_norm(x, w, w), (X, W)),
    "rms_norm": (kernels.rms_norm, (X, W)),
    "swiglu": (kernels.swiglu, (X, X)),
    "geglu": (kernels.geglu, (X, X)),
    "rope": (lambda q: kernels.rope(q, ANGLES, ANGLES), (Q,)),
    "cross_entropy": (lambda x: kernels.cross_entropy(x, LABELS), (X,)),
    "attention": (lambda q, k, v: kernels.attention(q, k, v, is_causal=True), (Q, Q, Q)),
    "matmul": (kernels.matmul, (SQUARE, SQUARE)),
    "attention in float32": (kernels.attention, (Q.astype("float32"),) * 3),
    "matmul in tf32": (lambda a, b: kernels.matmul(a, b, precision="tf32"), (SQUARE.astype("float32"),) * 2),
}


@pytest.fixture
def on_amd(monkeypatch):
    """Let the process lower programs for an MI300X."""
    library = pytest.importorskip("jax_triton.triton_lib").triton_kernel_call_lib
    monkeypatch.setattr(library, "get_arch_details", lambda device: "gfx942")
    monkeypatch.setattr(library, "get_compute_capability", lambda device: 94)
    monkeypatch.setattr(_chip, "present", lambda: _chip.Chip("AMD Instinct MI300X", None))


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("architecture", [pytest.param("gfx90a", marks=pytest.mark.exhaustive), "gfx942"])
def test_every_kernel_compiles(name, architecture, on_amd):
    function, arguments = KERNELS[name]

    def both(*args):
        result, pull = jax.vjp(function, *args)
        return result, pull(result)

    for launch in launches(both, *arguments):
        made = made_for(launch, "hip", architecture, 64)
        assert made.asm["hsaco"]
        assert made.metadata.shared <= SHARED


def test_amd_programs_have_kernels_if_jax_triton_supports_it(on_amd, proven):
    f = jtbridge.wrap(lambda x: torch.softmax(x, -1))
    lowered = jax.jit(jax.grad(lambda x: f(x)[0, 0])).trace(normal(8, 128)).lower(lowering_platforms=("rocm",))
    found = re.findall(r"custom_call @(triton_kernel_call\w*)", lowered.as_text())
    reason = _versions.unsupported_reason("rocm")
    assert len(found) == (2 if reason is None else 0)
    (status,) = [s for s in jtbridge.backends("rocm") if s.name == "triton"]
    assert status.reason == (reason or "")


def test_launch_error_if_jax_triton_does_not_support_amd(on_amd, monkeypatch):
    from tests.launches.kernels import product

    monkeypatch.setattr(_versions, "_amd_mismatch_reason", lambda: "it cannot")
    _versions.unsupported_reason.cache_clear()
    try:
        traced = jax.jit(jtbridge.wrap(product)).trace(jnp.ones((16, 16)), jnp.ones((16, 16)))
        with pytest.raises(LaunchError, match="cannot be part of a program for rocm: it cannot"):
            traced.lower(lowering_platforms=("rocm",))
    finally:
        _versions.unsupported_reason.cache_clear()
