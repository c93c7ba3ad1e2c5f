"""Compare results of JAX with results of torch: trees, shapes, dtypes and values."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

# Torch computes both sides, so only the order of sums differs. Relative to the largest value of an array, or to 1.
_TOLERANCES = {
    "float64": 1e-11,
    "complex128": 1e-11,
    "float32": 1e-5,
    "complex64": 1e-5,
    "float16": 2e-3,
    "bfloat16": 2e-2,
}


def as_numpy(tensor: torch.Tensor) -> np.ndarray:
    """Return the values of any tensor; narrow floats that NumPy lacks become float64."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.dtype is torch.bfloat16 or "float8" in str(tensor.dtype):
        return tensor.to(torch.float64).numpy()
    return tensor.numpy(force=True)  # torch.func.jvp may return a zero tensor without memory


def jax_dtype(dtype: torch.dtype) -> np.dtype:
    """Return the dtype that JAX has for a torch dtype, given whether x64 is on."""
    return jax.dtypes.canonicalize_dtype(jnp.dtype(str(dtype).removeprefix("torch.")))


def assert_matches(actual: Any, expected: Any, tolerance: float | None = None) -> None:
    """Assert that a tree of JAX arrays equals a tree of torch tensors in structure, shapes, dtypes and values."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for path, ours in jax.tree_util.tree_leaves_with_path(actual):
        theirs = _at(expected, path)
        where = jax.tree_util.keystr(path)
        if not isinstance(theirs, torch.Tensor):
            assert type(ours) is type(theirs), where
            assert ours == theirs, where
            continue
        assert isinstance(ours, jax.Array), f"{where} is a {type(ours).__name__}"
        assert ours.shape == tuple(theirs.shape), where
        assert ours.dtype == jax_dtype(theirs.dtype), where
        assert_close(ours, as_numpy(theirs), tolerance, where)


def assert_close(actual: Any, expected: Any, tolerance: float | None = None, where: str = "") -> None:
    """Assert that two arrays have one shape and the same values: floats within a tolerance, others exactly."""
    dtype = str(getattr(actual, "dtype", "float64"))
    actual, expected = _widened(actual), _widened(expected)
    assert actual.shape == expected.shape, where
    if actual.dtype.kind not in "fc":
        np.testing.assert_array_equal(actual, expected, err_msg=where)
        return
    tolerance = _TOLERANCES.get(dtype, 0.0) if tolerance is None else tolerance
    finite = np.abs(expected[np.isfinite(expected)])
    scale = max(1.0, float(finite.max(initial=0.0)))
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance * scale, err_msg=where)


def assert_trees_close(actual: Any, expected: Any, tolerance: float | None = None) -> None:
    """Assert that two trees of JAX arrays are the same in structure, shapes, dtypes and values."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for ours, theirs in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert ours.dtype == theirs.dtype
        assert_close(ours, theirs, tolerance)


def _at(tree: Any, path: Any) -> Any:
    for key, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if key == path:
            return leaf
    raise AssertionError(f"there is no {jax.tree_util.keystr(path)} in {tree}")


def _widened(array: Any) -> np.ndarray:
    array = np.asarray(array)
    if array.dtype.kind == "V" or array.dtype.name not in np.sctypeDict:  # bfloat16 and float8
        return array.astype(np.float64)
    return array
