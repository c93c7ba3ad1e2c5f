"""Exported programs with symbolic sizes match torch at every size, or say which sizes they need."""

from __future__ import annotations

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jtbridge
from jtbridge.errors import BackendError, DifferentiationError, TranslationError


def spec_of(shape, constraints=()):
    return jax.ShapeDtypeStruct(jax.export.symbolic_shape(shape, constraints=constraints), jnp.float32)


ENCODER = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval().requires_grad_(False)
LSTM = torch.nn.LSTM(8, 5, batch_first=True).requires_grad_(False)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x.mean(0),
        lambda x: x.mean(),
        lambda x: torch.var_mean(x, 1)[0],
        lambda x: x.std((0, 1), correction=0),
        lambda x: x[:, -1],
        lambda x: torch.cat([x, x[:, :1]], 1),
        lambda x: torch.zeros_like(x).scatter_add(1, torch.zeros_like(x, dtype=torch.int64), x),
        lambda x: torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True),
        lambda x: ENCODER(x),
        lambda x: LSTM(x)[0],
    ],
)
def test_operators_along_a_symbolic_size(fn):
    spec = jax.ShapeDtypeStruct(jax.export.symbolic_shape("b, n, 8"), jnp.float32)
    exported = jtbridge.export(jtbridge.wrap(fn), spec)
    for shape in ((3, 6, 8), (2, 1500, 8)):
        x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
        np.testing.assert_allclose(exported.call(x), fn(torch.tensor(x)), rtol=1e-4, atol=1e-5)


CONVOLUTIONS = torch.nn.Sequential(
    torch.nn.Conv2d(3, 8, 3, padding=1, stride=2),
    torch.nn.BatchNorm2d(8),
    torch.nn.ReLU(),
    torch.nn.MaxPool2d(2),
    torch.nn.AvgPool2d(3, 1, 1),
    torch.nn.ConvTranspose2d(8, 4, 4, 2, 1),
    torch.nn.Upsample(scale_factor=2, mode="bilinear"),
    torch.nn.GroupNorm(2, 4),
).eval()


# Torch 2.11 makes symbols of their own for the sizes of slices, and assumes whether sizes are even.
decides_without_sizes = pytest.mark.skipif(
    torch.__version__ < (2, 13),  # type: ignore[operator]
    reason="torch 2.11 assumes more about symbolic sizes, so these programs are refused",
)


@decides_without_sizes
@pytest.mark.parametrize(
    "fn",
    [
        CONVOLUTIONS,
        lambda x: torch.nn.functional.adaptive_avg_pool2d(CONVOLUTIONS(x), 1).flatten(1),
        lambda x: x[:, :, :-1] - x[:, :, 1:],
        lambda x: torch.nn.functional.pad(x, (1, 2, 0, 3)),
        lambda x: torch.nn.functional.max_pool2d(x, 3, 2, 1, return_indices=True)[1],
        lambda x: torch.einsum("bchw,dchw->bd", x, x),
        lambda x: x.mT @ x,
    ],
)
def test_images_of_symbolic_sizes(fn):
    shape = jax.export.symbolic_shape("b, 3, h, w", constraints=["h >= 4", "w >= 4"])
    exported = jtbridge.export(jtbridge.wrap(fn), jax.ShapeDtypeStruct(shape, jnp.float32))
    for sizes in ((1, 3, 8, 12), (40, 3, 16, 9), (2, 3, 5, 4)):
        x = np.random.default_rng(0).normal(size=sizes).astype(np.float32)
        np.testing.assert_allclose(exported.call(x), fn(torch.tensor(x)).detach(), rtol=1e-4, atol=1e-5)


def test_gradient_inside_for_a_batch_of_images():
    def fn(x):
        return torch.func.grad(lambda x: CONVOLUTIONS(x).square().sum())(x)

    exported = jtbridge.export(jtbridge.wrap(fn), spec_of("b, 3, 8, 9"))
    for rows in (1, 20):
        x = np.random.default_rng(0).normal(size=(rows, 3, 8, 9)).astype(np.float32)
        np.testing.assert_allclose(exported.call(x), fn(torch.tensor(x)).detach(), rtol=1e-4, atol=1e-4)


