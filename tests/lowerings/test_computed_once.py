"""Sums of many terms that XLA's CPU compiler would compute again in each operation that reads them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.nn import functional as F

import jtbridge

KERNEL = torch.randn(4, 1, 3, 3, generator=torch.Generator().manual_seed(0))
SUMS = {
    "depthwise": (lambda x: F.conv2d(x, KERNEL.to(x.dtype), padding=1, groups=4), 1),
    "bicubic": (lambda x: F.interpolate(x, scale_factor=1.5, mode="bicubic"), 2),
    "antialiased": (lambda x: F.interpolate(x, size=(3, 3), mode="bilinear", antialias=True), 2),
    "unfold": (lambda x: F.unfold(x, 3, padding=1).unflatten(1, (4, 9)), 1),
}


def normalized(name):
    """Layer normalisation reads its argument three times."""
    f = SUMS[name][0]
    return jtbridge.wrap(lambda x: F.layer_norm(f(x).movedim(1, -1), (4,)), islands="never")


@pytest.mark.parametrize("name", SUMS)
@pytest.mark.parametrize("transform", [lambda f: f, jax.vmap], ids=["one", "batch"])
def test_a_sum_of_many_terms_is_computed_once(name, transform):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 1, 4, 6, 6)).astype(np.float32))
    x = x if transform is jax.vmap else x[0]
    program = jax.jit(transform(normalized(name))).lower(x).compile().as_text()
    assert program.count("conditional(") == SUMS[name][1]


@pytest.mark.parametrize("name", SUMS)
def test_transposes_and_second_derivatives_of_a_sum_of_many_terms(name):
    x = jnp.asarray(np.random.default_rng(1).normal(size=(1, 4, 6, 6)).astype(np.float32))
    f = jtbridge.wrap(SUMS[name][0], islands="never")
    y = jax.jit(f)(x)
    by_transpose = jax.jit(lambda y: jax.linear_transpose(f, x)(y)[0])(y)
    expected = jax.vjp(jtbridge.wrap(SUMS[name][0]), x)[1](y)[0]  # eagerly: torch's own
    np.testing.assert_allclose(by_transpose, expected, rtol=1e-4, atol=1e-5)
    loss = jtbridge.wrap(lambda x: SUMS[name][0](x).pow(3).sum(), islands="never")
    t = torch.from_numpy(np.array(x))
    hvp = torch.func.jvp(torch.func.grad(lambda x: SUMS[name][0](x).pow(3).sum()), (t,), (t.cos(),))[1]
    found = jax.jit(lambda x: jax.jvp(jax.grad(loss), (x,), (jnp.cos(x),))[1])(x)
    np.testing.assert_allclose(found, hvp, rtol=1e-3, atol=1e-4)
