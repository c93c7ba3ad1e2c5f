"""The fast path of small eager calls, which a process with one CPU device takes."""

from __future__ import annotations

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jtbridge
from jtbridge.calls.eager import _direct

SMALL = jnp.arange(3.0)


@pytest.fixture(autouse=True)
def one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate one device: the tests have several devices, with which the fast path is not taken."""
    monkeypatch.setattr(_direct, "only_device", lambda: jax.devices()[0])
    monkeypatch.delitem(sys.modules, "triton.runtime.jit", raising=False)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return a list that records whether each call was small enough for the fast path."""
    found: list[bool] = []
    tensors = _direct.small_tensors

    def recorded(args):
        result = tensors(args)
        found.append(result is not None)
        return result

    monkeypatch.setattr(_direct, "small_tensors", recorded)
    return found


def test_values_dtypes_and_arrays(taken):
    f = jtbridge.wrap(lambda x, y: x * y + 1)
    out = f(SMALL, SMALL)
    assert isinstance(out, jax.Array)
    assert (out.dtype, out.tolist(), out.committed) == (jnp.float32, [1, 2, 5], False)
    assert f(jax.device_put(SMALL, jax.devices()[0]), SMALL).committed
    assert taken == [True, True]


def test_an_argument_that_is_written_to_is_a_copy(taken):
    x = jnp.arange(3.0)
    assert jtbridge.wrap(lambda x: x.add_(1))(x).tolist() == [1, 2, 3]
    assert x.tolist() == [0, 1, 2]
    assert taken == [True]


def test_result_does_not_share_memory_with_stored_tensors(taken):
    buffer = torch.zeros(2)
    out = jtbridge.wrap(lambda x: buffer)(SMALL)
    buffer.fill_(7)
    assert out.tolist() == [0, 0]
    assert taken == [True]


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (lambda x: (x, 3, [x + 1]), (SMALL, 3, [SMALL + 1])),
        (lambda x: torch.complex(x, x).conj(), SMALL - 1j * SMALL),
        (lambda x: x.to(torch.float64), SMALL),
        (lambda x: x.requires_grad_() * 2, SMALL * 2),
        (lambda x: 2.5, 2.5),
    ],
    ids=["tree", "lazy conjugate", "float64", "requires grad", "number"],
)
def test_results_of_every_kind(fn, expected, taken):
    got = jtbridge.wrap(fn)(SMALL)
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert jnp.asarray(one).dtype == jnp.asarray(other).dtype
        assert jnp.array_equal(one, other)
    assert taken == [True]


@pytest.mark.parametrize(
    "x", [jnp.ones(1 << 17), jnp.ones(2, jnp.bfloat16), 2.0, [SMALL]], ids=["large", "bfloat16", "number", "list"]
)
def test_other_arguments_use_the_general_path(x, taken):
    f = jtbridge.wrap(lambda x: (x[0] if isinstance(x, list) else x) * 2)
    assert jnp.array_equal(f(x), jnp.asarray(x[0] if isinstance(x, list) else x) * 2)
    assert taken == [False]


def test_exceptions_are_raised_unchanged_and_checks_are_made():
    def fails(x):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        jtbridge.wrap(fails)(SMALL)
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="nan"):
        jtbridge.wrap(lambda x: x / 0 * 0)(SMALL)


def test_process_with_one_device_uses_the_direct_path():
    code = "import jtbridge; from jtbridge.calls.eager import _direct; assert _direct.only_device() is not None"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"},
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("x", [2.0, np.float32(2), np.full(3, 2, np.float32)], ids=["number", "scalar", "array"])
def test_derivatives_at_numbers_and_numpy_arrays(x):
    f = jtbridge.wrap(lambda x: x**3)
    assert np.all(jax.grad(lambda x: f(x).sum())(x) == 12)
    assert np.all(np.atleast_1d(jax.hessian(lambda x: f(x).sum())(x)).sum(-1) == 12)
    assert np.all(jax.jvp(f, (x,), (x,))[1] == 24)
    assert np.all(jax.vjp(f, x)[1](jnp.ones_like(f(x)))[0] == 12)
    assert np.all(jax.vmap(f)(np.full(3, 2, np.float32)) == 8)
