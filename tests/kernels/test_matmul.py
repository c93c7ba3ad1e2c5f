"""matmul: in jnp, in Triton's interpreter, and as compiled."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import jtbridge
from jtbridge.kernels import matmul
from jtbridge.kernels._chip import Chip
from jtbridge.kernels._matmul import op, reference, unsupported_reason
from jtbridge.kernels._matmul.configurations import CONFIGURATIONS, default, shared_memory_bytes

from .harness import (
    ARCHITECTURES,
    ON_GPU,
    TOLERANCE,
    assert_close,
    compiled,
    kernels_in,
    launches,
    needs_compiler,
    needs_triton,
    normal,
)

ACTIVATIONS = [None, "relu", "gelu", "gelu_tanh", "silu"]
SHARED = {80: 163 * 1024, 90: 227 * 1024}
THEIRS = {
    None: lambda x: x,
    "relu": torch.relu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": functools.partial(torch.nn.functional.gelu, approximate="tanh"),
    "silu": torch.nn.functional.silu,
}


def plain(a, b, bias=None, *, activation=None, transpose_b=False):
    product = jnp.matmul(a, b.T if transpose_b else b, precision="highest")
    before = product if bias is None else product + bias
    return reference.ACTIVATIONS[activation](before) if activation else before


@given(
    m=st.integers(1, 40),
    n=st.integers(1, 70),
    k=st.integers(1, 70),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    activation=st.sampled_from(ACTIVATIONS),
    transpose_b=st.booleans(),
    biased=st.booleans(),
)
@settings(max_examples=15)
def test_matches_torch(m, n, k, dtype, activation, transpose_b, biased):
    shapes = [(m, k), (n, k) if transpose_b else (k, n), *([(n,)] if biased else [])]
    arrays = [normal(*shape, dtype=dtype, seed=i) for i, shape in enumerate(shapes)]
    # In double precision: torch rounds the product, the sum and the activation.
    tensors = [jtbridge.to_torch(x).clone().double().requires_grad_() for x in arrays]
    product = tensors[0] @ (tensors[1].T if transpose_b else tensors[1])
    want = THEIRS[activation](product + tensors[2] if biased else product)
    ct = normal(m, n, dtype=dtype, seed=3)
    want.backward(jtbridge.to_torch(ct).double())
    f = jax.jit(functools.partial(matmul, activation=activation, transpose_b=transpose_b))
    got, pull = jax.vjp(f, *arrays)

    def as_ours(tensor):
        return jtbridge.to_jax(tensor.detach().float()).astype(dtype)

    def same(got, want, terms, factor):
        # The error of a sum is relative to the size of its terms, which may cancel.
        scale = as_ours(terms.detach().max()).reshape(1)
        assert_close(*(jnp.concatenate([x.ravel(), scale]) for x in (got, as_ours(want))), factor=factor)

    of_a, of_b = tensors[0].abs(), tensors[1].abs().T if transpose_b else tensors[1].abs()
    of_ct = jtbridge.to_torch(ct).double().abs()
    same(got, want, of_a @ of_b, factor=2)
    # The argument of the activation is rounded, and so is its derivative times the cotangent.
    for g, t, terms in zip(pull(ct), tensors, [of_ct @ of_b.T, of_a.T @ of_ct, of_ct.sum(0)], strict=False):
        assert g.shape == t.grad.shape
        same(g, t.grad, terms, factor=4)


@pytest.mark.parametrize("kind", CONFIGURATIONS)
def test_blocks_of_every_size(kind, monkeypatch):
    dtype = "bfloat16" if kind == "half" else "float32"
    a, b, bias = normal(2, 21, 37, dtype=dtype), normal(37, 50, dtype=dtype), normal(50, dtype=dtype)
    want = plain(a.astype("float32"), b.astype("float32"), bias.astype("float32"), activation="silu").astype(dtype)
    # A GPU rounds the factors to as many bits as float16 has.
    factor = 2 * TOLERANCE["float16"] / TOLERANCE["float32"] if kind == "tf32" and ON_GPU else 2
    for configuration in CONFIGURATIONS[kind]:
        op.differentiable_kernel.cache_clear()
        monkeypatch.setattr(op, "default", lambda *_, configuration=configuration: configuration)
        precision = "tf32" if kind == "tf32" else "ieee"
        f = functools.partial(matmul, activation="silu", precision=precision)
        assert_close(jax.jit(f)(a, b, bias), want, factor=factor)
    op.differentiable_kernel.cache_clear()


@pytest.mark.parametrize("activation", [None, "gelu"])
def test_transforms(activation):
    a, b, bias = normal(2, 3, 5), normal(5, 7), normal(7)

    def loss(f):
        return lambda *args: (f(*args, activation=activation) ** 2).sum()

    f, g = loss(matmul), loss(plain)
    every = (0, 1, 2)

    def same(transformed, *args):
        # Squares, and their sums: up to eight roundings.
        assert_close(jax.jit(transformed(f))(*args), jax.jit(transformed(g))(*args), factor=8)

    same(lambda f: lambda *xs: jax.jvp(f, xs, xs), a, b, bias)
    same(lambda f: jax.grad(f, every), a, b, bias)
    over = (0, None, None)
    same(lambda f: jax.vmap(jax.grad(f, every), over), a, b, bias)
    same(lambda f: jax.grad(lambda *xs: jax.vmap(f, over)(*xs).sum(), every), a, b, bias)
    many = jnp.stack([b, 2 * b])
    same(lambda f: jax.vmap(f, (0, 0, None)), a, many, bias)
    same(lambda f: jax.vmap(jax.grad(f, every), (None, 0, None)), a[0], many, bias)
    small = a[0, :2, :2], b[:2, :3], bias[:3]
    same(lambda f: jax.hessian(f, every), *small)
    same(lambda f: jax.jacrev(jax.jacrev(f)), *small)


def test_the_gradient_of_a_shared_matrix_has_no_batch():
    a, b = normal(6, 3, 40), normal(40, 50)
    text = jax.jit(jax.grad(lambda b: jax.vmap(matmul, (0, None))(a, b).sum())).lower(b).as_text()
    assert "tensor<40x50xf32>" in text
    assert "x40x50xf32>" not in text


def test_default_uses_large_blocks_for_large_matrices():
    half = CONFIGURATIONS["half"]
    hopper, small = Chip("", 90), Chip("", 89)
    assert default("half", 8192, 8192, hopper) == half[0]
    assert default("half", 1024, 1024, hopper) == half[2]
    assert default("half", 1, 16384, hopper) == half[5]
    assert default("half", 1, 4096, hopper) == half[6]
    assert default("ieee", 1, 1, hopper) == CONFIGURATIONS["ieee"][-1]
    assert default("half", 8192, 8192, small) == half[2]  # the candidate that fits the shared memory
    assert default("half", 1, 16384, small) == half[6]


def test_unsupported_arguments_use_jnp(x64):
    a, b, bias = normal(2, 3), normal(3, 4), normal(4)
    assert unsupported_reason(a, b, bias) is None
    assert unsupported_reason(a, b.astype("bfloat16")) == "`b` is bfloat16, but `a` float32"
    assert unsupported_reason(a, b, bias.astype("float16")) == "`bias` is float16, but `a` float32"
    assert unsupported_reason(a[:0], b) == "`a` has no elements"
    assert unsupported_reason(a, b[:, :0]) == "`b` has no elements"
    whole = a.astype("int32"), b.astype("int32")
    assert unsupported_reason(*whole) == "`a` is int32, the kernel takes float32, bfloat16, float16"
    assert (matmul(*whole) == whole[0] @ whole[1]).all()
    assert matmul(a.astype("float64"), b.astype("float64"), activation="gelu").dtype == jnp.float64
    assert matmul(a[:, :0], b[:0], bias).tolist() == [bias.tolist()] * 2


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_an_activation_far_below_zero_is_zero(activation):
    a = jnp.full((1, 1), -1e30, jnp.float32)
    assert matmul(a, jnp.ones((1, 1)), activation=activation).tolist() == [[0.0]]


def test_errors():
    a, b, bias = normal(2, 3), normal(3, 4), normal(4)
    with pytest.raises(
        ValueError, match=r"`b` has shape \(4, 3\), but `a` \(2, 3\): expected \[k, n\] and \[..., m, k\]"
    ):
        matmul(a, b.T)
    with pytest.raises(
        ValueError, match=r"`b` has shape \(3, 4\), but `a` \(2, 3\): expected \[n, k\] and \[..., m, k\]"
    ):
        matmul(a, b, transpose_b=True)
    with pytest.raises(
        ValueError, match=r"`bias` has shape \(3,\), but `b` \(3, 4\): expected \[n\], where `b` is \[k,"
    ):
        matmul(a, b, bias[:3])
    whole = b.astype("int32")
    with pytest.raises(TypeError, match=r"^`b` is int32, not of a real floating-point dtype$"):
        matmul(a, whole)
    with pytest.raises(TypeError, match=r"^`a` is int32, not of a real floating-point dtype$"):
        matmul(whole.T, whole, activation="silu")
    with pytest.raises(ValueError, match="`activation` is 'tanh', expected None or one of relu, gelu, gelu_tanh, silu"):
        matmul(a, b, activation="tanh")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="`precision` is 'high', expected one of ieee, tf32x3, tf32"):
        matmul(a, b, precision="high")  # type: ignore[arg-type]


@needs_triton
@needs_compiler
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(
    ("kind", "index"), [(kind, i) for kind, all_ in CONFIGURATIONS.items() for i in range(len(all_))]
)
def test_every_configuration_compiles_without_spilling(kind, index, architecture, monkeypatch, tmp_path):
    monkeypatch.setattr(op, "default", lambda *_: CONFIGURATIONS[kind][index])
    dtype = "bfloat16" if kind == "half" else "float32"
    a, b, bias = normal(256, 512, dtype=dtype), normal(256, 512, dtype=dtype), normal(256, dtype=dtype)
    precision = "tf32" if kind == "tf32" else "ieee"
    f = functools.partial(matmul, activation="gelu", transpose_b=True, precision=precision)
    (launch,) = launches(lambda *xs: jax.vjp(f, *xs)[0], a, b, bias)
    assert launch.kernel.__name__ == "matmul_forward_saving"
    usage = compiled(launch, architecture, tmp_path)
    # The error function over the largest block spills a few registers, once, behind the loop: 104 bytes a thread.
    assert usage.spilled <= (128 if (kind, index) == ("half", 0) else 0)
    assert usage.shared <= min(SHARED[architecture], shared_memory_bytes(CONFIGURATIONS[kind][index], kind))


@needs_triton
@needs_compiler
@pytest.mark.parametrize("platforms", [("cuda",), ("cpu", "cuda")])
def test_one_program_has_the_kernels_for_a_gpu(platforms):
    a, b = normal(20, 30), normal(30, 40)
    f = functools.partial(matmul, activation="silu")
    assert kernels_in(f, a, b, platforms=platforms) == ["matmul_forward"]
    assert kernels_in(jax.grad(lambda a, b: f(a, b).sum()), a, b, platforms=platforms) == ["matmul_forward_saving"]
    assert kernels_in(f, a, b, platforms=("cpu",)) == []
