"""The `triton` backend: a translated graph whose operators are kernels where it is lowered for a GPU."""

from __future__ import annotations

import importlib
import importlib.metadata

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.nn import functional

import jtbridge
from jtbridge.triton import _versions

from .harness import (
    assert_kernels_get_operator_arguments,
    kernels_in,
    needs_compiler,
    needs_triton,
    normal,
    pretending,
)

pytestmark = [needs_triton, needs_compiler, pytest.mark.usefixtures("proven"), pytest.mark.cpu]

ROPE_ARGUMENTS = normal(2, 4, 5, 8), normal(2, 2, 5, 8, seed=1), normal(2, 5, 8, seed=2), normal(2, 5, 8, seed=3)
X, LABELS = normal(4, 6), jnp.array([0, 3, 1, 2], jnp.int32)


def of_softmax(x):
    return torch.softmax(x, -1).sin() + torch.log_softmax(x, 0)


def test_operators_are_kernels_on_a_gpu_and_jnp_elsewhere():
    f = jtbridge.wrap(of_softmax)
    forward = ["softmax_forward"] * 2
    assert sorted(kernels_in(f, X)) == forward
    both = kernels_in(jax.grad(lambda x: f(x).sum()), X, platforms=("cpu", "cuda"))
    assert sorted(both) == ["softmax_backward"] * 2 + forward
    batched = kernels_in(jax.vmap(jax.grad(lambda x: f(x).sum())), normal(3, 4, 6))
    assert sorted(batched) == ["softmax_backward"] * 2 + forward
    assert kernels_in(f, X, platforms=("cpu",)) == []
    np.testing.assert_allclose(f(X), of_softmax(torch.from_numpy(np.array(X))), rtol=1e-5, atol=1e-6)


def test_xla_has_no_kernels():
    assert kernels_in(jtbridge.wrap(of_softmax, backend="xla"), X) == []


def test_unsupported_arguments_are_lowered_in_jax():
    assert kernels_in(jtbridge.wrap(of_softmax), np.float64([[1, 2]])) == ["softmax_forward"] * 2  # x64 is off
    with jax.enable_x64(True):
        assert kernels_in(jtbridge.wrap(of_softmax), jnp.ones((2, 3), jnp.float64)) == []


def test_exported_program_with_kernels_uses_jnp_on_cpu():
    f = jtbridge.wrap(of_softmax)
    with pretending(90):
        saved = jax.export.export(jax.jit(f), platforms=("cpu", "cuda"), disabled_checks=_KERNELS)(X)
    np.testing.assert_allclose(saved.call(X), f(X), rtol=1e-6)


def test_explain_names_the_kernels():
    report = jtbridge.explain(of_softmax, X)
    assert report.kernels == {"softmax forward": 2}
    assert report.backend == "xla"
    assert jtbridge.explain(jtbridge.wrap(of_softmax, backend="xla"), X).kernels == {}


def test_unavailable_backend_gives_the_reason():
    (status,) = [s for s in jtbridge.backends() if s.name == "triton"]
    assert not status.available
    assert status.reason == 'it needs a GPU, the platform is "cpu"'
    with pytest.raises(jtbridge.errors.BackendError, match="it needs a GPU"):
        jtbridge.wrap(torch.sin, backend="triton")(X)


@pytest.mark.parametrize(
    ("jax_triton", "triton", "fits"),
    [("0.3.1", "3.6.0", True), ("0.4.1", "3.7.0", True), ("0.4.1", "3.10.0", True), ("0.4.1", "3.6.0", False)],
)
def test_incompatible_versions(jax_triton, triton, fits, monkeypatch):
    versions = {"jax-triton": jax_triton, "triton": triton}
    monkeypatch.setattr(importlib.metadata, "version", versions.__getitem__)
    monkeypatch.setattr(_versions, "passes_aliases_twice", lambda: jax_triton < "0.4")
    _versions.unsupported_reason.cache_clear()
    reason = _versions.unsupported_reason()
    _versions.unsupported_reason.cache_clear()
    assert reason is None if fits else "jax-triton 0.4.1 needs Triton 3.7 or newer" in str(reason)


def of_norms(x, weight, bias):
    y = functional.layer_norm(x, (6,), weight, bias) + functional.layer_norm(x, (6,), None, bias)
    return y + functional.layer_norm(x, (6,), weight) * functional.layer_norm(x, (4, 6))


def of_one_bias(x, weight, bias):
    """Normalize without a weight, with and without a bias."""
    del weight
    return functional.layer_norm(x, (6,), None, bias) + functional.layer_norm(x, (6,))


def of_rms_norms(x, weight, bias):
    h = x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
    y = functional.rms_norm(x, (6,), bias) + weight * h.to(x.dtype)
    h = (x + 1).float()
    return y + (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6) * (1 + weight.float())).type_as(x)


