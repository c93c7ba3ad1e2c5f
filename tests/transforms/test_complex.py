"""Complex numbers: JAX's gradients are the conjugates of torch's, and chains through both must agree with JAX."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jtbridge
from tests.compare import assert_close

# The same function in torch and in jax.numpy: JAX's own derivatives are the reference here.
PAIRS = {
    "holomorphic": (lambda z: torch.exp(z) * z, lambda z: jnp.exp(z) * z),
    "conjugate": (lambda z: torch.conj(z) * 2j, lambda z: jnp.conj(z) * 2j),
    "not_holomorphic": (lambda z: z * torch.conj(z) * z.abs(), lambda z: z * jnp.conj(z) * jnp.abs(z)),
    "imaginary_part": (lambda z: (z**2).imag, lambda z: jnp.imag(z**2)),
    "real_to_complex": (lambda x: x.real * torch.exp(1j * x.real), lambda x: x.real * jnp.exp(1j * x.real)),
    "fft": (lambda z: torch.fft.fft(z) ** 2, lambda z: jnp.fft.fft(z) ** 2),
}


@pytest.fixture(autouse=True)
def strict_promotion() -> Iterator[None]:
    """Override the fixture of conftest.py: the jax.numpy functions here mix real and complex numbers."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture
def z(x64: None, rng: np.random.Generator) -> jax.Array:
    return jnp.asarray(rng.normal(size=4) + 1j * rng.normal(size=4))


@pytest.mark.parametrize("name", PAIRS)
def test_vjp_and_jvp(name: str, z: jax.Array, backend: str, rng: np.random.Generator):
    torch_fn, jax_fn = PAIRS[name]
    f = jtbridge.wrap(torch_fn)
    expected, pullback = jax.vjp(jax_fn, z)
    found, our_pullback = jax.vjp(f, z)
    assert_close(found, expected)
    ct = rng.normal(size=4) if expected.dtype == jnp.float64 else rng.normal(size=4) + 1j * rng.normal(size=4)
    assert_close(our_pullback(jnp.asarray(ct))[0], pullback(jnp.asarray(ct))[0])
    dz = jnp.asarray(rng.normal(size=4) + 1j * rng.normal(size=4))
    assert_close(jax.jvp(f, (z,), (dz,))[1], jax.jvp(jax_fn, (z,), (dz,))[1])


@pytest.mark.parametrize("name", PAIRS)
def test_chain_of_jax_torch_jax(name: str, z: jax.Array, backend: str):
    torch_fn, jax_fn = PAIRS[name]
    f = jtbridge.wrap(torch_fn)

    def loss(f):
        return lambda x: jnp.sum(jnp.abs(jnp.sin(f(jnp.exp(1j * x) * (1 + 2j)))) ** 2)

    x = jnp.real(z)
    assert_close(jax.jit(jax.grad(loss(f)))(x), jax.grad(loss(jax_fn))(x))
    assert_close(jax.hessian(loss(f))(x), jax.hessian(loss(jax_fn))(x), tolerance=1e-10)


def test_holomorphic_grad(z: jax.Array, backend: str):
    f = jtbridge.wrap(lambda z: (z**3).sum())
    assert_close(jax.jit(jax.grad(f, holomorphic=True))(z), 3 * np.asarray(z) ** 2)
    assert_close(jax.jacfwd(f, holomorphic=True)(z), 3 * np.asarray(z) ** 2)


def test_real_loss_points_along_the_conjugate(z: jax.Array, backend: str):
    f = jtbridge.wrap(lambda z: (z.abs() ** 2).sum())
    assert_close(jax.grad(f)(z), 2 * np.conj(z))


def test_lazy_conjugates_reach_jax_resolved(z: jax.Array, backend: str):
    f = jtbridge.wrap(lambda z: (z.conj(), z.conj().imag, torch.view_as_real(z.conj().resolve_conj())))
    conjugate, negative, pairs = jax.jit(f)(z)
    assert_close(conjugate, np.conj(z))
    assert_close(negative, -np.asarray(z).imag)
    assert_close(pairs, np.stack([np.asarray(z).real, -np.asarray(z).imag], -1))


def test_vmap_of_complex_gradients(z: jax.Array, backend: str):
    f = jtbridge.wrap(lambda w, z: (w * z * z.conj()).abs().sum())
    expected = jax.vmap(jax.grad(lambda w, z: jnp.abs(w * z * jnp.conj(z)).sum(), argnums=1), (None, 0))
    found = jax.jit(jax.vmap(jax.grad(f, argnums=1), (None, 0)))
    rows = jnp.stack([z, 2 * z])
    assert_close(found(z, rows), expected(z, rows))


def test_complex64_is_preserved(backend: str):
    f = jtbridge.wrap(lambda z: z * 2)
    z = jnp.array([1 + 2j], jnp.complex64)
    assert jax.jit(f)(z).dtype == jnp.complex64
    assert jax.grad(lambda z: jnp.real(f(z)[0]))(z).dtype == jnp.complex64
