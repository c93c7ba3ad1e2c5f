"""Exported programs run without torch, with any batch size; torch's own exported programs can be wrapped."""

from __future__ import annotations

import functools
import pathlib
import subprocess
import sys

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jtbridge
from jtbridge.errors import ArgumentError, EffectsError

MODEL = torch.nn.Sequential(torch.nn.Linear(300, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).requires_grad_(False)
X = jnp.linspace(-1.0, 1.0, 1200).reshape(4, 300)


def expected(x) -> np.ndarray:
    return MODEL(torch.tensor(np.asarray(x))).numpy()


def test_exported_program_runs_without_torch(tmp_path: pathlib.Path):
    (tmp_path / "model.bin").write_bytes(jtbridge.export(MODEL_F, X).serialize())
    np.save(tmp_path / "x.npy", np.asarray(X))
    code = """
import sys
sys.modules["torch"] = None
import jax.export, numpy as np
model = jax.export.deserialize(bytearray(open("model.bin", "rb").read()))
np.save("y.npy", model.call(np.load("x.npy")))
assert sys.modules["torch"] is None
"""
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
    np.testing.assert_allclose(np.load(tmp_path / "y.npy"), expected(X), rtol=1e-6, atol=1e-6)


MODEL_F = jtbridge.wrap(lambda x: MODEL(x))


def test_symbolic_batch():
    (shape,) = [jax.export.symbolic_shape("b, 300")]
    exported = jtbridge.export(MODEL_F, jax.ShapeDtypeStruct(shape, jnp.float32))
    assert str(exported.out_avals[0].shape) == "(b, 3)"
    for rows in (1, 2, 7):
        x = jnp.resize(X, (rows, 300))
        np.testing.assert_allclose(exported.call(x), expected(x), rtol=1e-6, atol=1e-6)


def test_code_gets_symbolic_sizes():
    def fn(x, ids):
        batch, length = ids.shape
        table = torch.arange(length) * batch
        return x.new_zeros(batch, 2 * length) + x.sum(), table[None] + ids, x.reshape(batch * 2, -1).softmax(-1)

    b, n = jax.export.symbolic_shape("b, n")
    f = jtbridge.wrap(fn)
    exported = jtbridge.export(f, jax.ShapeDtypeStruct((b, 6), jnp.float32), jax.ShapeDtypeStruct((b, n), jnp.int32))
    for rows, length in ((1, 5), (3, 2)):
        x, ids = jnp.ones((rows, 6)), jnp.zeros((rows, length), jnp.int32)
        for got, want in zip(exported.call(x, ids), f(x, ids), strict=True):
            assert got.dtype == want.dtype
            np.testing.assert_allclose(got, want, rtol=1e-6)


def test_gradient_and_platforms():
    exported = jtbridge.export(jax.grad(lambda x: MODEL_F(x).sum()), X, platforms=("cpu", "cuda", "tpu"))
    assert exported.platforms == ("cpu", "cuda", "tpu")
    np.testing.assert_allclose(exported.call(X), jax.grad(lambda x: MODEL_F(x).sum())(X), rtol=1e-6, atol=1e-7)


def test_a_torch_function_that_is_not_wrapped_is_refused():
    with pytest.raises(
        ArgumentError, match=r"`sin` passed a JAX array to torch. .*jtbridge.export\(jtbridge.wrap\(f\)"
    ):
        jtbridge.export(torch.sin, jax.ShapeDtypeStruct((2,), jnp.float32))


def test_statics_are_keywords():
    f = jtbridge.wrap(lambda x, kind="sum": getattr(x, kind)())
    assert jtbridge.export(f, X, kind="mean").call(X) == pytest.approx(float(X.mean()), abs=1e-6)
    with pytest.raises(ArgumentError, match="Argument 1 holds str `'mean'`, which is static"):
        jtbridge.export(f, X, "mean")
    np.testing.assert_allclose(jtbridge.export(functools.partial(f, kind="max"), X).call(X), X.max())


def test_random_numbers_of_an_exported_program_follow_its_key():
    f = jtbridge.wrap(lambda x: torch.nn.functional.dropout(x, 0.5))
    exported = jtbridge.export(lambda x, key: f(x, rng=key), X, jax.random.PRNGKey(0))
    key, other = jax.random.PRNGKey(3), jax.random.PRNGKey(4)
    got = exported.call(X, key)
    np.testing.assert_array_equal(got, jax.jit(lambda x, key: f(x, rng=key))(X, key))
    np.testing.assert_array_equal(got, jtbridge.wrap(f.function, backend="xla")(X, rng=key))
    assert (exported.call(X, other) != got).mean() > 0.4  # a half of the elements, each kept with another draw


@pytest.mark.parametrize("saved", [False, True])
def test_torch_exported_program_can_be_wrapped(tmp_path: pathlib.Path, saved: bool):
    program = torch.export.export(MODEL, (torch.ones(4, 300),), dynamic_shapes=({0: torch.export.Dim("b")},))
    if saved:
        torch.export.save(program, tmp_path / "model.pt2")
        program = torch.export.load(tmp_path / "model.pt2")
    f = jtbridge.wrap(program, backend="xla")
    np.testing.assert_allclose(f(X), expected(X), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(f(X[:2]), expected(X[:2]), rtol=1e-6, atol=1e-6)
    assert jax.grad(lambda x: f(x).sum())(X).shape == X.shape


@pytest.mark.parametrize("x64", [False, True])
def test_for_several_platforms_at_once(x64):
    def fn(x):
        return torch.where(x > 0, torch.log_softmax(x, -1), torch.nan_to_num(x)).cumsum(0)

    with jax.enable_x64(x64):
        x = np.float32([[1.0, -2.0, 0.5], [np.nan, 3.0, -1.0]])
        saved = jax.export.export(jax.jit(jtbridge.wrap(fn, backend="xla")), platforms=("cpu", "cuda"))(x)
        np.testing.assert_allclose(saved.call(x), fn(torch.from_numpy(x)), rtol=1e-5)


def test_module_is_exported_without_wrapping():
    saved = jtbridge.export(MODEL, jax.ShapeDtypeStruct(jax.export.symbolic_shape("b, 300"), jnp.float32)).serialize()
    got = jax.export.deserialize(saved).call(X[:3])
    np.testing.assert_allclose(got, expected(X[:3]), rtol=1e-6, atol=1e-6)


def test_platforms_are_a_sequence():
    with pytest.raises(jtbridge.errors.ArgumentError, match=r"`platforms` is 'cpu', expected a sequence such as"):
        jtbridge.export(MODEL_F, X, platforms="cpu")


def test_ordered_effects_are_refused():
    f = jtbridge.wrap(lambda x: x + 1, effects="ordered")
    with pytest.raises(EffectsError, match="an exported program runs without torch"):
        jtbridge.export(f, X)
