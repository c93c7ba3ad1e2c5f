"""vjp and jvp: torch's values, adjoint to each other, and the same under vmap in any order."""

from __future__ import annotations

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given

import jtbridge
from tests import reference
from tests.compare import assert_close, assert_matches, assert_trees_close
from tests.transforms.problem import random_like

from .strategies import Function, calls
from .test_values import BACKENDS, as_tensor, using

DTYPES = ["float32", "complex64"]


def float_results(call):
    """Return a function that returns only the float and complex results, as a list, for tensors and for arrays."""

    def run(*xs):
        leaves = jax.tree.leaves(call(*xs))
        return [y for y in leaves if not str(y.dtype).endswith("bool")]

    return run


def torch_results(function: Function):
    return lambda *xs: float_results(function.call)(*(x.clone() for x in xs))


def like(arrays, seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [random_like(rng, tuple(x.shape), str(x.dtype).removeprefix("torch.")) for x in arrays]


@BACKENDS
@given(call=calls(DTYPES, max_dims=2), seed=st.integers(0, 1000), jit=st.booleans())
def test_vjp(name: str, call, seed: int, jit: bool):
    function, xs = call
    fn = float_results(jtbridge.wrap(function.call))
    tensors = [as_tensor(x) for x in xs]
    cotangents = like(torch_results(function)(*tensors), seed)

    def run(*xs):
        out, pullback = jax.vjp(fn, *xs)
        return out, list(pullback([jnp.asarray(ct) for ct in cotangents]))

    with using(name):
        out, grads = (jax.jit(run) if jit else run)(*map(jnp.asarray, xs))
    assert_matches(out, torch_results(function)(*tensors))
    expected = reference.vjp(torch_results(function), tensors, [as_tensor(ct) for ct in cotangents])
    assert_matches(grads, expected, tolerance=1e-4)


@BACKENDS
@given(call=calls(DTYPES, max_dims=1), seed=st.integers(0, 1000), jit=st.booleans())
def test_jvp(name: str, call, seed: int, jit: bool):
    function, xs = call
    fn = float_results(jtbridge.wrap(function.call))
    tensors, tangents = [as_tensor(x) for x in xs], like(xs, seed)

    def run(xs, dxs):
        return jax.jvp(fn, xs, dxs)[1]

    with using(name):
        moved = (jax.jit(run) if jit else run)([jnp.asarray(x) for x in xs], [jnp.asarray(t) for t in tangents])
    expected = reference.jvp(torch_results(function), tensors, [as_tensor(t) for t in tangents])
    assert_matches(moved, expected, tolerance=1e-4)


@given(call=calls(DTYPES, max_dims=2), seed=st.integers(0, 1000))
def test_jvp_and_vjp_are_adjoint(call, seed: int):
    """``sum(ct * jvp(dx)) == sum(vjp(ct) * dx)``, JAX's pairing, without conjugation."""
    function, xs = call
    fn = float_results(jtbridge.wrap(function.call))
    with jax.enable_x64(True):
        wide = {"float32": np.float64, "complex64": np.complex128}[xs[0].dtype.name]
        xs = [jnp.asarray(x, wide) for x in xs]
        dxs = [jnp.asarray(x) for x in like(xs, seed)]
        out, moved = jax.jvp(fn, xs, dxs)
        cts = [jnp.asarray(y) for y in like(out, seed + 1)]
        pulled = jax.vjp(fn, *xs)[1](cts)
        left = sum(np.sum(np.asarray(a) * np.asarray(b)) for a, b in zip(cts, moved, strict=True))
        right = sum(np.sum(np.asarray(a) * np.asarray(b)) for a, b in zip(pulled, dxs, strict=True))
    if wide is np.complex128:  # only the real part is paired where results or arguments are real
        left, right = np.real(left), np.real(right)
    assert left == pytest.approx(right, rel=1e-9, abs=1e-9)


@BACKENDS
@given(call=calls(DTYPES, max_dims=2), rows=st.integers(0, 3), jit=st.booleans())
def test_vmap_equals_a_loop(name: str, call, rows: int, jit: bool):
    function, xs = call
    batch = [np.stack([x, *like([x] * 3, 7)])[:rows].astype(x.dtype) for x in xs]
    mapped = jax.vmap(jtbridge.wrap(function.call))
    with using(name):
        out = (jax.jit(mapped) if jit else mapped)(*map(jnp.asarray, batch))
    single = function.call(*map(as_tensor, xs))
    loop = [function.call(*(as_tensor(column[row]) for column in batch)) for row in range(rows)]
    expected = jax.tree.map(
        lambda y, *ys: torch.stack(ys) if ys else torch.zeros((0, *y.shape), dtype=y.dtype), single, *loop
    )
    assert_matches(out, expected, tolerance=1e-5)


@given(call=calls(["float32"], max_dims=2), rows=st.integers(1, 3))
def test_gradient_of_a_batch_is_the_batch_of_gradients(call, rows: int):
    function, xs = call
    batch = [jnp.asarray(np.stack([x, *like([x] * 3, 7)])[:rows].astype(x.dtype)) for x in xs]
    fn = float_results(jtbridge.wrap(function.call))

    def loss(*xs):
        return sum((y * y).sum() for y in fn(*xs))

    whole = jax.grad(lambda *xs: jax.vmap(loss)(*xs).sum(), argnums=tuple(range(len(xs))))(*batch)
    rowwise = jax.vmap(jax.grad(loss, argnums=tuple(range(len(xs)))))(*batch)
    assert_trees_close(whole, rowwise, tolerance=1e-4)
    if all(x.size for x in xs):
        first = jax.grad(loss, argnums=tuple(range(len(xs))))(*(x[0] for x in batch))
        for a, b in zip(first, rowwise, strict=True):
            assert_close(b[0], a, tolerance=1e-4)
