"""flash-linear-attention's operators: values and gradients equal those of their formulas, and they lower for a GPU.

Its kernels are autotuned over dozens of configurations, all of which are compiled when a program is lowered. Where
they are lowered here each keeps one.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import warnings
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.nn import functional

import jtbridge
from tests.kernels.harness import ON_GPU, kernels_in, needs_compiler, needs_triton

pytest.importorskip("fla", reason="flash-linear-attention is installed by `make test-kernels`")
pytestmark = [needs_triton, needs_compiler]

TOKENS, HEADS, WIDTH = 70, 2, 16
# On a GPU the library multiplies float32 as TF32, which has ten bits.
OF_VALUES, OF_GRADIENTS = (2e-3, 1e-2) if ON_GPU else (4e-6, 2e-5)
LABELS = torch.tensor([1, 2, -100, 5, 0])


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def heads(*shape, seed=0):
    return normal(1, TOKENS, HEADS, *shape, seed=seed)


def queries_keys_values():
    return [heads(WIDTH, seed=seed) for seed in range(3)]


def gates(*shape):
    return jax.nn.log_sigmoid(heads(*shape, seed=3))


def strengths():
    return jax.nn.sigmoid(heads(seed=4))


def fla(module, function):
    with warnings.catch_warnings():  # it warns while it is imported
        warnings.simplefilter("ignore")
        return getattr(importlib.import_module(f"fla.{module}"), function)


def output(result):
    return result[0] if isinstance(result, tuple) else result


def heads_first(*tensors):
    return [x.transpose(1, 2) for x in tensors]


def unit(x):
    return functional.normalize(x, dim=-1)


def delta_rule(q, k, v, beta):
    naive = fla("ops.delta_rule.naive", "delta_rule_recurrence")
    return naive(*heads_first(*(x.float() for x in (q, k, v, beta))))[0].transpose(1, 2).to(q.dtype)


def retention(q, k, v):
    return fla("ops.retention.naive", "naive_retention")(*heads_first(q, k, v)).transpose(1, 2)


def rwkv6(q, k, v, w, u):
    naive = fla("ops.rwkv6.recurrent_naive", "naive_recurrent_rwkv6")
    return output(naive(*heads_first(q, k, v, w), u, scale=WIDTH**-0.5)).transpose(1, 2)


def attention(q, k, v):
    return functional.scaled_dot_product_attention(*heads_first(q, k, v), is_causal=True).transpose(1, 2)


def short_convolution(x, w):
    padded = functional.pad(x.transpose(1, 2), (3, 0))
    return functional.silu(functional.conv1d(padded, w[:, None], groups=WIDTH).transpose(1, 2))


# name: (flash-linear-attention's, the formula's, arguments); every argument has a gradient
CASES = {
    "simple_gla": (
        lambda q, k, v, g: fla("ops.simple_gla", "chunk_simple_gla")(q, k, v, g)[0],
        lambda q, k, v, g: fla("ops.simple_gla.naive", "naive_recurrent_simple_gla")(q, k, v, g)[0],
        lambda: (*queries_keys_values(), gates()),
    ),
    "gla": (
        lambda q, k, v, g: fla("ops.gla", "chunk_gla")(q, k, v, g)[0],
        lambda q, k, v, g: fla("ops.gla.naive", "naive_recurrent_gla")(q, k, v, g)[0],
        lambda: (*queries_keys_values(), gates(WIDTH)),
    ),
    "gated_delta_rule": (
        lambda q, k, v, g, b: fla("ops.gated_delta_rule", "chunk_gated_delta_rule")(q, unit(k), v, g, b)[0],
        lambda q, k, v, g, b: fla("ops.gated_delta_rule", "naive_recurrent_gated_delta_rule")(q, unit(k), v, b, g)[0],
        lambda: (*queries_keys_values(), gates(), strengths()),
    ),
    "retention": (
        lambda q, k, v: fla("ops.retention", "chunk_retention")(q, k, v)[0],
        retention,
        queries_keys_values,
    ),
    "hgrn": (
        lambda x, g: fla("ops.hgrn", "chunk_hgrn")(x, g)[0],
        lambda x, g: fla("ops.hgrn.naive", "naive_recurrent_hgrn")(x, g)[0],
        lambda: (normal(1, TOKENS, 32), jax.nn.log_sigmoid(normal(1, TOKENS, 32, seed=1))),
    ),
    "rwkv6": (
        lambda q, k, v, w, u: fla("ops.rwkv6", "chunk_rwkv6")(q, k, v, w, u)[0],
        rwkv6,
        lambda: (*queries_keys_values(), gates(WIDTH), normal(HEADS, WIDTH)),
    ),
    "attention": (
        lambda q, k, v: fla("ops.attn", "parallel_attn")(q, k, v),
        attention,
        queries_keys_values,
    ),
    "forgetting_attention": (
        lambda q, k, v, g: fla("ops.forgetting_attn", "parallel_forgetting_attn")(q, k, v, g),
        lambda q, k, v, g: output(fla("ops.forgetting_attn", "naive_forgetting_attn")(q, k, v, g)),
        lambda: (*queries_keys_values(), gates()),
    ),
    "rms_norm_gated": (
        lambda x, g, w: fla("modules.fused_norm_gate", "rms_norm_gated")(x, g, w, None),
        lambda x, g, w: functional.rms_norm(x, (WIDTH,), w, 1e-6) * functional.silu(g),
        lambda: (normal(5, WIDTH), normal(5, WIDTH, seed=1), normal(WIDTH)),
    ),
    "short_convolution": (
        lambda x, w: fla("modules.convolution", "causal_conv1d")(x, w, activation="silu")[0],
        short_convolution,
        lambda: (normal(1, TOKENS, WIDTH), normal(WIDTH, 4, seed=1)),
    ),
    "cross_entropy": (
        lambda x: fla("modules.fused_cross_entropy", "cross_entropy_loss")(x, LABELS)[0],
        lambda x: functional.cross_entropy(x, LABELS, reduction="none"),
        lambda: (normal(5, 40),),
    ),
    "fused_linear_cross_entropy": (
        lambda x, w: fla("modules.fused_linear_cross_entropy", "fused_linear_cross_entropy_loss")(x, LABELS, w),
        lambda x, w: functional.cross_entropy(x @ w.T, LABELS),
        lambda: (normal(5, 32), normal(40, 32, seed=1)),
    ),
}


def loss(f):
    return lambda *args: sum(jnp.sin(y.astype(jnp.float32)).sum() for y in jax.tree.leaves(f(*args)))


def everything(args):
    return tuple(range(len(args)))


def by_torch(formula, args):
    """Return values, and the gradients of :func:`loss`."""
    tensors = [torch.from_numpy(np.array(x, np.float32)).to(getattr(torch, str(x.dtype))) for x in args]
    results = jax.tree.leaves(formula(*(x.requires_grad_() for x in tensors)))
    sum(torch.sin(y.float()).sum() for y in results).backward()
    return [y.detach() for y in results], [x.grad for x in tensors]


def assert_close(got, want, tolerance):
    """Assert that values differ by no more than a share of the largest number."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert f"torch.{a.dtype}" == str(b.dtype)
        a, b = np.asarray(a, np.float64), b.double().numpy()
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * np.abs(b).max())