def of_gated(gate, up):
    y = functional.silu(gate) * up + functional.gelu(up) * gate
    return y + functional.gelu(gate, approximate="tanh") * up


def of_losses(logits, labels):
    logits = logits.float()
    mean = functional.cross_entropy(logits, labels, ignore_index=3)
    total = functional.cross_entropy(logits.view(-1, 6), labels, ignore_index=3, reduction="sum", label_smoothing=0.1)
    return mean + total + functional.cross_entropy(logits, labels, ignore_index=3, reduction="none")


def of_weighted_losses(logits, labels):
    logits, weight = logits.float(), torch.arange(6.0)
    mean = functional.cross_entropy(logits, labels, weight, ignore_index=3)
    total = functional.cross_entropy(logits, labels, weight, ignore_index=3, reduction="sum")
    return mean + total + functional.cross_entropy(logits, labels, weight + 1, reduction="none")


def of_angles(q, k, cos, sin):
    def rotated(x):
        return x * cos + torch.cat((-x[..., 4:], x[..., :4]), -1) * sin

    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return rotated(q).sum(1) + rotated(k).sum(1)


def of_attention(q, kv, mask):
    y = functional.scaled_dot_product_attention(q, kv, kv * 2, is_causal=True)
    y = y + functional.scaled_dot_product_attention(q, kv, kv, attn_mask=mask > 0)
    return y + functional.scaled_dot_product_attention(q, kv, kv, attn_mask=mask, scale=0.3)


NORM_ARGUMENTS = normal(2, 4, 6), normal(6, seed=1), normal(6, seed=2)
NORMS_OF_HALF_PRECISION = tuple(x.astype(jnp.bfloat16) for x in NORM_ARGUMENTS)
# As autocast and fine-tuning have them: torch takes these together.
NORMS_WITH_WIDE_WEIGHTS = [(NORM_ARGUMENTS[0].astype(dtype), *NORM_ARGUMENTS[1:]) for dtype in ("bfloat16", "float16")]
ATTENTION_ARGUMENTS = normal(2, 3, 4, 32), normal(2, 3, 5, 32, seed=1), normal(4, 5, seed=2).at[:, 0].set(1)


@pytest.mark.parametrize(
    ("function", "arguments", "wrt", "kernels"),
    [
        (of_norms, NORM_ARGUMENTS, (0, 1, 2), {"norm_forward": 3, "norm_backward": 3}),
        (of_norms, NORMS_OF_HALF_PRECISION, (0, 1, 2), {"norm_forward": 3, "norm_backward": 3}),
        *((of_norms, given, (0, 1, 2), {"norm_forward": 3, "norm_backward": 3}) for given in NORMS_WITH_WIDE_WEIGHTS),
        *(
            (of_one_bias, given, (0, 2), {"norm_forward": 2, "norm_backward": 2})
            for given in [NORM_ARGUMENTS, *NORMS_WITH_WIDE_WEIGHTS]
        ),
        (of_rms_norms, NORM_ARGUMENTS, (0, 1, 2), {"norm_forward": 3, "norm_backward": 3}),
        (of_angles, ROPE_ARGUMENTS, (0, 1, 2, 3), {"rope_rotate": 4}),
        (of_angles, tuple(x.astype("bfloat16") for x in ROPE_ARGUMENTS), (0, 1), {"rope_rotate": 4}),
        (of_losses, (X, LABELS), (0,), {"cross_entropy_forward": 3, "cross_entropy_backward": 3}),
        (of_losses, (X.astype("bfloat16"), LABELS), (0,), {"cross_entropy_forward": 3, "cross_entropy_backward": 3}),
        (of_weighted_losses, (X, LABELS), (0,), {"cross_entropy_forward": 3, "cross_entropy_backward": 3}),
        (
            of_weighted_losses,
            (X.astype("bfloat16"), LABELS),
            (0,),
            {"cross_entropy_forward": 3, "cross_entropy_backward": 3},
        ),
        (of_gated, (X, X + 1), (0, 1), {"gated_forward": 3, "gated_backward": 3}),
        (of_gated, (normal(4, 6, dtype="bfloat16"),) * 2, (0, 1), {"gated_forward": 3, "gated_backward": 3}),
        (of_rms_norms, NORMS_OF_HALF_PRECISION, (0, 1, 2), {"norm_forward": 3, "norm_backward": 3}),
        (
            of_attention,
            ATTENTION_ARGUMENTS,
            (0, 1),
            {"attention_forward": 3, "attention_backward_query": 3, "attention_backward_key_value": 3},
        ),
    ],
)
def test_kernels_get_the_arguments_of_the_operators(function, arguments, wrt, kernels):
    assert_kernels_get_operator_arguments(function, arguments, wrt, kernels)


_KERNELS = [
    jax.export.DisabledSafetyCheck.custom_call(name)
    for name in ("triton_kernel_call", "triton_kernel_call_ffi")  # by jax-triton 0.3, and by 0.4
]
