"""Forward: the same values, dtypes, shapes and trees as torch, for random ones."""

from __future__ import annotations

import contextlib

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given

import jtbridge
from tests.compare import assert_matches, assert_trees_close

from .strategies import FLOATS, INTEGERS, arrays, calls, shapes, trees

BACKENDS = pytest.mark.parametrize("name", ["dlpack", "callback"])


def as_tensor(array: np.ndarray) -> torch.Tensor:
    """Return the tensor that a wrapped function gets for a JAX array: int32 becomes int64."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    tensor = torch.from_numpy(np.array(array))
    return tensor.long() if tensor.dtype is torch.int32 else tensor


@contextlib.contextmanager
def using(name: str):
    with jtbridge.config(backend=name), jax.numpy_dtype_promotion("strict"):
        yield


@BACKENDS
@given(call=calls(FLOATS), jit=st.booleans())
def test_functions(name: str, call, jit: bool):
    function, xs = call
    wrapped = jtbridge.wrap(function.call)
    with using(name):
        out = (jax.jit(wrapped) if jit else wrapped)(*map(jnp.asarray, xs))
        assert_matches(out, function.call(*map(as_tensor, xs)))


@BACKENDS
@given(data=st.data(), dtype=st.sampled_from(FLOATS + INTEGERS), shape=shapes())
def test_every_dtype_and_shape_passes_through(name: str, data, dtype: str, shape):
    x = data.draw(arrays(dtype, shape))
    with using(name):
        for run in (jtbridge.wrap(lambda x: x), jax.jit(jtbridge.wrap(lambda x: x))):
            out = run(jnp.asarray(x))
            assert out.dtype == x.dtype
            assert out.shape == x.shape
            assert np.asarray(out).tobytes() == x.tobytes()


@given(tree=trees(st.sampled_from(FLOATS + INTEGERS).flatmap(lambda d: shapes(2).flatmap(lambda s: arrays(d, s)))))
def test_any_tree_round_trips(tree):
    wrapped = jtbridge.wrap(lambda tree, *, same: (tree, same))
    jax_tree = jax.tree.map(jnp.asarray, tree)
    out = wrapped(jax_tree, same=jax_tree)
    assert_trees_close(out, (jax_tree, jax_tree), tolerance=0.0)
    assert_trees_close(jax.jit(wrapped)(jax_tree, same=jax_tree), (jax_tree, jax_tree), tolerance=0.0)


@BACKENDS
@given(call=calls(FLOATS))
def test_jit_equals_eager(name: str, call):
    function, xs = call
    wrapped = jtbridge.wrap(function.call)
    with using(name):
        xs = [jnp.asarray(x) for x in xs]
        assert_trees_close(jax.jit(wrapped)(*xs), wrapped(*xs), tolerance=0.0)


@given(call=calls(["float32"]))
def test_backends_agree(call):
    function, xs = call
    xs = [jnp.asarray(x) for x in xs]
    results = []
    for name in ("dlpack", "callback"):
        with using(name):
            results.append(jtbridge.wrap(function.call)(*xs))
    assert_trees_close(*results, tolerance=0.0)


@given(call=calls(["float32"]))
def test_arguments_are_never_modified(call):
    function, xs = call
    xs = [jnp.asarray(x) for x in xs]
    before = [np.array(x) for x in xs]

    def writes(*xs):
        for x in xs:
            x.add_(1)
        return function.call(*xs)

    wrapped = jtbridge.wrap(writes)
    jax.block_until_ready([wrapped(*xs), jax.jit(wrapped)(*xs)])
    for x, was in zip(xs, before, strict=True):
        np.testing.assert_array_equal(x, was)