def assert_matches_formula(theirs, formula, args, tolerance=OF_VALUES, of_gradients=OF_GRADIENTS):
    f = jtbridge.wrap(theirs, backend="xla")
    values, gradients = by_torch(formula, args)
    assert_close(jax.jit(f)(*args), values, tolerance)
    assert_close(jax.jit(jax.grad(loss(f), everything(args)))(*args), gradients, of_gradients)


@contextlib.contextmanager
def unless_refused() -> Iterator[None]:
    """Skip the test if the library refuses a gradient that this Triton gets wrong."""
    try:
        yield
    except jtbridge.errors.TranslationError as error:
        if "on Hopper GPUs produces incorrect results" not in str(error):
            raise
        pytest.skip(f"the library refuses the gradient with this Triton: {error}")


@pytest.fixture
def exact_products(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let retention multiply in float32: in TF32 its gradient is off by 1.8 % of its largest number."""
    if request.getfixturevalue("name") == "retention":
        monkeypatch.setenv("TRITON_F32_DEFAULT", "ieee")


@pytest.mark.usefixtures("exact_products")
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_match_the_formulas(name):
    theirs, formula, arguments = CASES[name]
    with unless_refused():
        assert_matches_formula(theirs, formula, arguments())


def test_in_bfloat16():
    assert_matches_formula(
        lambda q, k, v, b: fla("ops.delta_rule", "chunk_delta_rule")(q, unit(k), v, b)[0],
        lambda q, k, v, b: delta_rule(q, unit(k), v, b),
        [x.astype(jnp.bfloat16) for x in (*queries_keys_values(), strengths())],
        1e-2,
        2e-2,
    )


def test_states_before_and_after():
    def theirs(q, k, v, g, b, state):
        chunked = fla("ops.gated_delta_rule", "chunk_gated_delta_rule")
        return chunked(q, unit(k), v, g, b, initial_state=state, output_final_state=True)

    def formula(q, k, v, g, b, state):
        naive = fla("ops.gated_delta_rule", "naive_recurrent_gated_delta_rule")
        return naive(q, unit(k), v, b, g, initial_state=state, output_final_state=True)

    state = normal(1, HEADS, WIDTH, WIDTH, seed=5)
    with unless_refused():
        assert_matches_formula(theirs, formula, (*queries_keys_values(), gates(), strengths(), state))


@pytest.mark.usefixtures("exact_products")
@pytest.mark.parametrize("name", ["retention", "hgrn"])
def test_batches(name):
    theirs, formula, arguments = CASES[name]
    args = arguments()
    f = jtbridge.wrap(theirs, backend="xla")
    both = [by_torch(formula, [scale * x for x in args]) for scale in (1, 0.5)]
    values, gradients = (
        [torch.stack(column) for column in zip(*part, strict=True)] for part in zip(*both, strict=True)
    )
    rows = [jnp.stack([x, 0.5 * x]) for x in args]
    assert_close(jax.vmap(f)(*rows), values, OF_VALUES)
    assert_close(jax.jit(jax.vmap(jax.grad(loss(f), everything(args))))(*rows), gradients, OF_GRADIENTS)


# The kernels in the program of the gradient.
KERNELS = {
    "simple_gla": {
        "chunk_local_cumsum_scalar_kernel",
        "chunk_fwd_kernel_h",
        "chunk_fwd_kernel_o",
        "chunk_bwd_kernel_dh",
        "chunk_bwd_kernel_dqkwg",
        "chunk_bwd_kernel_dv",
    },
    "hgrn": {
        "chunk_hgrn_fwd_kernel_h",
        "chunk_hgrn_fwd_kernel_o",
        "chunk_hgrn_bwd_kernel_h",
        "chunk_hgrn_bwd_kernel_o",
    },
    "forgetting_attention": {
        "chunk_global_cumsum_scalar_kernel",
        "parallel_attn_fwd_kernel",
        "parallel_attn_bwd_kernel_preprocess",
        "parallel_attn_bwd_kernel_dq",
        "parallel_attn_bwd_kernel_dkv",
    },
    "rms_norm_gated": {"layer_norm_gated_fwd_kernel", "layer_norm_gated_bwd_kernel"},
    "short_convolution": {"causal_conv1d_fwd_kernel", "causal_conv1d_bwd_kernel"},
    "cross_entropy": {"cross_entropy_fwd_kernel", "cross_entropy_bwd_kernel"},
}


def tuners():
    """Return the autotuned kernels of flash-linear-attention that have been imported."""
    modules = [module for name, module in sys.modules.items() if name.split(".")[0] == "fla"]
    for value in [value for module in modules for value in vars(module).values()]:
        while hasattr(value, "fn") and (hasattr(value, "configs") or hasattr(value, "values")):
            if hasattr(value, "configs"):
                yield value
            value = value.fn


@pytest.mark.parametrize("name", KERNELS)
def test_lowered_for_a_gpu(name, monkeypatch):
    theirs, _, arguments = CASES[name]
    args = arguments()
    f = jtbridge.wrap(theirs, backend="xla")
    jax.eval_shape(f, *args)  # imports its kernels
    for tuner in tuners():
        monkeypatch.setattr(tuner, "configs", tuner.configs[:1])
    with unless_refused():
        assert set(kernels_in(jax.grad(loss(f), everything(args)), *args)) == KERNELS[name]
