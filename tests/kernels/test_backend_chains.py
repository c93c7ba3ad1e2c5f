"""The chains of operators that models write are kernels where their graph is lowered for a GPU."""

from __future__ import annotations

import collections
import importlib

import jax
import jax.numpy as jnp
import pytest
import torch
from torch.nn import functional

import jtbridge

from .harness import assert_close, kernels_in, needs_compiler, needs_triton, normal

pytestmark = [needs_triton, needs_compiler]

X = normal(2, 4, 6)


def of_unscaled_norms(x):
    h = x.float()
    h = (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)).type_as(x)
    return h.sin() + functional.rms_norm(x, (6,), eps=1e-5)


CASES = [(of_unscaled_norms, (X,), (0,), {"norm_forward": 2, "norm_backward": 2})]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("function", "arguments", "wrt", "kernels"), CASES)
def test_kernels_get_what_the_operators_get(function, arguments, wrt, kernels, dtype, monkeypatch):
    """The kernels' references run here in the place of the kernels, which have tests of their own."""
    arguments = [x.astype(dtype) for x in arguments]
    f, g = jtbridge.wrap(function), jtbridge.wrap(function, backend="xla")

    def loss(f):
        return lambda *args: jnp.sin(f(*args).astype(jnp.float32)).sum()

    assert collections.Counter(kernels_in(jax.grad(loss(f), wrt), *arguments)) == kernels
    monkeypatch.setattr(_translate, "unavailable", lambda: None)
    monkeypatch.setattr(_translate, "_GPUS", ("cpu",))
    assert jtbridge.explain(f, *arguments).backend == "triton"
    with jtbridge.config(backend="triton"):
        assert_close(f(*arguments), g(*arguments))
        assert_close(jax.grad(loss(f), wrt)(*arguments), jax.grad(loss(g), wrt)(*arguments), factor=4)
        rows = [jnp.stack([x, x + 1]) for x in arguments]
        assert_close(jax.vmap(f)(*rows), jax.vmap(g)(*rows))
        got = jax.vmap(jax.grad(loss(f), wrt))(*rows)
        assert_close(got, jax.vmap(jax.grad(loss(g), wrt))(*rows), factor=4)


_translate = importlib.import_module("jtbridge.backends._translate")