@decides_without_sizes
def test_constraints_of_symbolic_sizes():
    table = torch.arange(512.0)

    def fn(x):
        return x + table[: x.shape[1]], x.unfold(1, 3, 1).sum(-1)

    with pytest.raises(TranslationError, match=r'works for some sizes only.*constraints=\["n <= 512"\]'):
        jtbridge.export(jtbridge.wrap(fn), spec_of("b, n", ["n >= 3"]))
    with pytest.raises(TranslationError, match=r'works for some sizes only.*constraints=\["n >= 3"\]'):
        jtbridge.export(jtbridge.wrap(fn), spec_of("b, n", ["n <= 512"]))
    exported = jtbridge.export(jtbridge.wrap(fn), spec_of("b, n", ["n <= 512", "n >= 3"]))
    for sizes in ((2, 3), (1, 512)):
        x = np.random.default_rng(0).normal(size=sizes).astype(np.float32)
        for got, want in zip(exported.call(x), fn(torch.tensor(x)), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


def test_sizes_computed_as_floats_are_refused():
    resized = jtbridge.wrap(lambda x: torch.nn.functional.interpolate(x, scale_factor=2))
    with pytest.raises(TranslationError, match="`sym_float` of a symbolic size has no translation"):
        jtbridge.export(resized, spec_of("b, 3, h, 8"))
    x = np.arange(24, dtype=np.float32).reshape(1, 3, 8)
    np.testing.assert_array_equal(jtbridge.export(resized, spec_of("b, 3, 8")).call(x), x.repeat(2, 2))


def test_lowering_without_symbolic_sizes_is_named():
    f = jtbridge.wrap(lambda x: torch.nn.functional.adaptive_avg_pool1d(x, 2))
    with pytest.raises(TranslationError, match=r"adaptive_avg_pool2d.*does not take these symbolic sizes. Give"):
        jtbridge.export(f, spec_of("b, 3, t"))


def test_an_error_of_torch_comes_with_the_example_sizes():
    scope = jax.export.SymbolicScope()
    specs = [jax.ShapeDtypeStruct(jax.export.symbolic_shape(s, scope=scope), jnp.float32) for s in ("b, 3", "c, 3")]
    with pytest.raises(RuntimeError, match="must match") as caught:
        jtbridge.export(jtbridge.wrap(torch.add), *specs)
    assert "examples of the symbolic sizes: b = 11, c = 13" in "".join(caught.value.__notes__)
    few = jtbridge.wrap(lambda x: torch.nn.functional.conv1d(x, torch.ones(2, 1, 300)))
    exported = jtbridge.export(few, spec_of("b, 1, n", ["n >= 300"]))
    assert exported.call(np.ones((1, 1, 400), np.float32)).shape == (1, 2, 101)


def test_batch_of_a_symbolic_program():
    def fn(x, y):
        return (x @ y.T).softmax(-1).mean(0) * x.shape[0]

    (b,) = jax.export.symbolic_shape("b")
    specs = (jax.ShapeDtypeStruct((b, 4, 5), jnp.float32), jax.ShapeDtypeStruct((b, 4), jnp.float32))
    batched = jax.vmap(jtbridge.wrap(fn), in_axes=(2, None), out_axes=1)
    exported = jtbridge.export(batched, *specs)
    for rows in (2, 3):
        x, y = (np.random.default_rng(0).normal(size=(rows, *spec.shape[1:])).astype(np.float32) for spec in specs)
        expected = [fn(torch.tensor(x[:, :, i]), torch.tensor(y)).numpy() for i in range(5)]
        np.testing.assert_allclose(exported.call(x, y), np.stack(expected, 1), rtol=1e-5)


def test_code_valid_for_only_some_sizes_is_refused():
    (b,) = jax.export.symbolic_shape("b")
    spec = jax.ShapeDtypeStruct((b,), jnp.float32)
    with pytest.raises(TranslationError, match="works for some sizes only"):
        jtbridge.export(jtbridge.wrap(lambda x: x * 2 if x.shape[0] > 12 else x), spec)
    with pytest.raises(TranslationError, match="works for some sizes only"):
        jtbridge.export(jtbridge.wrap(lambda x: x + torch.ones(11)), spec)


def test_symbolic_sizes_have_no_derivative_and_no_call():
    (b,) = jax.export.symbolic_shape("b")
    spec = jax.ShapeDtypeStruct((b,), jnp.float32)
    with pytest.raises(DifferentiationError, match="symbolic sizes, and such a program has no derivative"):
        jtbridge.export(jax.grad(lambda x: jtbridge.wrap(torch.sin)(x).sum()), spec)
    masked = jax.grad(
        lambda x: jnp.where(jtbridge.wrap(lambda x: x > x.mean())(x), x, 0).sum()
    )  # no derivative is needed
    np.testing.assert_array_equal(jtbridge.export(masked, spec).call(jnp.arange(4.0)), [0, 0, 1, 1])
    with pytest.raises(
        BackendError, match='symbolic sizes, which only a translated function can have: backend="dlpack"'
    ):
        jax.export.export(jax.jit(jtbridge.wrap(torch.sin, backend="dlpack")))(spec)
    with pytest.raises(TranslationError, match="is an expression"):
        jtbridge.export(jtbridge.wrap(torch.sin), jax.ShapeDtypeStruct((2 * b,), jnp.float32))
