"""JAX's option for the default device, which is a device or the name of a platform."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jtbridge

X = jnp.asarray([0.5, -1.0, 2.0])
TRANSFORMS = {
    "value": lambda f: f(X),
    "grad": lambda f: jax.grad(f)(X),
    "jvp": lambda f: jax.jvp(f, (X,), (X,)),
    "hessian": lambda f: jax.hessian(f)(X),
    "vmap": lambda f: jax.vmap(f)(X[None]),
    "jit": lambda f: jax.jit(jax.grad(f))(X),
}


@pytest.mark.parametrize("device", ["cpu", None, "second"])
@pytest.mark.parametrize("backend", ["auto", "dlpack", "callback", "xla"])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_default_device(transform: str, backend: str, device: str | None):
    run = TRANSFORMS[transform]
    with jax.default_device(jax.devices("cpu")[1] if device == "second" else device):
        got = run(jtbridge.wrap(lambda x: torch.sin(x).sum(), backend=backend))
        want = run(lambda x: jnp.sin(x).sum())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, want)


def test_a_jax_function_in_torch():
    x = torch.tensor([0.5, -1.0, 2.0], requires_grad=True)
    with jax.default_device("cpu"):
        jtbridge.to_torch_function(lambda x: jnp.sin(x).sum())(x).backward()
    torch.testing.assert_close(x.grad, torch.cos(x.detach()))
