"""Dtypes between JAX and torch: all dtypes of both, and 64-bit dtypes while x64 is off."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jtbridge
from jtbridge.core.dtypes import _PAIRS

from .compare import assert_close, assert_matches

WIDE = {"int64", "uint64", "float64", "complex128"}
DIFFERENTIABLE = ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")


@pytest.fixture(params=_PAIRS, ids=lambda pair: pair[1].name)
def pair(request: pytest.FixtureRequest) -> tuple[torch.dtype, np.dtype]:
    return request.param


def test_every_torch_dtype_is_known_or_has_no_counterpart():
    ours = {torch_dtype for torch_dtype, _ in _PAIRS}
    theirs = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    both = {dtype for dtype in theirs if hasattr(jnp, str(dtype).removeprefix("torch."))}
    narrow_ints = {
        dtype for dtype in both if str(dtype) in {f"torch.{s}int{n}" for s in ("", "u") for n in range(1, 8)}
    }
    assert both - narrow_ints - ours <= {getattr(torch, "float4_e2m1fn_x2", None)}


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("jit", [False, True])
def test_forward(pair: tuple[torch.dtype, np.dtype], jit: bool, wide: bool, backend: str):
    seen = []
    f = jtbridge.wrap(lambda x: (seen.append(x.dtype), x.clone().t())[1], purity="allow")
    with jax.enable_x64(wide):
        x = jnp.asarray(np.array([[1, 2, 4], [1, 0.5, 8]]).astype(pair[1]))
        found = (jax.jit(f) if jit else f)(x)
    assert found.dtype == x.dtype
    np.testing.assert_array_equal(np.asarray(found).astype(complex), np.asarray(x).T.astype(complex))
    inside = {dtype: torch_dtype for torch_dtype, dtype in _PAIRS}[x.dtype]
    assert set(seen) == {torch.int64 if inside is torch.int32 and not wide else inside}
    assert inside is pair[0] or (pair[1].name in WIDE and not wide)


@pytest.mark.parametrize("name", DIFFERENTIABLE)
@pytest.mark.parametrize("jit", [False, True])
def test_gradient(name: str, jit: bool, backend: str):
    with jax.enable_x64(name in WIDE):
        x = jnp.array([0.5, -2.0, 1.0]).astype(name)
        f = jtbridge.wrap(lambda x: x * x)
        run = jax.grad(lambda x: f(x).sum().real)
        assert_matches((jax.jit(run) if jit else run)(x), 2 * torch.tensor([0.5, -2.0, 1.0]).to(getattr(torch, name)))


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("name", ["int64", "uint64", "float64", "complex128"])
def test_64_bit_results_have_the_dtypes_of_jax(name: str, wide: bool, backend: str):
    f = jtbridge.wrap(lambda x: (x * 3).to(getattr(torch, name)))
    with jax.enable_x64(wide):
        x = jnp.arange(3, dtype=jnp.int16)
        expected = jnp.asarray(np.arange(0, 9, 3).astype(name))
        for found in (f(x), jax.jit(f)(x), jax.vmap(f)(x)):
            assert found.dtype == expected.dtype == (np.dtype(name) if wide else jax.dtypes.canonicalize_dtype(name))
            assert found.tolist() == expected.tolist()


def test_64_bit_inside_and_gradient_while_x64_is_off(backend: str):
    f = jtbridge.wrap(lambda x: torch.sin(x.double()))
    x = torch.tensor([0.5, 2.0], dtype=torch.float64)
    value, pullback = jax.vjp(f, jnp.array([0.5, 2.0]))
    assert value.dtype == jnp.float32
    assert_close(value, x.sin().numpy())
    assert_close(pullback(jnp.ones(2))[0], x.cos().numpy())


@pytest.mark.parametrize("jit", [False, True])
def test_labels_and_indices_are_int64_for_torch(jit: bool, backend: str, rng: np.random.Generator):
    """With x64 off JAX has no int64, which cross_entropy, embedding and gather require."""
    logits, labels = rng.normal(size=(4, 3)).astype(np.float32), np.array([0, 2, 1, 1])
    f = jtbridge.wrap(torch.nn.functional.cross_entropy)
    run = jax.value_and_grad(f)
    value, gradient = (jax.jit(run) if jit else run)(jnp.asarray(logits), jnp.asarray(labels))
    t = torch.from_numpy(logits).requires_grad_()
    loss = torch.nn.functional.cross_entropy(t, torch.from_numpy(labels))
    assert_matches(value, loss.detach())
    assert_matches(gradient, torch.autograd.grad(loss, t)[0])
    rows = jax.vmap(f)(jnp.asarray(logits), jnp.asarray(labels))
    assert_matches(rows, torch.nn.functional.cross_entropy(t, torch.from_numpy(labels), reduction="none").detach())


@pytest.mark.parametrize(("option", "inside"), [("int64", torch.int64), ("keep", torch.int32)])
@pytest.mark.parametrize("jit", [False, True])
def test_int32_option(option: str, inside: torch.dtype, jit: bool, backend: str):
    seen = []
    f = jtbridge.wrap(lambda x: (seen.append(x.dtype), x * 2)[1], int32=option, purity="allow")
    found = (jax.jit(f) if jit else f)(jnp.array([1, -2], jnp.int32))
    assert found.dtype == jnp.int32
    assert found.tolist() == [2, -4]
    assert set(seen) == {inside}


@pytest.mark.parametrize("option", ["int64", "keep"])
def test_int32_is_preserved_while_x64_is_on(option: str, backend: str, x64: None):
    f = jtbridge.wrap(lambda x: (x, x.sum()), int32=option)
    assert_matches(f(jnp.ones(2, jnp.int32)), (torch.ones(2, dtype=torch.int32), torch.tensor(2)))


def test_one_function_with_x64_off_and_on(backend: str):
    f = jtbridge.wrap(lambda x: x * 2 + torch.tensor([1, 2]))
    for wide in (False, True, False):
        with jax.enable_x64(wide):
            found = jax.jit(f)(jnp.array([1, 2], jnp.int32))
            assert found.dtype == (jnp.int64 if wide else jnp.int32)
            assert found.tolist() == [3, 6]


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("dtype", ["float64", "complex128"])
@pytest.mark.parametrize("of", ["grad", "vmap", "hessian", "pullback"])
@pytest.mark.filterwarnings("ignore:Explicitly requested dtype float64")  # jax.hessian makes a matrix of ones
@pytest.mark.filterwarnings("ignore::jtbridge.errors.SequentialVmapWarning")  # torch 2.11 batches no `view` as a dtype
def test_gradients_of_64_bit_arrays_while_x64_is_off(of: str, dtype: str, jit: bool, backend: str):
    """The gradients have all 64 bits, as the gradients of a JAX function have, and later programs accept them."""
    if dtype == "complex128" and of == "hessian":
        pytest.skip("jax.hessian refuses complex arguments")
    with jax.enable_x64(True):
        x = jnp.array([0.1, 0.2, 0.7], dtype) * (1 + 1j if dtype == "complex128" else 1)

    def gradient(f, x):
        def loss(x):
            return f(x)

        if of == "pullback":
            with jax.enable_x64(True):
                y, pullback = jax.vjp(loss, x)
            return pullback(jnp.ones_like(y))[0]
        if of == "vmap":
            return jax.vmap(jax.grad(loss))(x[None])
        return jax.hessian(loss)(x) if of == "hessian" else jax.grad(loss)(x)

    f = jtbridge.wrap(lambda x: (torch.sin(x) * x).real.sum())
    found = (jax.jit(gradient, static_argnums=0) if jit else gradient)(f, x)
    with jax.enable_x64(True):  # JAX has no gradient of the real part of a complex128 array while x64 is off
        expected = gradient(lambda x: (jnp.sin(x) * x).real.sum(), x)
    assert found.dtype == expected.dtype == dtype
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    np.testing.assert_array_equal(jax.jit(lambda x: x.copy())(found), found)


def test_weak_types_are_not_promoted(backend: str):
    """A Python number in a jitted function is a weakly typed array; torch sees its plain dtype."""
    f = jtbridge.wrap(lambda x: x * 2)
    assert jax.jit(f)(1.5).dtype == jnp.float32
    assert jax.jit(f)(2).dtype == jnp.int32
    assert jax.jit(f)(True).dtype == jnp.int32


def test_integer_arguments_have_no_gradient(backend: str):
    f = jtbridge.wrap(lambda x, i: x[i].sum())
    gradients = jax.grad(f, argnums=(0, 1), allow_int=True)(jnp.ones(3), jnp.array([0, 0, 2]))
    assert gradients[0].tolist() == [2, 0, 1]
    assert gradients[1].dtype == jax.dtypes.float0
